"""An ablation for tests: two rows on the tiny probe, plus a test's additions."""

ODD = "<i>lazy</i> & co"
"""A name that is markup."""
WILD = 'Row("wild", {"train.lr": 1e20, "train.log_every": 1}, "ours", seeds=(0,)),'
"""A row that diverges."""


def two_rows(name: str, lazy: str = "lazy", code: str = "", more: str = "") -> str:
    """The source of an ablation with `softmax` and `lazy`. code: runs first; more: further rows."""
    return f'''
"""Two rows on the tiny probe."""
import sys
from pathlib import Path

from lit_lazy.attention import Elastic, LearnedBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS

{code}

ablation = Ablation(
    name="{name}",
    baseline="softmax",
    seeds=(0, 1),
    columns=COLUMNS,
    base="backcopy_tiny",
    rows=(
        Row("softmax", {{"model.attention.normaliser": Softmax()}}, "ours"),
        Row("{lazy}", {{"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()}}, "ours"),
        {more}
    ),
)
'''
