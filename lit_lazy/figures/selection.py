"""The rows that a figure with a line or a panel for each row shows."""

from collections.abc import Iterable

from lit_lazy.table.records import Table

MOST_ROWS = 150
"""A figure of 450 rows would be longer than a WebP image can be."""


def choose_rows(table: Table, variants: Iterable[str]) -> tuple[list[str], str]:
    """The variants to show, the baseline first, and an addition to the title.

    If there are more than MOST_ROWS, only those with the best means in the first main column are shown.
    """
    shown = sorted(variants, key=lambda variant: variant != table.baseline)
    if len(shown) <= MOST_ROWS:
        return shown, ""
    column = [*table.main_columns, *table.columns][0]
    sign = -1 if column.better == "higher" else 1
    measures = table.collect_measures(column.key)

    def rank(variant: str) -> tuple[bool, bool, float]:
        mean = measures[variant].mean
        return variant != table.baseline, mean is None, sign * (mean or 0.0)

    best = set(sorted(shown, key=rank)[:MOST_ROWS])
    which = "highest" if sign < 0 else "lowest"
    return (
        [variant for variant in shown if variant in best],
        f"; shown of {len(shown)}: the {MOST_ROWS} with the {which} {column.title}, baseline included",
    )
