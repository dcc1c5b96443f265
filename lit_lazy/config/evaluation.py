"""Optional measurements of a run's final model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lit_lazy.data import DataConfig
from lit_lazy.support.checked_fields import CheckedFields


class Evaluation(CheckedFields, ABC):
    """A measurement of a trained model. Subclasses are frozen dataclasses, part of a run's settings and key."""

    LEAVES_IN: ClassVar[str] = "lit_lazy.measure"
    """Package with the project's subclasses."""

    def check(self, model: Any, data: DataConfig) -> None:
        """Raise a one-line ValueError if a model cannot be measured; called before anything is created.

        model: a `DecoderLM` without weights, on the meta device. data: its training data.
        """

    def files(self) -> Sequence[Path]:
        """Files that the measurement reads besides the run's data; their content is part of the run's key."""
        return ()

    @abstractmethod
    def measure(self, model: Any, data: DataConfig) -> dict[str, float]:
        """Metrics of a trained `DecoderLM` by name, on its device; undefined ones may be missing or not finite."""
