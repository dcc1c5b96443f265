"""Would other learning rates change what the ladder shows? Those beside the chosen ones, on all tokens; exploratory.

The chosen rates are from one seed and a quarter of the tokens (`frontier_rates`): at 300k 0.004 for softmax and 0.002
for softmax with a bias. The seeds are two of the ladder's.
"""

from frontier_rates import LOSS, RULES

from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.stages import at_rate
from lit_lazy.table.columns import COLUMNS

BESIDE = {"softmax": (8e-3, 4e-3), "softmax + bias": (4e-3, 8e-3)}

ablation = Ablation(
    name="frontier_rates_full",
    base="frontier_300k",
    baseline=at_rate("softmax", 4e-3),
    seeds=(100, 101),
    columns=(LOSS, *COLUMNS),
    primary=(LOSS.key,),
    rows=tuple(
        Row(at_rate(name, rate), {**RULES[name], "train.lr": rate}, source="ours")
        for name, rates in BESIDE.items()
        for rate in rates
    ),
)
