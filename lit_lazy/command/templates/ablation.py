"""My ablation: which part makes the difference?

`lit-lazy ablate run my_ablation.py` trains every row with every seed and prints the table.
"""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS

ablation = Ablation(
    name="my_ablation",  # names the folder of results, runs/NAME-BASE
    baseline="softmax",  # the row that all others are compared with
    seeds=(0, 1, 2),  # trainings of each row; fewer than three give no test
    columns=COLUMNS,  # or your own: (Column("loss/excess", "excess loss", "lower", 4, "nats"),)
    base="backcopy_tiny",  # the experiment; this one takes seconds and says nothing, `backcopy` takes minutes
    # A row: its name, what it changes in the experiment, by a path of `lit-lazy fields backcopy`, and where it is from.
    rows=(
        Row("softmax", {"model.attention.normaliser": Softmax()}, source="ours"),
        Row("elastic", {"model.attention.normaliser": Elastic()}, source="ours"),
        Row("elastic window 8", {"model.attention.normaliser": Elastic(), "model.attention.window": 8}, source="ours"),
    ),
    # primary=("loss/excess",),  # the outcome that decides; all others are then exploratory
)
