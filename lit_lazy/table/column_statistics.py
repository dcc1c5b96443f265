"""Statistics of one column of a table: each row's mean and difference to the baseline, and what the tests separate."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from lit_lazy.table.columns import Column
from lit_lazy.table.statistics import (
    ALPHA,
    FEWEST_SEEDS,
    Effect,
    Estimate,
    SeedValues,
    compute_contrast,
    drop_undefined,
    estimate,
    holm,
    minimum_detectable_effect,
    tost,
)

NOT_COMPARED = Effect(None, None, 0)
_OF_DIFFERENCE = {"mean": "diff"} | {name: f"diff_{name}" for name in ("ci95", "n", "se", "df", "low", "high")}


@dataclass(frozen=True, kw_only=True)
class Measure(Estimate):
    """One metric of one row over its complete cells; `values` are the defined ones by seed.

    `difference` compares the row with the baseline. `p_same` is the p value of equivalence to the baseline within the
    column's margin (TOST), after Holm over the rows.
    """

    values: dict[int, float] = field(default_factory=dict)
    difference: Effect = NOT_COMPARED
    p_same: float | None = None

    def flatten(self) -> dict[str, Any]:
        """The numbers as in table.csv, where those of the difference stand next to the row's own mean, ci95 and n."""
        difference = {_OF_DIFFERENCE.get(name, name): value for name, value in vars(self.difference).items()}
        own = {"mean": self.mean, "ci95": self.ci95, "n": self.n, "undefined": self.undefined}
        return own | difference | {"p_same": self.p_same}


@dataclass(frozen=True)
class Summary:
    """The tests of one column over all rows.

    `compared` is the size of Holm's family: the rows with at least three seeds. `tested` of them have a p value.
    `separates` lists the rows with p < 0.05 after Holm, `same` the rows equivalent to the baseline within the column's
    margin after Holm. `seeds` are the distinct numbers of seeds.
    """

    compared: int
    tested: int
    separates: tuple[str, ...]
    same: tuple[str, ...]
    seeds: tuple[int, ...]
    detectable: dict[int, tuple[float, float]]
    """By n, the median minimum detectable effect over the tested rows with n seeds: at alpha = 0.05, and at Holm's
    first step, alpha = 0.05 / rows compared."""


def measure_rows(column: Column, values: Mapping[str, SeedValues], baseline: str) -> dict[str, Measure]:
    """The measures of a column by row, from its values by row and seed. No row is compared with a baseline of ""."""
    differences = {name: {name: 1.0, baseline: -1.0} for name in values if baseline and name != baseline}
    effects = compute_effects(column, values, differences)
    same = {} if column.margin is None else {name: tost(effect, column.margin) for name, effect in effects.items()}
    p_same = _adjust_p_values(same, effects)
    measures = {}
    for name, of in values.items():
        own, effect = vars(estimate(of, column.bounds)), effects.get(name, NOT_COMPARED)
        measures[name] = Measure(**own, values=drop_undefined(of), difference=effect, p_same=p_same.get(name))
    return measures


def compute_effects(
    column: Column, values: Mapping[str, SeedValues], contrasts: Mapping[str, Mapping[str, float]]
) -> dict[str, Effect]:
    """The effects of contrasts, given as weights of rows by name, in one family of tests."""
    effects = {}
    for name, weights in contrasts.items():
        effect = compute_contrast(values, weights, column.bounds)
        if column.by_construction and effect.p is not None:
            effect = replace(effect, test="construction", p=None)
        effects[name] = effect
    p_adj = _adjust_p_values({name: effect.p for name, effect in effects.items()}, effects)
    return {
        name: replace(effect, p_adj=p_adj.get(name), mde=minimum_detectable_effect(effect))
        for name, effect in effects.items()
    }


def _count_compared(effects: Mapping[str, Effect]) -> int:
    return sum(effect.n >= FEWEST_SEEDS for effect in effects.values())


def _adjust_p_values(p_values: Mapping[str, float | None], effects: Mapping[str, Effect]) -> dict[str, float]:
    """Holm's adjusted p values; the family are all effects that could be compared."""
    return holm({name: p for name, p in p_values.items() if p is not None}, family=_count_compared(effects))


def summarise(measures: Mapping[str, Measure]) -> Summary:
    """The tests of a column's measures by row."""
    effects = {name: measure.difference for name, measure in measures.items()}
    compared = _count_compared(effects)
    tested = [effect for effect in effects.values() if effect.test == "t"]

    def median_mde(alpha: float, n: int) -> float:
        found = (minimum_detectable_effect(effect, alpha) for effect in tested if effect.n == n)
        return median(mde for mde in found if mde is not None)

    return Summary(
        compared=compared,
        tested=len(tested),
        separates=tuple(name for name, effect in effects.items() if effect.separated),
        same=tuple(name for name, of in measures.items() if of.p_same is not None and of.p_same < ALPHA),
        seeds=tuple(sorted({effect.n for effect in effects.values() if effect.n})),
        # Rows with more seeds detect much smaller differences, so a median over all rows would describe none of them.
        detectable={
            n: (median_mde(ALPHA, n), median_mde(ALPHA / compared, n)) for n in sorted({effect.n for effect in tested})
        },
    )
