"""Overhead of a grid over its training: a cell against bare `Trainer.fit`, and costs per cell by grid size."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_lazy.attention import Elastic, LearnedBias
from lit_lazy.config.key import SCHEMA
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict, replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.ablation import (
    Ablation,
    Cell,
    expand,
    group_keys,
    hash_row_definitions,
    prepare_rows,
    select_rows,
)
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.grid.mlflow_mirror import GridMirror
from lit_lazy.grid.plan import PLAN, Plan
from lit_lazy.grid.run import GridDriver
from lit_lazy.grid.work_records import Ending, Job, Work
from lit_lazy.grid.worker import execute, prepare_process
from lit_lazy.support.disk import write_text
from lit_lazy.support.names_to_paths import find
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import RowInfo
from lit_lazy.table.render import save
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.execution_settings import select_training_device
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import STRONGEST, measure_model, run
from lit_lazy.training.run_folder import RunResult, locate_cell, read_grid_id
from lit_lazy.training.trainer import fit
from timings.results import collect_provenance, format_provenance, format_row, publish

SIZES, CELL_SECONDS, PAIRS = (100, 1_000, 10_000), 20.0, 5
SEEDS = 5
CALIBRATION_STEPS = 100
ENDS = 50
"""Cells at each end of a grid whose costs are compared."""


@dataclass
class Clock:
    """Seconds of wall time and of this process's CPU time (all threads), by name."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Any:
        """Time a block under a name."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)


def bench_grid(
    sizes: Sequence[int] = SIZES,
    cell_seconds: float = CELL_SECONDS,
    pairs: int = PAIRS,
    out: Path | None = None,
    console: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the tables with `console`, and write `out` (.json) and the tables (.md).

    sizes: numbers of cells, multiples of 5. cell_seconds: target training time of a cell. Raises ValueError for
    unusable values.
    """
    if any(size < SEEDS or size % SEEDS for size in sizes):
        raise ValueError(f"--cells {','.join(map(str, sizes))}: each must be a multiple of {SEEDS}, the seeds of a row")
    if pairs < 2:
        raise ValueError(f"pairs={pairs}: must be 2 or more, or there is no spread")
    with tempfile.TemporaryDirectory(prefix="lit-lazy-bench-") as folder:
        result = {
            **collect_provenance(out),
            "overhead": measure_overhead(Path(folder), cell_seconds, pairs, console),
            "per_cell": [measure_per_cell(Path(folder) / str(size), size, console) for size in sizes],
        }
    publish(result, format_tables(result), out, console)
    return result


def measure_overhead(folder: Path, cell_seconds: float, pairs: int, console: Callable[[str], None]) -> dict[str, Any]:
    """Cells of a grid, in turns with bare trainings of the same config."""
    runs = folder / "runs"
    base, clock = _load_lazy_config("backcopy"), Clock()
    short = replace_at(base, {"train.steps": CALIBRATION_STEPS})
    train_bare(short, folder / "warm", Clock())
    train_bare(short, folder / "calibrate", clock)
    steps = max(CALIBRATION_STEPS, round(CALIBRATION_STEPS * cell_seconds / clock.wall.pop("fit")[0]))
    base, clock = replace_at(base, {"train.steps": steps}), Clock()
    chosen = select_rows(_make_ablation(1, pairs), [], [])
    cells = expand(prepare_rows(chosen, base))
    driver, job = _make_driver(runs, cells)
    prepare_process(job)
    for number, cell in enumerate(cells):
        console(f"overhead: pair {number + 1} of {pairs}, {steps} steps per cell")
        legs = [
            lambda cell=cell, number=number: train_bare(from_dict(RunConfig, cell.config), folder / str(number), clock),
            lambda: _run_one_cell(driver, job, clock),
        ]
        for leg in legs if number % 2 else reversed(legs):
            leg()
    train = [_read_result(runs, cell).timings["train_seconds"] for cell in cells]
    by_pair = {
        name: [
            (cell - measuring - fitted) / fitted
            for cell, measuring, fitted in zip(times["cell"], times["measure"], times["fit"], strict=True)
        ]
        for name, times in (("wall", clock.wall), ("cpu", clock.cpu))
    }
    return {
        "steps": steps,
        "wall_seconds": clock.wall | {"fit in the cell": train},
        "cpu_seconds": clock.cpu,
        "overhead": {name: _summarise(values) for name, values in by_pair.items()},
    }


def train_bare(cfg: RunConfig, folder: Path, clock: Clock) -> None:
    """`Trainer.fit` with checkpoints and no logger, and the measurements of every run before and after it."""
    source = prepare(cfg)
    module = LitLM.create(cfg, source.vocab_size, source.context_length)
    module.model.to(select_training_device())
    with clock.measure("measure"):
        measure_model(module, source, maps=None)
    with clock.measure("fit"):
        fit(module, source, folder)
    wall, cpu = time.perf_counter(), time.process_time()
    measure_model(module, source, STRONGEST)
    clock.wall["measure"][-1] += time.perf_counter() - wall
    clock.cpu["measure"][-1] += time.process_time() - cpu


def _run_one_cell(driver: GridDriver, job: Job, clock: Clock) -> None:
    with clock.measure("cell"), Interrupts() as interrupts:
        cell = driver.choose()
        assert cell is not None
        driver.record(execute(cell, job, interrupts, lambda *_: ""))


def _read_result(runs: Path, cell: Cell) -> RunResult:
    result = RunResult.read(runs / "bench" / "cells" / cell.key)
    if result is None:
        raise RuntimeError(f"{cell.variant} seed {cell.seed} left no result")
    return result


def measure_per_cell(runs: Path, size: int, console: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds per cell of everything except training, in a grid of `size` cells."""
    base = _load_lazy_config("backcopy_tiny")
    ablation = _make_ablation(size // SEEDS, SEEDS)
    times: dict[str, float] = {}

    @contextmanager
    def measure_time(name: str, cells: int = size) -> Any:
        started = time.perf_counter()
        yield
        times[name] = 1000 * (time.perf_counter() - started) / cells

    console(f"{size} cells: expanding")
    with measure_time("expand"):
        chosen = select_rows(ablation, [], [])
        prepared = prepare_rows(chosen, base)
        cells = expand(prepared)
        facts = hash_row_definitions(ablation, base, prepared)
    driver, job = _make_driver(runs, cells)
    with measure_time("status"):
        driver.states()
    plan = Plan(
        ablation="bench",
        base="backcopy_tiny",
        baseline=cells[0].variant,
        command="",
        rows=tuple(RowInfo(row.name, row.source, seeds, "backcopy_tiny", row.note) for row, seeds in chosen),
        columns=COLUMNS,
        contrasts=(),
        axes=tuple(cells[0].axes),
        definitions=facts,
        facts={},
        schema=SCHEMA,
        keys=group_keys(cells),
    )
    write_text(job.folder / PLAN, plan.to_json())
    result = _run_tiny(base)
    console(f"{size} cells: handing out and completing")
    record, claim = [], []
    for number in range(size):
        started = time.perf_counter()
        cell = driver.choose()
        assert cell is not None
        between = time.perf_counter()
        folder = locate_cell(job.folder, cell.key)
        folder.mkdir(parents=True)
        # The loss differs from cell to cell, as in a real grid.
        loss = result.metrics["loss/val"] + cell.seed + number % 7
        replace(result, key=cell.key, metrics=result.metrics | {"loss/val": loss}).write(folder)
        done = time.perf_counter()
        driver.record(Ending(cell.key, "done"))
        claim.append(between - started + time.perf_counter() - done)
        record.append(done - between)
    for name, seconds in (("hand out and complete", claim), ("write the result", record)):
        first, last = (statistics.median(part) for part in (seconds[:ENDS], seconds[-ENDS:]))
        times[name] = 1000 * statistics.mean(seconds)
        times[f"{name}, first {ENDS}"], times[f"{name}, last {ENDS}"] = 1000 * first, 1000 * last
    with measure_time("status when done"):
        driver.states()
    console(f"{size} cells: table")
    with measure_time("table"):
        save(read_grid(job.folder).build_table(), job.folder)
    with measure_time("mirror"):
        GridMirror(job.folder).sync(final=True)
    shutil.rmtree(runs)
    return {"cells": size, "milliseconds": times}


def _make_driver(runs: Path, cells: Sequence[Cell]) -> tuple[GridDriver, Job]:
    """A new grid, and what its workers get."""
    work = Work("bench", cells, runs, ())
    work.folder.mkdir(parents=True)
    return GridDriver(work, None), Job(work.folder, read_grid_id(work.folder), threads=1, files=())


def _make_ablation(rows: int, seeds: int) -> Ablation:
    """Rows that differ in tau_init."""
    return Ablation(
        name="bench",
        baseline="tau_init=0.0",
        seeds=tuple(range(seeds)),
        columns=COLUMNS,
        axes={"model.attention.normaliser.tau_init": tuple(2.0 * row / rows for row in range(rows))},
    )


def _load_lazy_config(experiment: str) -> RunConfig:
    changes = {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()}
    return replace_at(load_experiment(find("experiments", experiment)), changes)


def _run_tiny(base: RunConfig) -> RunResult:
    """The result of a tiny run, with every metric of a finished run."""
    with tempfile.TemporaryDirectory(prefix="lit-lazy-bench-") as folder:
        return run(base, Path(folder))


def _summarise(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def format_tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    over = result["overhead"]
    lines = [
        "| median seconds per cell | wall | CPU |",
        "|:---|---:|---:|",
        *(
            format_row(
                [name, *(f"{statistics.median(over[clock][key]):.2f}" for clock in ("wall_seconds", "cpu_seconds"))]
            )
            for name, key in (
                ("bare `Trainer.fit`", "fit"),
                ("measurements before and after", "measure"),
                ("the complete cell, from claim to record", "cell"),
            )
        ),
        "",
        "A grid's cell, as a share of bare `Trainer.fit` "
        f"({over['steps']} steps, one thread); median [least, most] of paired cells: "
        + ", ".join(
            f"{name} {100 * s['median']:.1f} % [{100 * s['least']:.1f}, {100 * s['most']:.1f}]"
            for name, s in over["overhead"].items()
        )
        + ".",
        "",
    ]
    rows = result["per_cell"]
    names = list(rows[0]["milliseconds"])
    lines += [
        format_row(["milliseconds per cell", *(f"{row['cells']:,} cells" for row in rows)]),
        "|:---|" + "---:|" * len(rows),
        *(format_row([name, *(f"{row['milliseconds'][name]:.3f}" for row in rows)]) for name in names),
        "",
        f"{format_provenance(result)} MLflow: sqlite.",
    ]
    return "\n".join(lines) + "\n"
