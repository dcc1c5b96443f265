"""The settings of a run: frozen dataclasses, command-line overrides, experiment and ablation files."""

from lit_lazy.config.files import experiment
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at

__all__ = ["ModelConfig", "RunConfig", "TrainConfig", "experiment", "replace_at"]
