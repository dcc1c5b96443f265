"""Faults of disks, files, storages and limits: a grid waits or ends in a line; the same command makes it whole."""

import errno
import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from instant import STEPS, Command, Lab, hold, wait_until
from trap import Trap

from lit_lazy.config.schema import RunConfig
from lit_lazy.grid.study import JOURNAL, open_study
from lit_lazy.support import disk, locks
from lit_lazy.support.disk import describe_shortage, write_text
from lit_lazy.training.run_folder import CHECKPOINTS, LAST, METRICS


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A separate file system in memory, limited by mount options."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_bytes(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


def fill_inodes(ballast: Path) -> None:
    ballast.mkdir()
    for number in range(10**6):
        (ballast / str(number)).touch()


@pytest.mark.parametrize(
    ("place", "options", "fill"),
    [(".", "size=64m,nr_inodes=300", fill_inodes), ("cells", "size=64m", fill_bytes)],
    ids=["inodes", "bytes of the cells alone"],
)
def test_a_full_disk_is_waited_for(place: str, options: str, fill: Any, lab: Lab) -> None:
    """The first training fills it."""
    once = lab.training.log.with_name("filled")

    def fill_up(_cfg: RunConfig, step: int, _folder: Path) -> None:
        if step == STEPS[0] and not once.exists():
            once.touch()
            with suppress(OSError):
                fill(ballast)

    lab.training.at_step = fill_up
    with small_disk(lab.folder / place, options) as folder:
        ballast = folder / "ballast"
        command = lab.start(workers=2)
        wait_until(lambda: "trying again" in command.said or not command.is_alive)
        assert command.is_alive, command.said
        (shutil.rmtree if ballast.is_dir() else os.unlink)(ballast)
        assert command.wait() == 0, command.said
        assert f"in {lab.folder} or a database: trying again in" in command.said
        assert "died" not in command.said
        lab.check_done(steps_repeated=8)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "all"])
def test_a_write_may_fail_anywhere(whole: bool, lab: Lab) -> None:
    """Once, and where the disk seems to have room. The command goes on, or ends in a line or with a failed cell.

    Every second write is tried, in `make test` nine, with one error after the other.
    """
    peace = lab.move(lab.runs / "peace")
    trap = Trap(peace.runs, "all", 0, pattern="^(open|os)")
    assert trap.start(peace).wait() == 0
    table, n = peace.table(), trap.count
    errors = itertools.cycle((errno.ENOSPC, errno.EIO, errno.EDQUOT))
    for at, error in zip(itertools.count(1, 2 if whole else max(n // 10, 1)), errors, strict=False):
        here = lab.move(lab.runs / str(at))
        lab.training.log.unlink(missing_ok=True)
        trap = Trap(here.runs, "all", at, error, pattern="^(open|os)")
        command = trap.start(here)
        status = command.wait()
        if not trap.is_sprung:  # the command had no more effects: how often it looks at a lock differs
            assert at > n / 2
            break
        assert "Traceback" not in command.said, f"effect {at}: {command.said}"
        assert status in (0, 1), f"effect {at}: {command.said}"
        if error != errno.EIO and "0/4 cells done" in command.said:  # it had begun to give cells to workers
            assert "failed" not in here.states().values(), f"effect {at}: {command.said}"
            assert "died" not in command.said, f"effect {at}: {command.said}"
        if status:
            here.run()
        here.check_done(steps_repeated=3)
        assert here.table() == table, f"effect {at}: {command.said}"


@pytest.mark.parametrize(
    ("options", "size", "what"),
    [
        ("size=8m", 2**24, "17 MB"),
        ("size=64m,nr_inodes=20", 2**20, "inodes for 32 files"),
        ("size=64m,nr_inodes=100", 2**24, ""),
    ],
)
def test_what_a_disk_lacks(options: str, size: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota shows when something is written."""
    with small_disk(tmp_path / "small", options) as folder:
        assert describe_shortage(folder, size) == what
        assert list(folder.iterdir()) == []
    monkeypatch.setattr(disk, "TemporaryFile", Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert describe_shortage(tmp_path, 1) == "1 MB (Disk quota exceeded)"


def test_where_nothing_can_be_locked_leases_replace_locks(lab: Lab, tmp_path, monkeypatch) -> None:
    """A worker that lost its lease writes nothing over the next one, which is ahead of it.

    It was suspended before its first checkpoint, for longer than a lease lasts.
    """
    monkeypatch.setattr(locks, "_known", {})  # of file systems that other tests have tried
    monkeypatch.setattr(locks, "LEASE_SECONDS", 2.0)
    pids = tmp_path / "pids"

    def suspend_first(cfg: RunConfig, step: int, folder: Path) -> None:
        if not pids.exists():
            write_text(pids, f"{os.getpid()} {folder}")
            os.kill(os.getpid(), signal.SIGSTOP)
        if str(folder) in pids.read_text():
            stop(cfg, step, folder)

    def start() -> Command:
        return Trap(lab.runs, "all", 1, errno.ENOLCK, most=10**9, pattern="^fcntl.flock").start(lab)

    with hold(lab, STEPS[2]):
        stop, lab.training.at_step = lab.training.at_step, suspend_first
        first = start()
        wait_until(pids.exists)
        pid, folder = pids.read_text().split()
        checkpoint, metrics = Path(folder, CHECKPOINTS, LAST), Path(folder, METRICS)
        second = start()
        try:
            wait_until(lambda: checkpoint.exists() and checkpoint.read_text() == str(STEPS[1]))
            before = metrics.read_bytes()
        finally:
            os.kill(int(pid), signal.SIGCONT)
        wait_until(lambda: "taken over" in (lab.folder / f"worker-{socket.gethostname()}-0.log").read_text())
        assert (checkpoint.read_text(), metrics.read_bytes()) == (str(STEPS[1]), before)
    assert (first.wait(), second.wait()) == (0, 0), first.said + second.said
    assert "died" not in first.said  # the other one may find its lease at an end, which looks the same
    assert f"no file can be locked in {lab.folder}: leases replace locks" in first.said
    lab.check_done(steps_repeated=1)
    assert not [*lab.runs.rglob("*.lease")]


DAMAGE = (b"", b"[1, 2]", b"[" * 200_000, b"\x00" * 64, b'{"format": 1}\n')


@pytest.mark.parametrize("content", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_file_costs_itself(content: bytes, lab: Lab) -> None:
    """A cell that lost its result is trained again, and nothing else is."""
    (failed := lab.cell(lab.keys[0])).mkdir(parents=True)
    (failed / "failed.json").write_bytes(content)
    lab.run()
    table = lab.table()
    for name in ("plan.json", JOURNAL, "result.json", "cell.json", "metrics.jsonl", "table.json"):
        lab.training.log.unlink(missing_ok=True)
        (path, *_) = sorted(lab.folder.rglob(name))
        path.write_bytes(content)
        lab.run()
        assert lab.table() == table, name
        assert set(lab.states().values()) == {"complete"}, name
        assert len(lab.count_steps()) == (3 if name == "result.json" else 0), name
        assert path.read_bytes() != content or name in ("cell.json", "metrics.jsonl", JOURNAL)


def test_a_journal_whose_last_line_was_torn_goes_on(lab: Lab) -> None:
    """As a full disk or a copy leaves it: its study is kept, and what is told later is not lost."""
    lab.run(until=1.0, status=1)
    journal = lab.folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-5])
    lab.run()
    lab.check_done()
    assert not list(lab.folder.glob("*.damaged"))
    done = [trial for trial in open_study(None, lab.folder).trials if trial.state.name == "COMPLETE"]
    assert {trial.user_attrs["key"] for trial in done} | {lab.keys[0]} == set(lab.keys)


def test_a_storage_that_is_away_or_lost_midway_loses_nothing(lab: Lab, tmp_path: Path, closed_port: int) -> None:
    said = lab.move(tmp_path / "away").run(storage=f"postgresql://me:hunter2@127.0.0.1:{closed_port}/x")
    assert said.count("Optuna's storage fails (") == 1
    assert "the grid goes on without it" in said
    assert "hunter2" not in said
    lab.training.log.unlink()
    file = tmp_path / "study.db"
    with hold(lab):
        command = lab.start(storage=f"sqlite:///{file}")
        wait_until(lambda: lab.find("running"))
        file.write_bytes(b"no database")
    assert command.wait() == 0, command.said
    lab.check_done()
