"""Trains cells of ablations on one GPU that is there for minutes: several at once, without a queue or MLflow.

    PYTHONPATH=.:kernels python3 -m timings.card frontier_rates-frontier_3m --seconds 120 --at-once 5 --out FOLDER

Each finished cell is added at once to FOLDER/cells.tar, as GRID/cells/KEY of a runs folder. Unpacked in one, `lit-lazy
ablate run` records the cell instead of training it. FOLDER/card.md has what each cell reached of the GPU.
"""

import argparse
import json
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.ablation import Cell, expand, prepare_rows, select_rows
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.names_to_paths import find
from lit_lazy.training.execution_settings import Execution
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import locate_cell
from timings.gpu_step import PEAK_FLOPS
from timings.results import collect_provenance, format_provenance, format_row

PROGRAM = "timings.card"
THREADS = 2
"""CPU threads of each training."""
HEAD = ("grid", "row", "seed", "loss", "tokens/s", "MFU", "training (s)", "whole (s)")


@dataclass(frozen=True)
class Asked:
    """A cell of a grid."""

    grid: str
    cell: Cell

    @property
    def config(self) -> RunConfig:
        return from_dict(RunConfig, self.cell.config)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What its time depends on, but for the rule."""
        model, train = self.config.model, self.config.train
        return model.d_model, model.n_layers, train.steps, train.batch_size


def list_cells(grid: str, rows: Sequence[str], seeds: Sequence[int]) -> list[Asked]:
    """The cells of a grid, named by its ablation or by ABLATION-EXPERIMENT, seed by seed; prepares their data."""
    name, _, base = grid.partition("-")
    ablation, _ = load_ablation_or_question(find("ablations", name))
    base = base or ablation.base
    chosen = select_rows(ablation, rows, seeds)
    cells = expand(prepare_rows(chosen, load_experiment(find("experiments", base))))
    by_row = {row.name: [cell for cell in cells if cell.variant == row.name] for row, _ in chosen}
    ordered = [cell for seed in zip_longest(*by_row.values()) for cell in seed if cell is not None]
    return [Asked(f"{name}-{base}", cell) for cell in ordered]


def train(asked: Asked, runs: Path, compile: bool) -> dict[str, Any]:
    """Train a cell in its run folder, or read its result; what it reached."""
    torch.set_num_threads(THREADS)
    started = time.monotonic()
    execution = Execution(compile=compile)
    result = run(asked.config, locate_cell(runs / asked.grid, asked.cell.key), execution=execution)
    rate = float(result.timings["tokens_per_second"])
    return {
        "loss": result.metrics["loss/val"],
        "tokens_per_second": rate,
        "mfu": rate * result.metrics["model/flops_per_token"] / PEAK_FLOPS if torch.cuda.is_available() else None,
        "train_seconds": result.timings["train_seconds"],
        "seconds": time.monotonic() - started,
    }


class Record:
    """What was trained: the cells' folders in one archive, and a table, both written after every cell."""

    def __init__(self, runs: Path, out: Path) -> None:
        self.runs, self.out = runs, out
        out.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {
            **collect_provenance(out / "card.json"),
            "command": " ".join(sys.argv),
            "cells": [],
        }
        self.seconds: dict[tuple[Any, ...], float] = {}
        """Of the newest cell of each shape."""

    def add(self, asked: Asked, future: "Future[dict[str, Any]]") -> None:
        row = {"grid": asked.grid, "row": asked.cell.variant, "seed": asked.cell.seed}
        if error := future.exception():  # the other cells go on
            row["failed"] = describe_exception(error)  # type: ignore[arg-type]
        else:
            row |= future.result()
            self.seconds[asked.shape] = future.result()["seconds"]
            folder = locate_cell(self.runs / asked.grid, asked.cell.key)
            with tarfile.open(self.out / "cells.tar", "a") as archive:
                for file in sorted(folder.glob("*.*")):
                    archive.add(file, file.relative_to(self.runs))
        self.result["cells"].append(row)
        (self.out / "card.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (self.out / "card.md").write_text(self.format())
        print(format_cell(row), flush=True)

    def format(self) -> str:
        """The table as Markdown."""
        lines = [format_row(HEAD), "|:---|:---|" + "---:|" * (len(HEAD) - 2), *map(format_cell, self.result["cells"])]
        return "\n".join([*lines, "", format_provenance(self.result)]) + "\n"


def format_cell(row: dict[str, Any]) -> str:
    cells = [row["grid"], row["row"], str(row["seed"])]
    if "failed" in row:
        return format_row([*cells, f"failed: {row['failed'].replace('|', '/')[:200]}", *[""] * (len(HEAD) - 4)])
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    times = f"{row['train_seconds']:.1f}", f"{row['seconds']:.1f}"
    return format_row([*cells, f"{row['loss']:.4f}", f"{row['tokens_per_second']:.0f}", mfu, *times])


def train_cells(cells: Sequence[Asked], record: Record, at_once: int, until: float, compile: bool) -> None:
    """Train cells in order, so many at once, each only if one of its shape would end in time."""
    waiting, running = list(cells), dict[Future[dict[str, Any]], tuple[Asked, ProcessPoolExecutor]]()
    idle = [start_process() for _ in range(at_once)]
    try:
        while waiting or running:
            while waiting and idle:
                asked = waiting.pop(0)
                if time.monotonic() + record.seconds.get(asked.shape, 0) < until:
                    process = idle.pop()
                    running[process.submit(train, asked, record.runs, compile)] = asked, process
            done, _ = wait(running, timeout=max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)
            for future in done:
                asked, process = running.pop(future)
                record.add(asked, future)
                idle.append(start_process() if isinstance(future.exception(), BrokenExecutor) else process)
            if time.monotonic() >= until:
                break
    finally:
        for asked, process in running.values():
            print(f"not finished: {asked.grid} {asked.cell.variant} seed {asked.cell.seed}", flush=True)
            kill(process)
        for process in idle:
            process.shutdown()


def start_process() -> ProcessPoolExecutor:
    """A process of its own, so that one that dies takes no other training with it."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def kill(process: ProcessPoolExecutor) -> None:
    for one in list((process._processes or {}).values()):
        one.kill()
    process.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("grids", nargs="+", metavar="GRID", help="ABLATION or ABLATION-EXPERIMENT, in this order")
    parser.add_argument("--rows", default="", metavar="A,B", help="only these rows (default all)")
    parser.add_argument("--seeds", default="", metavar="N,M", help="only these seeds (default each row's)")
    parser.add_argument("--seconds", type=float, required=True, metavar="S", help="end after so long")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings at once (default 1)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training steps")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="of the cells (default runs)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for cells.tar, card.json, card.md")
    options = parser.parse_args(argv)
    until = time.monotonic() + options.seconds
    try:
        require(options.at_once >= 1, "--at-once", options.at_once, "must be 1 or more")
        rows, seeds = filter(None, options.rows.split(",")), map(int, filter(None, options.seeds.split(",")))
        rows, seeds = [*rows], [*seeds]
        record = Record(options.runs, options.out)
        cells = [cell for grid in options.grids for cell in list_cells(grid, rows, seeds)]
        print(f"{len(cells)} cells, prepared with {until - time.monotonic():.0f} s left", flush=True)
        train_cells(cells, record, options.at_once, until, options.compile)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    sys.exit(main())
