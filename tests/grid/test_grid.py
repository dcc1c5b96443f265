"""A grid from its cells to its table: workers, retries, deaths, limits, and several commands at once."""

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from instant import INTERRUPTED, STEPS, Lab, hold, make_lab, read_pid, wait_until

from flash_lazy.cpu import library
from lit_lazy.config.schema import RunConfig
from lit_lazy.grid import run, worker
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import MOST_DEATHS
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.grid.pool import LocalPool, LocalWorker
from lit_lazy.grid.progress import Progress, describe_training
from lit_lazy.grid.reused_results import TakenResult
from lit_lazy.grid.work_records import Ending, Grid, Job, is_over
from lit_lazy.support.console import plain_console
from lit_lazy.training import execution_settings
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import DivergedError
from lit_lazy.training.run_folder import RESULT, TAIL_BYTES, RunResult, read_failure, read_lines


def test_commands_that_share_a_folder_share_its_cells(tmp_path: Path, lab: Lab) -> None:
    """Three with four workers each, more than cells; one asks for all rows, the others for one each."""
    seeds = ("--seeds", "0,1,2,3")
    parts = [
        make_lab(tmp_path, lab.training, *seeds, *more) for more in ((), ("--rows", "softmax"), ("--rows", "lazy"))
    ]
    commands = [part.start(workers=4) for part in parts]
    assert [command.wait() for command in commands] == [0] * 3, [command.said for command in commands]
    many = parts[0]
    many.check_done()
    assert "nothing to do" in many.run()
    rows = read_grid(many.folder).build_table().rows
    assert [(row.variant, row.n) for row in rows] == [("softmax", 4), ("lazy", 4)]
    many.training.log.unlink()
    alone = many.move(tmp_path / "alone")
    alone.run()
    assert alone.table() == many.table()


def test_results_are_taken_into_no_cell_that_another_command_trains(lab, tmp_path, monkeypatch) -> None:
    """It began that cell after it was found untrained."""
    looked, note = tmp_path / "looked", run._note_known_results

    def note_and_wait(grid: Grid, taken: Collection[TakenResult]) -> None:
        note(grid, taken)
        if taken:
            looked.touch()
            wait_until(lambda: lab.find("running"))

    monkeypatch.setattr(run, "_note_known_results", note_and_wait)
    elsewhere = lab.move(tmp_path / "elsewhere")
    elsewhere.run()
    results = {key: replace(RunResult.peek(elsewhere.cell(key)), taken_from="a pack") for key in lab.keys}
    taken = {key: TakenResult(result, 0.0) for key, result in results.items()}
    lab.training.log.unlink()
    with hold(lab):
        other = replace(lab, work=replace(lab.work, taken=taken)).start()
        wait_until(looked.exists)
        command = lab.start()
        (trained,) = wait_until(lambda: lab.find("running"))
        wait_until(lambda: "that this process did not start" in other.said)
        assert "3 of 4 cells are taken from a pack" in other.said
        assert not (trained / RESULT).exists()
    assert (command.wait(), other.wait()) == (0, 0), command.said + other.said
    assert set(lab.states().values()) == {"complete"}
    assert set(lab.count_steps()) == {f"{trained.name} {step}" for step in STEPS}


def test_each_machine_trains_with_the_best_backend_it_has(lab: Lab, tmp_path: Path, monkeypatch) -> None:
    """A result counts with whatever it was made, in another grid too; the table says which cells differ."""
    monkeypatch.delenv(library.SWITCH, raising=False)
    said = []
    for seeds, instructions in (("0", None), ("0,1", "avx2")):
        for module in (library, execution_settings):
            monkeypatch.setattr(module, "get_instruction_set", lambda instructions=instructions: instructions)
        here = make_lab(tmp_path, lab.training, "--rows", "lazy", "--seeds", seeds)
        said.append(here.run().count("attention runs slower than it could: no compiled backend is installed"))
    assert said == [1, 0]
    other = replace(here, work=replace(here.work, id="other", plan=replace(here.work.plan, ablation="other")))
    assert f"2 of 2 cells are taken from {here.work.id} " in other.run()
    caveat = (
        "Comparable cells differ in backend, which may change rounding: backend chunked: lazy (seed 0); backend cpu: "
    )
    for grid in (here, other):
        assert f"{caveat}lazy (seed 1)." in read_grid(grid.folder).build_table().notes


def test_a_failed_cell_is_tried_again_by_the_next_command(lab: Lab, tmp_path: Path) -> None:
    """And by the same one as often as it is asked to, but one that diverged."""
    tries = tmp_path / "tries"
    tries.touch()
    errors = MemoryError("cannot allocate 3 TB"), OSError(errno.EFBIG, "File too large"), MemoryError()

    def fail(cfg: RunConfig, _step: int, _folder: Path) -> None:
        if is_victim(cfg) and (n := tries.stat().st_size) < len(errors):
            tries.write_text("x" * (n + 1))
            raise errors[n]

    lab.training.at_step = fail
    assert "3/4 cells done, 0 running, 1 failed" in lab.run(status=1)
    (failed,) = lab.find("failed")
    assert read_failure(failed) == "out of memory: cannot allocate 3 TB"
    assert not (failed / "holder.json").exists()
    lab.training.at_step = Mock(side_effect=DivergedError("training loss is nan"))
    assert "retry" not in lab.run(status=1, retry_failed=5)
    assert "DivergedError: training loss is nan" in (lab.folder / "details.md").read_text()
    lab.training.at_step = fail
    said = lab.run(retry_failed=2)
    assert "4 cells, 3 already finished, 1 to train" in said
    limit = "a write met the limit on the size of files; raise it, `ulimit -f`"
    assert f"softmax seed 1 failed ({limit}); retry 1/2" in said
    assert "softmax seed 1 failed (out of memory: MemoryError); retry 2/2" in said
    lab.check_done()


def is_victim(cfg: RunConfig) -> bool:
    return cfg.seed == 1 and "Softmax" in str(cfg.model)


def test_a_cell_that_kills_its_workers_fails_alone_unless_it_gets_ahead(lab: Lab, tmp_path: Path) -> None:
    """Then it dies twice at each of its steps, which are more deaths than fail a cell."""
    deaths = tmp_path / "deaths"
    deaths.touch()

    def die(cfg: RunConfig, _step: int, _folder: Path) -> None:
        if is_victim(cfg):
            os.kill(os.getpid(), signal.SIGKILL)

    def die_twice(cfg: RunConfig, step: int, _folder: Path) -> None:
        size = deaths.stat().st_size
        if is_victim(cfg) and size < 2 * (STEPS.index(step) + 1):
            deaths.write_text("x" * (size + 1))
            os.kill(os.getpid(), signal.SIGKILL)

    lab.training.at_step = die
    said = lab.run(status=1)
    assert said.count("died; it waits again") == MOST_DEATHS
    assert "3/4 cells done, 0 running, 1 failed" in said
    (failed,) = lab.find("failed")
    assert read_failure(failed).startswith(f"its worker died {MOST_DEATHS} times without progress")
    lab.training.at_step = die_twice
    assert lab.run().count("died; it waits again") == 2 * len(STEPS)
    lab.check_done()


def test_workers_that_cannot_start_end_the_command_with_their_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for lack of space, as for the socket of the server of forks: they are started later."""

    with monkeypatch.context() as patch:
        patch.setattr("lit_lazy.grid.worker.prepare_process", Mock(side_effect=OSError("no such library")))
        assert "lit-lazy: workers keep dying before they finish a cell: OSError: no such library (" in lab.run(status=1)
    assert set(lab.states().values()) == {"waiting"}
    start, left = LocalPool.start, [2]

    def start_later(pool: LocalPool, cell: Cell) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        start(pool, cell)

    monkeypatch.setattr(LocalPool, "start", start_later)
    lab.run()
    lab.check_done()


def test_an_interrupt_at_the_end_of_a_cell_is_not_waited_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has ended its cell, and no other arrives."""
    execute = worker.execute

    def execute_and_interrupt(cell: Cell, job: Job, interrupts: Interrupts, judge: worker.Judge) -> Ending:
        ending = execute(cell, job, interrupts, judge)
        os.kill(os.getppid(), signal.SIGINT)
        wait_until(lambda: interrupts.arrived)
        return ending

    monkeypatch.setattr(worker, "execute", execute_and_interrupt)
    lab.run(status=INTERRUPTED)
    assert sorted(lab.states().values()) == ["complete", "waiting", "waiting", "waiting"]


def test_a_second_interrupt_kills_the_workers(lab: Lab) -> None:
    def linger(_cfg: RunConfig, _step: int, folder: Path) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        (folder / "lingers").touch()
        time.sleep(600)

    lab.training.at_step = linger
    command = lab.start()
    wait_until(lambda: list(lab.folder.glob("cells/*/lingers")))
    command.send(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again kills them" in command.said)
    command.send(signal.SIGINT)
    assert command.wait() == INTERRUPTED
    assert set(lab.states().values()) == {"waiting"}


@pytest.mark.parametrize("killed", [False, True], ids=["", "its command is killed"])
def test_a_stopped_worker_keeps_its_cell_until_it_goes_on(killed: bool, lab: Lab) -> None:
    """No other command trains it meanwhile, however long that takes."""
    with hold(lab):
        command = lab.start()
        (held,) = wait_until(lambda: lab.find("running"))
        pid = read_pid(held)
        os.kill(pid, signal.SIGSTOP)
        if killed:
            command.send(signal.SIGKILL)
    other = lab.start()
    try:
        wait_until(lambda: len(lab.find("complete")) == 3 and "that this process did not start" in other.said)
        assert lab.find("running") == [held]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (command.wait(), other.wait()) == (-signal.SIGKILL if killed else 0, 0), command.said + other.said
    lab.check_done()


def test_a_limit_starts_no_further_cell_and_waits_for_no_other_command(lab: Lab) -> None:
    """Each worker starts one, so that a command that is given again and again ends the grid."""
    assert "cells done" in lab.run(workers=2, status=1, until=time.time() - 1)
    assert len(lab.find("waiting")) == 2
    with hold(lab):
        command = lab.start(workers=2, until=time.time() - 1)
        wait_until(lambda: len(lab.find("running")) == 2)
        lab.run(workers=2, status=1, until=time.time() - 1)
        assert command.is_alive
    assert command.wait() == 0
    lab.check_done()
    assert is_over(time.time() - 1)
    assert not is_over(None)


def make_pool(size: int, judge: Callable[[], str] = str, is_alive: Callable[[], bool] = lambda: True):
    """A pool whose workers execute `cell 0` and so on, and the workers' ends of their pipes."""
    pool = LocalPool(Job(Path("x"), "", 1, ()), size, lambda *_: judge())
    ends = []
    for slot in range(size):
        worker = object.__new__(LocalWorker)
        worker.connection, other = multiprocessing.Pipe()
        worker.process = SimpleNamespace(is_alive=is_alive, exitcode=-9, join=lambda: None)  # type: ignore[assignment]
        worker.key, worker._question = f"cell {slot}", None
        pool._workers[slot] = worker
        ends.append(other)
    return pool, ends


def test_a_worker_that_dies_between_two_looks_of_the_pool_is_not_lost() -> None:
    """Its cell would be running for ever."""
    looks = [True, False, False, False]
    pool, _ends = make_pool(1, is_alive=lambda: looks.pop(0))
    ended = [ending for _ in range(2) for ending in pool.poll()]
    assert ended == [Ending("cell 0", "died", "exit status -9")]
    assert not pool._workers


def test_a_question_that_meets_a_full_disk_is_answered_later() -> None:
    """Of a search's training at a validation. What another worker ended with meanwhile is kept."""
    pool, ends = make_pool(2, lambda: answers.pop()())
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    answers: list[Callable[[], str]] = [lambda: "go on", full]
    ends[0].send(Ending("cell 0", "done"))
    ends[1].send((10, 2.5))
    with pytest.raises(OSError, match="No space"):
        pool.poll()
    assert not ends[1].poll()
    assert pool.poll() == [Ending("cell 0", "done")]
    assert ends[1].recv() == "go on"
    assert pool.poll() == []


def test_a_grid_can_be_copied_while_it_runs_and_moved(lab: Lab, tmp_path: Path) -> None:
    """The copy waits for nobody, and both end in the table of a grid that was left alone."""
    with hold(lab):
        command = lab.start()
        wait_until(lambda: lab.find("running"))
        copy = lab.move(tmp_path / "copy")
        shutil.copytree(lab.runs, copy.runs, ignore=shutil.ignore_patterns(".*"))  # files that are being written
    assert command.wait() == 0
    lab.check_done()
    lab.training.log.unlink()
    copy.run()
    assert set(copy.states().values()) == {"complete"}
    assert copy.table() == lab.table()
    moved = lab.move(tmp_path / "moved")
    lab.runs.rename(moved.runs)
    assert "nothing to do" in moved.run()
    assert moved.table() == copy.table()


def test_a_clock_that_jumps_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, forth and back, at every call."""
    now, jumps = time.time, itertools.cycle((86_400.0, -86_400.0))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    assert "died" not in lab.run(workers=2)
    lab.check_done()


# What the display of a running grid tells of each cell, from the cell's metric file


def write_metrics(folder: Path, steps: int, *, torn: bool = False, ago: float = 0.0) -> Path:
    """Two seconds a step, the last one `ago` seconds ago."""
    path = folder / "metrics.jsonl"
    started = time.time() - ago - 2 * steps
    times = [round(1000 * (started + 2 * step)) for step in range(steps + 1)]
    lines = [
        json.dumps({"step": step, "milliseconds": at, "metrics": {"train/loss": 4 - step / 10}})
        for step, at in enumerate(times)
    ]
    path.write_text("\n".join(lines) + ("\n" if not torn else '\n{"step": 99, "mill'))
    return path


TEN = "step 10 of 64, loss 3.000, about 1:48 left"


def test_records_that_are_torn_late_or_of_two_processes(tmp_path: Path) -> None:
    """A line that is being written; step 9's after step 10's; a training that was killed and resumed an hour later."""
    assert describe_training(tmp_path, 64) == "", "a cell on another machine has no metrics here"
    path = write_metrics(tmp_path, 10, torn=True)
    assert describe_training(tmp_path, 64) == TEN
    assert describe_training(tmp_path) == "step 10, loss 3.000"
    lines = path.read_text().splitlines()[:11]
    path.write_text("\n".join([*lines[:9], lines[10], lines[9]]) + "\n")
    assert describe_training(tmp_path, 64).startswith("step 10 of 64, ")
    before = write_metrics(tmp_path, 5, ago=3600).read_text()
    after = write_metrics(tmp_path, 10).read_text().splitlines(keepends=True)[6:]
    path.write_text(before + "".join(after))
    assert describe_training(tmp_path, 64) == TEN
    write_metrics(tmp_path, 10, ago=90)
    assert describe_training(tmp_path, 64) == f"{TEN}, reported 1:30 ago"


def test_a_log_says_each_minute_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file as output: without it nothing is said until a cell ends, which takes hours at scale."""
    states, clock = {"key": "running"}, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = Progress(lambda: states, plain_console(), list)
    progress.show_running(["lazy [/x] seed 0: step 3 of 9"])
    for clock[0] in (1.0, 20.0, 59.0, 62.0, 90.0, 130.0):
        progress.update(states)
    printed = capsys.readouterr().out.splitlines()
    summary = "0/1 cells done, 1 running, {} elapsed, estimating the rest"
    running = "  lazy [/x] seed 0: step 3 of 9"
    assert printed == [summary.format("0:01"), summary.format("1:02"), running, summary.format("2:10"), running]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 5000)
    assert path.stat().st_size > 3 * TAIL_BYTES
    last, every = read_lines(path, TAIL_BYTES), read_lines(path)
    assert 100 < len(last) < 1500
    assert last == every[-len(last) :]
