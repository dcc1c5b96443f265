"""Colours by meaning: each normaliser and each position has the same colour in every figure."""

from collections.abc import Iterable

from matplotlib.lines import Line2D

from lit_lazy.figures.canvas import FIRST, NEUTRAL, SECOND
from lit_lazy.table.records import Table

NORMALISERS = {
    "Softmax": SECOND,
    "Elastic": FIRST,
    "OffByOne": "#009E73",
    "SinkLogit": "#CC79A7",
    "ClippedSoftmax": "#E69F00",
    "Softpick": "#56B4E9",
    "Sigmoid": "#882255",
    "Relu": "#117733",
    "Entmax15": "#B07AF5",
    "Sparsemax": "#332288",
    "Thresholded": "#DDCC77",
    "ThresholdedDifferential": "#EE3377",
    "ASEntmax": "#C0A0D0",
    "TopK": "#B2DF8A",
    "SSMax": "#999933",
    "AffineScaled": "#7FB800",
    "Differential": "#661100",
    "RetNet": "#8C6D00",
    "Mamba2": "#FF6F91",
    "GatedDeltaNet": "#44AA99",
}
"""By class, layers without attention last: Okabe and Ito's colours, then Tol's muted ones, which are also
distinguishable with common colour blindness."""
POSITIONS = {"Rope": "#004488", "LearnedAbsolute": "#DDAA33", "NoPosition": "#BB5566"}
"""Tol's high-contrast scheme, also distinguishable in greyscale."""

SPOKEN = {
    "OffByOne": "off by one",
    "SinkLogit": "sink logit",
    "ClippedSoftmax": "clipped softmax",
    "Relu": "ReLU/n",
    "Entmax15": "1.5-entmax",
    "AffineScaled": "affine-scaled softmax",
    "ThresholdedDifferential": "thresholded differential",
    "TopK": "top k",
    "GatedDeltaNet": "Gated DeltaNet",
    "Rope": "RoPE",
    "LearnedAbsolute": "learned absolute",
    "NoPosition": "no position",
    "": "no attention",
}
"""Display names of classes whose name is not how people write them."""


class Colours:
    """The colours of a table's variants: by normaliser, or by position if all have one normaliser; unknown is grey."""

    def __init__(self, table: Table, variants: Iterable[str]) -> None:
        shown = set(variants)
        rows = [row for row in table.rows if row.variant in shown and row.normaliser]
        by_position = len({row.normaliser for row in rows}) == 1 < len({row.position for row in rows})
        palette = POSITIONS if by_position else NORMALISERS
        self._names = {row.variant: row.position if by_position else row.normaliser for row in rows}
        self._colours = {name: palette.get(name, NEUTRAL) for name in self._names.values()}

    def __getitem__(self, variant: str) -> str:
        return self._colours[self._names[variant]] if variant in self._names else NEUTRAL

    def make_legend_handles(self) -> list[Line2D]:
        """Legend entries of the colours; empty if all variants have the same."""
        if len(self._colours) < 2:
            return []
        return [
            Line2D([], [], color=c, linestyle="", marker="o", label=SPOKEN.get(name, name))
            for name, c in self._colours.items()
        ]
