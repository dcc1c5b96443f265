"""Contrasts of a factorial design."""

from collections.abc import Mapping

from lit_lazy.table.records import Contrast


def main_effects(design: Mapping[str, Mapping[str, str]]) -> tuple[Contrast, ...]:
    """Contrasts of each level of a factor with the factor's first level, averaged over the other factors.

    `design` maps a row to its level of every factor; the first level is that of the first row. In an incomplete design
    the average is over the points of the other factors that have both levels; levels without a common point have no
    contrast.
    """
    contrasts = []
    for factor in next(iter(design.values()), {}):
        rows = {(levels[factor], _drop_factor(levels, factor)): row for row, levels in design.items()}
        first, *further = dict.fromkeys(levels[factor] for levels in design.values())
        for level in further:
            shared = [others for row_level, others in rows if row_level == level and (first, others) in rows]
            weights = {rows[level, others]: 1 / len(shared) for others in shared}
            weights |= {rows[first, others]: -1 / len(shared) for others in shared}
            if shared:
                contrasts.append(Contrast(f"{factor}: {level} - {first}", weights))
    return tuple(contrasts)


def _drop_factor(levels: Mapping[str, str], factor: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, level) for name, level in levels.items() if name != factor))
