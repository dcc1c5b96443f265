"""Figures of tables, trainings and diagnostics in one style."""

from lit_lazy.figures.ablation import (
    list_learned,
    loss_against_sparsity,
    loss_over_training,
    parameter_over_training,
    sink_over_training,
)
from lit_lazy.figures.canvas import Image, render_image, save_figure
from lit_lazy.figures.effects import effects_figure, verdict_figure
from lit_lazy.figures.heads import FIGURE_NAMES, draw_run_figures

__all__ = [
    "FIGURE_NAMES",
    "Image",
    "draw_run_figures",
    "effects_figure",
    "list_learned",
    "loss_against_sparsity",
    "loss_over_training",
    "parameter_over_training",
    "render_image",
    "save_figure",
    "sink_over_training",
    "verdict_figure",
]
