"""The rows that a figure shows, and colours by meaning: each normaliser, mixer and position has one in every figure."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from lit_lazy.figures.canvas import NEUTRAL
from lit_lazy.support.provenance import read_constants
from lit_lazy.table.records import Table

SPARE = ("#000000", "#BB00BB", "#00CED1", "#7F3C8D", "#F0E442")
"""Colours of classes without one of their own, as custom ones are."""
PARTS = Path(__file__).parents[1] / "attention"
"""Folder of the project's classes, each of which says its colour, and its name if people write it otherwise."""


def choose_colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each class: its own, else the next spare one, and grey after those; grey for "", no class."""
    spare = iter(SPARE)
    own = {name: read_constants(name, PARTS).get("colour") for name in names}
    return {name: colour or (next(spare, NEUTRAL) if name else NEUTRAL) for name, colour in own.items()}


class Colours:
    """The colours of a table's variants: by normaliser, or by position if all have one normaliser."""

    def __init__(self, table: Table, variants: Iterable[str]) -> None:
        shown = set(variants)
        rows = [row for row in table.rows if row.variant in shown and row.normaliser]
        by_position = len({row.normaliser for row in rows}) == 1 < len({row.position for row in rows})
        names = {row.variant: row.position if by_position else row.normaliser for row in table.rows}
        colours = choose_colours([*names.values()])  # of all rows, so that a figure of some has the same
        self._names = {row.variant: names[row.variant] for row in rows}
        self._colours = {name: colours[name] for name in self._names.values()}

    def __getitem__(self, variant: str) -> str:
        return self._colours[self._names[variant]] if variant in self._names else NEUTRAL

    def make_legend_handles(self) -> list[Line2D]:
        """Legend entries of the colours; empty if all variants have the same."""
        if len(self._colours) < 2:
            return []
        return [
            Line2D([], [], color=colour, linestyle="", marker="o", label=spoken or name or "no attention")
            for name, colour in self._colours.items()
            for spoken in [read_constants(name, PARTS).get("spoken")]
        ]


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
    measures = table.measures[column.key]

    def rank(variant: str) -> tuple[bool, bool, float]:
        mean = measures[variant].mean
        return variant != table.baseline, mean is None, sign * (mean or 0.0)

    best = set(sorted(shown, key=rank)[:MOST_ROWS])
    which = "highest" if sign < 0 else "lowest"
    return (
        [variant for variant in shown if variant in best],
        f"; shown of {len(shown)}: the {MOST_ROWS} with the {which} {column.title}, baseline included",
    )
