"""Grids for tests of what reads them: a plan and cells, made without training."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_lazy.config.key import SCHEMA
from lit_lazy.grid.grid_folder import GridFolder, read_grid
from lit_lazy.grid.plan import PLAN, Plan
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.support.disk import write_text
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import RowInfo
from lit_lazy.training import run_folder
from lit_lazy.training.callbacks_and_loggers import MetricFile

ROWS = ("softmax", "lazy")


def make_key(variant: str, seed: int) -> str:
    return hashlib.sha256(f"{variant} {seed}".encode()).hexdigest()[:12]


class MadeGrid:
    """The folder `made` in a runs folder: the first row is the baseline, each has seeds 0 and 1."""

    def __init__(self, runs: Path, rows: Sequence[str] = ROWS, name: str = "made") -> None:
        self.folder = runs / name
        self.folder.mkdir(parents=True)
        infos = tuple(RowInfo(row, "ours", (0, 1), "tiny") for row in rows)
        keys = {row: {str(seed): make_key(row, seed) for seed in (0, 1)} for row in rows}
        axes = {row: {"rule": row} for row in rows}
        self.plan = Plan(
            "made", "tiny", rows[0], "lit-lazy ablate run made", infos, COLUMNS, (), ("rule",), {}, {}, SCHEMA,
            keys=keys, axis_values=axes, config={"train": {"steps": 3}},
        )  # fmt: skip
        self.change_plan()

    def change_plan(self, **changes: Any) -> None:
        self.plan = replace(self.plan, **changes)
        write_text(self.folder / PLAN, self.plan.to_json())

    def read(self) -> GridFolder:
        return read_grid(self.folder)

    def locate(self, variant: str, seed: int) -> Path:
        return run_folder.locate_cell(self.folder, make_key(variant, seed))

    def make_config(self, seed: int, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A cell's config, with no more than readers ask of it."""
        shape = {"train": {"steps": 3, "batch_size": 8}, "data": {"context_length": 16}}
        return {"seed": seed, "model": dict(model or {}), **shape}

    def train(self, variant: str, seed: int, steps: range) -> Path:
        """Begin or resume a cell: log the loss 1 / step of each step; returns its run folder."""
        folder = self.locate(variant, seed)
        logger = MetricFile(folder)
        run_folder.clear_failure(folder)
        run_folder.write_settings(folder, make_key(variant, seed), "", self.make_config(seed))
        for step in steps:
            logger.log_metrics({"train/loss": 1 / step}, step)
        return folder

    def finish(
        self,
        variant: str,
        seed: int,
        metrics: Mapping[str, float] | None = None,
        model: Mapping[str, Any] | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        folder = self.locate(variant, seed)
        folder.mkdir(parents=True, exist_ok=True)
        run_folder.clear_failure(folder)
        if diagnostics is not None:
            diagnostics.save(folder / run_folder.DIAGNOSTICS)
        run_folder.RunResult(
            key=make_key(variant, seed),
            config=self.make_config(seed, model),
            data={},
            metrics={"loss/val": 1.0 + seed, **(metrics or {})},
            labels={"backend": "rules"},
            timings={"train_seconds": 2.0},
            environment={"git_sha": "c0ffee", "torch": "2"},
            fingerprint="data",
            execution={},
            training_key=make_key(variant, seed),
            evaluations={},
        ).write(folder)

    def fail(self, variant: str, seed: int, reason: str) -> None:
        run_folder.write_failure(self.locate(variant, seed), reason)
