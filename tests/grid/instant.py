"""Grids and searches whose trainings take an instant.

Commands, workers, pipes, signals, locks, files and studies are real; only `run` is replaced. Commands are forks of the
test process, and their workers forks of those, so that whatever a test patches reaches them.
"""

import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked_grid import ask_for_grid
from rich.console import Console
from two_rows import two_rows

from flash_lazy.cpu.library import find_obstacle
from lit_lazy.command.ablate_questions_search import make_search
from lit_lazy.command.main import make_parser
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.grid.cell_state import Holder, read_state
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.grid.run import run_grid
from lit_lazy.grid.search.run import SearchDriver, SearchWork, run_search
from lit_lazy.grid.work_records import LaunchOptions
from lit_lazy.support.disk import describe_failed_write, write_text
from lit_lazy.support.error_messages import UnfinishedError
from lit_lazy.support.provenance import collect_environment
from lit_lazy.training import run_folder
from lit_lazy.training.run import read_finished

STEPS = (2, 4, 6)
"""Steps with a validation and a checkpoint; the last one is that of `backcopy_tiny`."""
FORK = multiprocessing.get_context("fork")
INTERRUPTED = 130
SEARCH = '''
"""Learning rates from hopeless to good."""
from lit_lazy.attention import Elastic
from lit_lazy.grid.search.definition import Real, Search

search = Search(
    name="rates",
    base="backcopy_tiny",
    common={"model.attention.normaliser": Elastic()},
    axes={"train.lr": Real(1e-6, 0.1, log=True), "model.attention.normaliser.tau_init": Real(0.0, 2.0)},
    trials=6,
    startup=2,
)
'''


def nothing(*_: object) -> None:
    """What a test that disturbs nothing does at a step."""


@dataclass
class Training:
    """Stand-in for `run`: settings, a validation and a checkpoint at each of STEPS, a result."""

    log: Path
    """File of a line `KEY STEP` for every step that was trained."""
    at_step: Callable[[RunConfig, int, Path], None] = nothing
    """Called with the run folder before each step is trained."""

    def __call__(
        self, cfg: RunConfig, folder: Path, *, logger: Any, callbacks: Sequence[Any], lock: Any, **_: object
    ) -> run_folder.RunResult:
        with lock.acquire(timeout=0):
            if known := read_finished(folder):
                return known
            run_folder.write_settings(folder, folder.name, "data", to_dict(cfg))
            checkpoint = folder / run_folder.CHECKPOINTS / run_folder.LAST
            done = int(checkpoint.read_text()) if checkpoint.exists() else 0
            for step in STEPS[STEPS.index(done) + 1 if done else 0 :]:
                self.at_step(cfg, step, folder)
                with self.log.open("a") as file:
                    file.write(f"{folder.name} {step}\n")
                logger.log_metrics({"val/loss": compute_loss(cfg, step)}, step)
                for callback in callbacks:
                    callback._judge(SimpleNamespace(global_step=step), compute_loss(cfg, step))
                checkpoint.parent.mkdir(exist_ok=True)
                write_text(checkpoint, str(step))
            loss = compute_loss(cfg, STEPS[-1])
            metrics = {"loss/val": loss, "loss/excess": loss - 0.1, "model/parameters": 8.0}
            labels = {"backend": "chunked" if find_obstacle() else "cpu"}
            made = collect_environment() | {"git_sha": "abc"}
            result = run_folder.RunResult(
                folder.name, to_dict(cfg), {}, metrics, labels, {}, made, "data", {}, folder.name, {}
            )
            result.write(folder)
            run_folder.remove_checkpoints(folder)
            return result


def compute_loss(cfg: RunConfig, step: int) -> float:
    return abs(math.log10(cfg.train.lr) + 3) + cfg.seed / 7 + 1 / step


@dataclass
class Lab:
    """A runs folder, and the commands on one grid or search in it."""

    runs: Path
    training: Training
    work: Any
    """The grid or search."""
    commands: list["Command"] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.work.folder

    @property
    def keys(self) -> list[str]:
        return [cell.key for cell in self.work.cells]

    def cell(self, key: str) -> Path:
        return run_folder.locate_cell(self.folder, key)

    def move(self, runs: Path) -> "Lab":
        """The same grid in another runs folder."""
        return replace(self, runs=runs, work=replace(self.work, runs=runs))

    def start(self, workers: int = 1, **options: Any) -> "Command":
        launch = LaunchOptions(workers=workers, threads=1, **options)
        command = Command(lambda console: self.work_on(launch, console), self.training.log.parent)
        self.commands.append(command)
        return command

    def work_on(self, launch: LaunchOptions, console: Console) -> bool:
        """What a command does; returns whether all is finished."""
        if isinstance(self.work, SearchWork):
            return run_search(SearchDriver(self.work, launch.storage), launch, console)
        return run_grid(self.work, launch, console).finished

    def run(self, workers: int = 1, status: int = 0, **options: Any) -> str:
        """Run a command to its end; returns what it printed."""
        command = self.start(workers, **options)
        assert command.wait() == status, command.said
        return command.said

    def end(self) -> None:
        """Kill the commands that have not ended."""
        for command in self.commands:
            command.process.kill()

    def states(self) -> dict[str, str]:
        return {key: read_state(self.cell(key)) for key in self.keys}

    def find(self, state: str) -> list[Path]:
        """The folders of the cells in a state."""
        return [self.cell(key) for key, found in self.states().items() if found == state]

    def count_steps(self) -> dict[str, int]:
        """How often each step of each cell was trained, by `KEY STEP`."""
        lines = self.training.log.read_text().splitlines() if self.training.log.exists() else []
        return {line: lines.count(line) for line in lines}

    def table(self) -> str:
        """The table's numbers, as its command has written them."""
        return (self.folder / "table.csv").read_text()

    def check_done(self, steps_repeated: int = 0, former: Set[str] = frozenset()) -> None:
        """Every cell is complete, its result can be read, nothing is left over, and few steps were trained twice.

        former: keys of cells that were trained before the steps were logged.
        """
        assert set(self.states().values()) == {"complete"}
        assert {path.name for path in (self.folder / run_folder.CELLS).iterdir()} == former | {*self.keys}
        cells = {cell.key: cell.result for cell in read_grid(self.folder).cells}
        assert None not in cells.values()
        assert former <= cells.keys()
        left = [path for path in self.folder.rglob("*") if path.name in ("holder.json", run_folder.CHECKPOINTS)]
        assert not left
        counts = self.count_steps()
        assert set(counts) == {f"{key} {step}" for key in self.keys if key not in former for step in STEPS}
        assert sum(counts.values()) - len(counts) <= steps_repeated, counts


class Command:
    """A command in a process of its own."""

    def __init__(self, work: Callable[[Console], bool], folder: Path) -> None:
        self.out = folder / f"said-{time.monotonic_ns()}"
        self.process = FORK.Process(target=self._main, args=(work,))
        self.process.start()

    def _main(self, work: Callable[[Console], bool]) -> None:
        """As `lit_lazy.command.main` translates how a command ends."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self.out.open("w", buffering=1) as file:
            logging.getLogger().handlers = [logging.StreamHandler(file)]  # as Python does where none is set
            console = Console(file=file, width=1000, highlight=False)
            status = 1
            try:
                status = 0 if work(console) else 1
            except KeyboardInterrupt:
                status = INTERRUPTED
            except (ValueError, UnfinishedError) as error:
                file.write(f"lit-lazy: {error}\n")
                status = 2 if isinstance(error, ValueError) else 1
            except BaseException as error:
                file.write(f"lit-lazy: {describe_failed_write(error) or traceback.format_exc()}\n")
        sys.exit(status)

    @property
    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        # `join` would also wait for workers, which have inherited what it waits for.
        wait_until(lambda: self.process.exitcode is not None, said=lambda: self.said)
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def wait_until(holds: Callable[[], Any], said: Callable[[], str] = str, seconds: float = 30.0) -> Any:
    """Return what holds, once it is true."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, said()
        time.sleep(0.005)
    return found


def read_pid(folder: Path) -> int:
    """The worker that trains in a run folder."""
    return wait_until(lambda: Holder.read(folder)).pid


@contextmanager
def hold(lab: Lab, at: int = STEPS[1]) -> Iterator[None]:
    """Let no training of a lab get beyond a step until the context exits."""
    gate = lab.training.log.with_name("gate")

    def stop(_cfg: RunConfig, step: int, _folder: Path) -> None:
        while step == at and gate.exists():
            time.sleep(0.005)

    lab.training.at_step = stop
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def prepare(folder: Path, patch: pytest.MonkeyPatch) -> Training:
    """Replace trainings, and let workers be forks of their commands, which look often."""
    from lit_lazy.grid import pool, run, worker

    training = Training(folder / "steps.log")
    patch.setattr("lit_lazy.training.run.run", training)
    ends, serve = [], worker.serve

    def make_pipe() -> Any:
        ends.append((pipe := FORK.Pipe())[0])
        return pipe

    def close_and_serve(*arguments: Any) -> None:
        for end in ends:  # a worker of the server of forks inherits none
            end.close()
        serve(*arguments)

    context = SimpleNamespace(Process=FORK.Process, Pipe=make_pipe)
    patch.setattr(worker, "serve", close_and_serve)
    patch.setattr(pool, "start_fork_server", nothing)
    patch.setattr(pool, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    patch.setattr(run, "POLL_SECONDS", 0.01)
    patch.setattr(run, "LOOK_SECONDS", 0.05)
    patch.setattr(os, "fsync", nothing)  # a third of a command's time; no test of these loses power
    return training


def make_lab(
    folder: Path, training: Training, *words: str, overrides: Sequence[str] = (), source: str = two_rows("pair")
) -> Lab:
    """A grid of two rows with two seeds. words, overrides: further options of its command, and settings."""
    (folder / "pair.py").write_text(source)
    command = ["ablate", "run", str(folder / "pair.py"), "--runs", str(folder / "runs"), *words]
    return Lab(folder / "runs", training, ask_for_grid(command, overrides))


def make_search_lab(folder: Path, training: Training) -> Lab:
    """A search of six points."""
    (folder / "rates.py").write_text(SEARCH)
    words = ["ablate", "search", str(folder / "rates.py"), "--runs", str(folder / "runs")]
    return Lab(folder / "runs", training, make_search(make_parser().parse_args(words), []))
