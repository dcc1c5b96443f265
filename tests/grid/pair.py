"""An ablation for tests: two rows that train, and one that diverges."""

ABLATION = '''
"""Two rows and one that diverges."""
from lit_lazy.attention import Elastic, LearnedBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS

ablation = Ablation(
    name="pair",
    baseline="softmax",
    seeds=(0, 1),
    columns=COLUMNS,
    base="backcopy_tiny",
    rows=(
        Row("softmax", {"model.attention.normaliser": Softmax()}, "ours"),
        Row("lazy", {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()}, "ours"),
        Row("wild", {"train.lr": 1e20, "train.log_every": 1}, "ours", seeds=(0,)),
    ),
)
'''
