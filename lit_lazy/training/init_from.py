"""The check of a run's initial weights."""

from pathlib import Path

from lit_lazy.config.schema import RunConfig
from lit_lazy.data.base import Outline


def check_init_from(cfg: RunConfig, data: Outline) -> None:
    """Raises a one-line ValueError if the run's initial weights cannot be loaded."""
    if cfg.init_from is not None:
        # Imports Lightning, which costs a command that only starts workers four seconds.
        from lit_lazy.training.checkpoints import check_matching_weights

        check_matching_weights(Path(cfg.init_from), cfg, data)
