"""Locks of processes, and leases where no file can be locked."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from lit_lazy.support import locks

SECONDS = 0.6
FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["locks", "leases"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path to lock; in the second case on a file system such as some NFS."""
    monkeypatch.setattr(locks, "_known", {})
    monkeypatch.setattr(locks, "LEASE_SECONDS", SECONDS)
    locks._watch_lease.cache_clear()
    if request.param == "leases":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
    yield tmp_path / "lock"
    locks._watch_lease.cache_clear()


def hold(path: Path, ready: Any) -> None:
    """Hold the lock for ever, and say by the exit status that an interrupt ended it."""
    try:
        with locks.make_file_lock(path):
            ready.set()
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)


@pytest.fixture
def holder(path: Path) -> Iterator[Any]:
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(path, ready))
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join()


def wait_until_free(path: Path) -> None:
    begun = time.monotonic()
    while locks.is_held(path):
        assert time.monotonic() - begun < 20
        time.sleep(0.02)


def test_one_process_holds_it_until_it_dies(path: Path, holder: Any) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < 3 * SECONDS:  # a lease is renewed meanwhile
        assert locks.is_held(path)
        with pytest.raises(filelock.Timeout):
            locks.make_file_lock(path).acquire(timeout=0)
        time.sleep(0.05)
    assert holder.is_alive()
    holder.kill()
    wait_until_free(path)
    with locks.make_file_lock(path).acquire(timeout=0):
        assert locks.can_lock(path.parent) or path.with_name("lock.lease").exists()
    assert not locks.is_held(path)
    said = locks.describe_leases(path.parent)
    expected = f"no file can be locked in {path.parent}: leases replace locks"
    assert said == "" if locks.can_lock(path.parent) else said.startswith(expected)


def test_a_process_that_was_stopped_for_long_loses_a_lease_and_is_interrupted(path: Path, holder: Any) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    if locks.can_lock(path.parent):
        time.sleep(2 * SECONDS)
        assert locks.is_held(path)
        return
    wait_until_free(path)
    with locks.make_file_lock(path).acquire(timeout=0):
        os.kill(holder.pid, signal.SIGCONT)
        holder.join(20)
        assert holder.exitcode == 7
        assert path.with_name("lock.lease").exists(), "it took the lease of the next holder"
