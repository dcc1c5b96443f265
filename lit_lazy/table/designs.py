"""Contrasts of a factorial design."""

import itertools
from collections.abc import Mapping

from lit_lazy.table.columns import Contrast

MOST_LEVELS = 8
"""A factor with more levels is a curve rather than a set of interactions."""


def main_effects(design: Mapping[str, Mapping[str, str]]) -> tuple[Contrast, ...]:
    """Contrasts of each level of a factor with the factor's first level, averaged over the other factors.

    `design` maps a row to its level of every factor; the first level is that of the first row. In an incomplete design
    the average is over the points of the other factors that have both levels; levels without a common point have no
    contrast.
    """
    contrasts = []
    for factor in next(iter(design.values()), {}):
        rows = {(levels[factor], _drop_factors(levels, factor)): row for row, levels in design.items()}
        first, *further = dict.fromkeys(levels[factor] for levels in design.values())
        for level in further:
            shared = [others for row_level, others in rows if row_level == level and (first, others) in rows]
            weights = {rows[level, others]: 1 / len(shared) for others in shared}
            weights |= {rows[first, others]: -1 / len(shared) for others in shared}
            if shared:
                contrasts.append(Contrast(f"{factor}: {level} - {first}", weights))
    return tuple(contrasts)


def interactions(design: Mapping[str, Mapping[str, str]]) -> tuple[Contrast, ...]:
    """Two-way interactions: how much the effect of a factor's level, against the first, depends on another factor's.

    (a2 b2 - a1 b2) - (a2 b1 - a1 b1), averaged over the points of the other factors that have all four. `design` as for
    `main_effects`. Factors with more than MOST_LEVELS levels have none.
    """
    levels = {
        factor: [*dict.fromkeys(at[factor] for at in design.values())] for factor in next(iter(design.values()), {})
    }
    contrasts = []
    for a, b in itertools.combinations([factor for factor, found in levels.items() if len(found) <= MOST_LEVELS], 2):
        rows = {(at[a], at[b], _drop_factors(at, a, b)): row for row, at in design.items()}
        others = dict.fromkeys(rest for _, _, rest in rows)
        (first_a, *further_a), (first_b, *further_b) = levels[a], levels[b]
        for level_a, level_b in itertools.product(further_a, further_b):
            signs = {(level_a, level_b): 1, (first_a, level_b): -1, (level_a, first_b): -1, (first_a, first_b): 1}
            shared = [rest for rest in others if all((*corner, rest) in rows for corner in signs)]
            if shared:
                weights = {rows[*corner, rest]: sign / len(shared) for rest in shared for corner, sign in signs.items()}
                contrasts.append(Contrast(f"{a} x {b}: ({level_a} - {first_a}) x ({level_b} - {first_b})", weights))
    return tuple(contrasts)


def _drop_factors(levels: Mapping[str, str], *factors: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, level) for name, level in levels.items() if name not in factors))
