"""Colours by meaning: each normaliser, mixer and position has the same colour in every figure."""

import ast
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from matplotlib.lines import Line2D

from lit_lazy.figures.canvas import NEUTRAL
from lit_lazy.table.records import Table

SPARE = ("#000000", "#BB00BB", "#00CED1", "#7F3C8D", "#F0E442")
"""Colours of classes without one of their own, as custom ones are."""


def choose_colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each class: its own, else the next spare one, and grey after those; grey for "", no class."""
    spare = iter(SPARE)
    own = {name: _read(name, "colour") for name in names}
    return {name: colour or (next(spare, NEUTRAL) if name else NEUTRAL) for name, colour in own.items()}


def speak(name: str) -> str:
    """How people write the name of a class."""
    return _read(name, "spoken") or name or "no attention"


def _read(name: str, attribute: str) -> str:
    """An attribute that a class of this name has itself: what it inherits is another's."""
    if "lit_lazy.attention" not in sys.modules:
        return _read_source().get(name, {}).get(attribute, "")
    from lit_lazy.attention.drawn import Drawn
    from lit_lazy.config.serialisation import find_leaf_classes

    cls = find_leaf_classes(Drawn).get(name, Drawn)
    return vars(cls).get(attribute, "")


@cache
def _read_source() -> dict[str, dict[str, str]]:
    """The same of the project's classes, from their files: their import takes torch, which most figures do without."""
    found = {}
    for file in sorted((Path(__file__).parents[1] / "attention").glob("*.py")):
        for cls in (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)):
            for line in (line for line in cls.body if isinstance(line, ast.Assign)):
                names = ast.unparse(line.targets[0]).strip("()").split(", ")
                if {"colour", "spoken"} & {*names}:
                    value = ast.literal_eval(line.value)
                    found[cls.name] = dict(zip(names, value if isinstance(value, tuple) else [value], strict=True))
    return found


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
            Line2D([], [], color=c, linestyle="", marker="o", label=speak(name)) for name, c in self._colours.items()
        ]
