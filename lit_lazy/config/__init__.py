"""Settings of a run: frozen dataclasses, command-line overrides, experiment and ablation files."""

from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment

__all__ = ["ModelConfig", "RunConfig", "TrainConfig", "experiment", "replace_at"]
