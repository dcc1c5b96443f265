"""Optional measurements of a run's final model, in addition to the metrics of every run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lit_lazy.data import DataConfig


class Evaluation(ABC):
    """A measurement of a trained model. Leaves are frozen dataclasses, which are part of a run's settings and key."""

    LEAVES_IN: ClassVar[str] = "lit_lazy.measure"
    """Package whose modules define the project's evaluations."""

    def check(self, model: Any, data: DataConfig) -> None:  # noqa: B027 (most accept any model)
        """Raise a one-line ValueError if the model cannot be measured; called before anything is created.

        model: a `DecoderLM` without weights, on the meta device. data: its training data.
        """

    def files(self) -> Sequence[Path]:
        """Files that the measurement reads in addition to the run's data; their content is part of the run's key."""
        return ()

    @abstractmethod
    def measure(self, model: Any, data: DataConfig) -> dict[str, float]:
        """Metrics by name, of a trained `DecoderLM` on its device; undefined metrics may be missing or not finite."""
