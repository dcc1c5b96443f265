"""What is measured of a run's final model beside the metrics that every run has."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lit_lazy.data import DataConfig


class Evaluation(ABC):
    """A measurement of a trained model. Leaves are frozen dataclasses, part of a run's settings and of its key."""

    LEAVES_IN: ClassVar[str] = "lit_lazy.measure"
    """Package whose modules define the project's own."""

    def check(self, model: Any, data: DataConfig) -> None:  # noqa: B027 (most serve any model)
        """Raise ValueError, in one line, where a model cannot be measured so; before anything is created.

        model: a `DecoderLM` without weights, on the meta device. data: those that it is to be trained on.
        """

    def files(self) -> Sequence[Path]:
        """What a measurement reads beside the run's data; the content is part of the run's key."""
        return ()

    @abstractmethod
    def measure(self, model: Any, data: DataConfig) -> dict[str, float]:
        """Metrics by name, of a trained `DecoderLM` where it is; one that is undefined may be missing or not finite."""
