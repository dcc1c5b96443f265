"""Which learning rate suits each rival? Five rates and two seeds for every row; first stage of the tuned rivals.

Run on the experiments of the second stages: `--base backcopy` and `--base stdlib_small`.
"""

from dataclasses import replace

from rivals import ablation as rivals

from lit_lazy.grid.ablation import Ablation
from lit_lazy.grid.stages import at_best_rate, at_rate

RATES = (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)
ROWS = rivals.rows

ablation = replace(
    rivals,
    name="rivals_rates",
    baseline=at_rate(rivals.baseline, RATES[0]),
    seeds=(20, 21),
    rows=tuple(
        replace(row, name=at_rate(row.name, rate), changes={**row.changes, "train.lr": rate})
        for row in ROWS
        for rate in RATES
    ),
)


def tune(name: str, base: str, seeds: tuple[int, ...]) -> Ablation:
    """The rivals on an experiment, each row at its best rate there."""
    rows = tuple(at_best_rate(row, of=row.name, folder=f"{ablation.name}-{base}") for row in ROWS)
    return replace(rivals, name=name, base=base, seeds=seeds, rows=rows)
