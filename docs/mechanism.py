"""Illustration of the mechanism on two rows of scores: `python docs/mechanism.py docs/mechanism`."""

import sys

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_lazy.figures.canvas import NEUTRAL, WIDTH, choose_colours, new_figure, save_figure, use_style

TAU = 1.0
SPREAD = 0.25
"""Standard deviation of the scores of non-matching keys."""
MATCH, SCORE = 8, 3.5
"""Position of the matching key, counted from 1, and its score."""
KEYS = 12


def weights(scores: np.ndarray, tau: float) -> np.ndarray:
    """Weights of a row of n visible keys, max(softmax(scores) - tau / n, 0) (docs/method.md, section 2)."""
    p = np.exp(scores - scores.max())
    return np.maximum(p / p.sum() - tau / len(scores), 0)


@use_style()
def mechanism_figure() -> Figure:
    """Draw a row with one matching key and a row with none, under softmax and under max(softmax - tau / n, 0)."""
    flat = SPREAD * np.random.default_rng(0).normal(size=KEYS)
    matching = flat.copy()
    matching[MATCH - 1] = SCORE
    colours = choose_colours(("Softmax", "Elastic"))
    figure = new_figure(WIDTH, 3.6, "Attention of a query with and without a matching key")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for panel, row, scores in zip(panels, ("one key matches", "no key matches"), (matching, flat), strict=True):
        _draw_bars(panel[0], weights(scores, 0.0), weights(scores, 0.0), colours["Softmax"])
        panel[0].axhline(TAU / KEYS, color="black", linestyle="--", linewidth=1)
        _draw_bars(panel[1], weights(scores, TAU), weights(scores, 0.0), colours["Elastic"])
        panel[0].set_ylabel(f"{row}\nweight")
    titles = "softmax: the weights sum to 1", "Lazy: minus a threshold θ, clipped at 0"
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title)
    panels[0, 0].text(0.6, 1.25 * TAU / KEYS, "θ", va="bottom")
    remarks = "the sum must be 1: training puts\nmuch of it on the first key, a sink", "the sum may fall to 0"
    for axes, text in zip(panels[1], remarks, strict=True):
        axes.set_xlabel("key")
        axes.text(0.98, 0.94, text, transform=axes.transAxes, ha="right", va="top")
    return figure


def _draw_bars(axes: Axes, kept: np.ndarray, before: np.ndarray, colour: str) -> None:
    """Draw the weights of a row, with the weights before the cut outlined."""
    keys = np.arange(1, len(kept) + 1)
    axes.bar(keys, before, color="none", edgecolor=NEUTRAL, linewidth=0.6, alpha=0.6)
    axes.bar(keys, kept, color=colour)
    axes.set_xticks(keys)
    axes.text(0.02, 0.94, f"sum {kept.sum():.2f}", transform=axes.transAxes, va="top", fontweight="bold")


if __name__ == "__main__":
    save_figure(mechanism_figure(), sys.argv[1])
