"""Settings of a run: frozen dataclasses, command-line overrides, experiment and ablation files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
    from lit_lazy.config.serialisation import replace_at
    from lit_lazy.config.user_files import experiment

__all__ = ["ModelConfig", "RunConfig", "TrainConfig", "experiment", "replace_at"]
_MODULES = {"replace_at": "serialisation", "experiment": "user_files"}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is (PEP 562): the schema needs torch, a grid's status does not."""
    if name in __all__:
        return getattr(import_module(f"lit_lazy.config.{_MODULES.get(name, 'schema')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
