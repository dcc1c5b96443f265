"""Contrasts of a factorial design."""

from collections.abc import Mapping

from lit_lazy.table.records import Contrast


def main_effects(design: Mapping[str, Mapping[str, str]]) -> tuple[Contrast, ...]:
    """Each level of each factor against the factor's first, averaged over the other factors.

    `design` has a row's level of every factor, by row and factor; a level comes first that its first row has. Where
    rows are missing from the product, the average is over those points of the other factors that have both levels; two
    levels that share none have no contrast.
    """
    contrasts = []
    for factor in next(iter(design.values()), {}):
        rows = {(levels[factor], _drop_factor(levels, factor)): row for row, levels in design.items()}
        first, *further = dict.fromkeys(levels[factor] for levels in design.values())
        for level in further:
            shared = [others for at, others in rows if at == level and (first, others) in rows]
            weights = {rows[level, others]: 1 / len(shared) for others in shared}
            weights |= {rows[first, others]: -1 / len(shared) for others in shared}
            if shared:
                contrasts.append(Contrast(f"{factor}: {level} - {first}", weights))
    return tuple(contrasts)


def _drop_factor(levels: Mapping[str, str], factor: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, level) for name, level in levels.items() if name != factor))
