"""What a grid's folder holds of one cell: its state, settings, metrics and reason, from its run folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lit_lazy.config.serialisation import flatten
from lit_lazy.table.records import Observation
from lit_lazy.training.run_folder import RunResult, is_locked, read_failure, read_settings


@dataclass(frozen=True)
class CellRecord:
    """What a grid's folder holds of one cell of its plan."""

    variant: str
    seed: int
    key: str
    folder: Path
    """The run folder."""
    axes: Mapping[str, str]
    """Values of the plan's axes by name."""

    @cached_property
    def result(self) -> RunResult | None:
        """The result of a finished training."""
        return RunResult.peek(self.folder)

    @property
    def facts(self) -> dict[str, str | int | float]:
        """What its data source says of itself; {} without a result."""
        return {} if self.result is None else self.result.data

    @cached_property
    def status(self) -> Literal["complete", "failed", "running", "waiting"]:
        if self.result is not None:
            return "complete"
        if self.reason:
            return "failed"
        return "running" if is_locked(self.folder) else "waiting"

    @cached_property
    def reason(self) -> str:
        """Why its last training failed; "" if it did not."""
        return read_failure(self.folder)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The canonical config by dotted path; none before the training began."""
        config = self.result.config if self.result is not None else read_settings(self.folder)
        return flatten(config)

    @property
    def metrics(self) -> dict[str, float]:
        """Of a finished training, its timings as `time/NAME` included."""
        result = self.result
        return {} if result is None else {**result.metrics, **{f"time/{k}": v for k, v in result.timings.items()}}

    @property
    def tokens(self) -> int:
        """How many its training sees; 0 before it began, and of a task whose sequences have no set length."""
        shape = "train.steps", "train.batch_size", "data.context_length"
        return math.prod(int(self.settings.get(path, 0)) for path in shape)

    @property
    def normaliser(self) -> str:
        """Class name of the normaliser, or of the mixer if that is not attention; "" before the training began."""
        mixer = str(self.settings.get("model.mixer", "SelfAttention"))
        return str(self.settings.get("model.attention.normaliser", "")) if mixer == "SelfAttention" else mixer

    def observe(self) -> Observation:
        """The cell as a table takes it."""
        result = self.result
        if result is None:
            return Observation(self.variant, self.seed, self.status, reason=self.reason)
        return Observation(
            variant=self.variant,
            seed=self.seed,
            status=self.status,
            metrics=self.metrics,
            labels={**result.environment, **result.labels},
            normaliser=self.normaliser,
            position=str(self.settings.get("model.position", "")),
            git_sha=result.environment["git_sha"],
            environment=result.made_in,
            taken_from=result.taken_from,
        )
