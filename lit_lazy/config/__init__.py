"""The settings of a run: frozen dataclasses, overrides from the command line, experiment and ablation files."""

from lit_lazy.config.canonical import replace_at
from lit_lazy.config.files import experiment
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig

__all__ = ["ModelConfig", "RunConfig", "TrainConfig", "experiment", "replace_at"]
