"""Model-based test of a grid's folders: any order of what commands, workers, deaths, damage and people do to them."""

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from rich.console import Console

from lit_lazy.grid import run
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import HOLDER, MOST_DEATHS, claim, find_dead, give_back, read_state
from lit_lazy.grid.grid_folder import ASIDE
from lit_lazy.grid.run import GridDriver, reset_grid
from lit_lazy.grid.study import JOURNAL
from lit_lazy.grid.work_records import Ending, Work
from lit_lazy.training import run_folder

CONFIG = {"train": {"steps": 1}}
CELLS = {key: Cell(key, "v", "ours", seed, CONFIG, {}) for seed, key in enumerate(("a", "b", "c"))}
KEYS = st.sampled_from(sorted(CELLS))
DAMAGE = st.sampled_from((b"", b"{", b"[]", b"\x00\xff", b'{"format": 1}'))


@dataclass(eq=False)
class Model:
    """What must be true of a cell."""

    state: str = "waiting"
    final: bool = False
    deaths: int = 0
    progress: int = 0
    """Of the last holder that died, 0 for none."""
    written: int = 0
    """The newest checkpoint; 0 for none."""
    left: bool = False
    """Whether its last holder died."""


HELD = st.runner().flatmap(lambda machine: st.sampled_from(sorted(machine.locks)))


class Machine(RuleBasedStateMachine):
    """Each rule acts on the folders and on the model, which must then agree."""

    def __init__(self, runs: Path, numbers: Iterator[int]) -> None:
        super().__init__()
        self.work = Work(f"grid-{next(numbers)}", tuple(CELLS.values()), runs, ())
        self.begin()
        self.asides = 0

    def begin(self) -> None:
        self.work.folder.mkdir()
        self.cells = {key: Model() for key in CELLS}
        self.locks: dict[str, object] = {}
        self.drivers: list[GridDriver] = []
        self.ticks = itertools.count(1)

    def teardown(self) -> None:
        for key in list(self.locks):
            self.end_as(key, "waiting", "interrupted")

    def folder(self, key: str) -> Path:
        return run_folder.locate_cell(self.work.folder, key)

    @rule(key=KEYS)
    def claim(self, key: str) -> None:
        """A worker that was given the cell, by whatever command; also one that is done, as another has just done it."""
        cell = self.cells[key]
        deaths = 0
        if cell.left and cell.state != "complete":
            deaths = cell.deaths + 1 if cell.progress == cell.written else 1
        lock = claim(self.folder(key))
        if key in self.locks:
            assert lock is None
            return
        cell.left = False
        if cell.state == "failed" or deaths >= MOST_DEATHS:
            assert lock is None
            cell.state, cell.deaths = "failed", 0
            return
        assert lock is not None
        cell.deaths, cell.progress = deaths, cell.written
        cell.state = "complete" if cell.state == "complete" else "running"
        self.locks[key] = lock
        run_folder.write_settings(self.folder(key), key, "data", {"is": key})

    def end_as(self, key: str, state: str, kind: str) -> None:
        give_back(self.folder(key), self.locks.pop(key))  # type: ignore[arg-type]
        cell = self.cells[key]
        if cell.state == "running":
            cell.state = state
        for driver in self.drivers:
            driver.record(Ending(key, kind))  # type: ignore[arg-type]

    @precondition(lambda self: self.locks)
    @rule(key=HELD)
    def finish(self, key: str) -> None:
        fields = CONFIG, {}, {"loss/val": 1.0}, {}, {}, {"git_sha": "x"}, "data", {}, key, {}
        run_folder.RunResult(key, *fields).write(self.folder(key))
        self.end_as(key, "complete", "done")

    @precondition(lambda self: self.locks)
    @rule(key=HELD, final=st.booleans())
    def fail(self, key: str, final: bool) -> None:
        if self.cells[key].state == "running":
            run_folder.write_failure(self.folder(key), "why", final)
            self.cells[key].final = final
        self.end_as(key, "failed", "failed")

    @precondition(lambda self: self.locks)
    @rule(key=HELD)
    def interrupt(self, key: str) -> None:
        self.end_as(key, "waiting", "interrupted")

    @precondition(lambda self: self.locks)
    @rule(key=HELD)
    def die(self, key: str) -> None:
        """The operating system frees the lock; the holder's file stays."""
        self.locks.pop(key).release(force=True)  # type: ignore[attr-defined]
        cell = self.cells[key]
        cell.left = True
        if cell.state == "running":
            cell.state = "waiting"
        for driver in self.drivers:
            driver.record(Ending(key, "died"))

    @precondition(lambda self: self.locks)
    @rule(key=HELD)
    def get_ahead(self, key: str) -> None:
        checkpoint = self.folder(key) / run_folder.CHECKPOINTS / run_folder.LAST
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()
        self.cells[key].written = next(self.ticks)
        os.utime(checkpoint, ns=(self.cells[key].written,) * 2)

    @rule(key=KEYS)
    def retry(self, key: str) -> None:
        """As the next command does with a failed cell."""
        driver = GridDriver(self.work, None)
        if driver.states()[key] == "failed":
            driver.retry(key)
            self.cells[key].state = "waiting"

    @rule()
    def command(self) -> None:
        """Another command begins; it observes from now on."""
        self.drivers.append(GridDriver(self.work, None))
        assert self.drivers[-1].states() == {key: cell.state for key, cell in self.cells.items()}

    @precondition(lambda self: self.drivers)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """A command gives a cell to a worker that is killed before it claims it."""
        driver = data.draw(st.sampled_from(self.drivers))
        waiting = [key for key, state in driver.states().items() if state == "waiting"]
        given = driver.choose()
        assert (given is not None) == bool(waiting)
        if given is not None:
            assert given.key in waiting
            assert driver.states()[given.key] == "running"
            driver.record(Ending(given.key, "died"))

    @rule()
    def fresh(self) -> None:
        console = Console(file=io.StringIO(), width=1000)
        if any(cell.state == "running" for cell in self.cells.values()) or self.locks:
            with pytest.raises(ValueError, match=rf"--fresh: {self.work.id} is running \(process {os.getpid()} on "):
                reset_grid(self.work, console)
            return
        complete = sum(cell.state == "complete" for cell in self.cells.values())
        aside = self.work.folder.with_name(f"{self.work.id}{ASIDE}{self.asides}")
        reset_grid(self.work, console)
        (moved,) = self.work.runs.glob(f"{self.work.id}{ASIDE}????????-*")
        assert console.file.getvalue() == f"the former results are in {moved}\n"
        assert len(list(moved.glob(f"cells/*/{run_folder.RESULT}"))) == complete
        moved.rename(aside)
        self.asides += 1
        self.begin()

    @rule(key=KEYS, content=DAMAGE, name=st.sampled_from((run_folder.RESULT, run_folder.FAILURE, HOLDER, "cell.json")))
    def damage(self, key: str, content: bytes, name: str) -> None:
        """Of a file that is there; a damaged result, or reason of failure, is none."""
        cell, path = self.cells[key], self.folder(key) / name
        if not path.exists() or key in self.locks:
            return
        path.write_bytes(content)
        if name == HOLDER:
            cell.deaths, cell.left = 0, False
            path.unlink()
        self.drivers.clear()
        GridDriver(self.work, None)
        if (name, cell.state) in ((run_folder.RESULT, "complete"), (run_folder.FAILURE, "failed")):
            cell.state = "waiting"
            # A command may have cleared what was left beside a result.
            cell.left = find_dead(self.folder(key)) is not None

    @rule(content=DAMAGE | st.none(), at=st.integers(0, 400))
    def damage_journal(self, content: bytes | None, at: int) -> None:
        """Optuna's file is lost, cut off, or overwritten in the middle: no cell's state depends on it."""
        journal = self.work.folder / JOURNAL
        if journal.exists():
            whole = journal.read_bytes()
            journal.write_bytes(whole[:at] if content is None else whole[:at] + content + whole[at + len(content) :])

    @invariant()
    def states_agree(self) -> None:
        wanted = {key: cell.state for key, cell in self.cells.items()}
        found = {key: read_state(self.folder(key)) for key in CELLS}
        assert found == wanted
        for driver in self.drivers:
            states = driver.states()
            assert all(states[key] == "complete" for key, state in wanted.items() if state == "complete")
        for key, cell in self.cells.items():
            assert cell.state == "complete" or (find_dead(self.folder(key)) is not None) == cell.left


OPTIONS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
FEW = settings(OPTIONS, max_examples=20, stateful_step_count=30, derandomize=True, phases=(Phase.generate,))
MANY = settings(OPTIONS, max_examples=200, stateful_step_count=60, print_blob=True)


@pytest.mark.parametrize("options", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
def test_every_order_of_events_is_the_models(options, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(run, "LOOK_SHARE", 0.0)
    numbers = itertools.count()
    run_state_machine_as_test(lambda: Machine(tmp_path, numbers), settings=options)
