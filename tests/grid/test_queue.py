"""The queue: every cell once, whoever asks and whoever dies."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.queue import Queue


def cells(n: int) -> list[Cell]:
    return [Cell(key=f"k{i}", variant="v", source="ours", seed=i, config={}, axes={}) for i in range(n)]


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'queue.db'}"


def take_all(storage: str, taken: "multiprocessing.Queue[str]") -> None:
    queue = Queue(storage, "study")
    while task := queue.claim():
        taken.put(task.cell.key)
        queue.complete(task, 0.0)


def test_several_workers_take_every_cell_exactly_once(storage: str) -> None:
    """Without pauses between claims, where sqlite's lack of row locks gave two workers the same cell."""
    Queue(storage, "study").add_missing(cells(40))
    context = multiprocessing.get_context("spawn")
    taken: multiprocessing.Queue[str] = context.Queue()
    workers = [context.Process(target=take_all, args=(storage, taken)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Counter(taken.get(timeout=5) for _ in range(40)) == Counter(f"k{i}" for i in range(40))
    assert set(Queue(storage, "study").states().values()) == {"complete"}


def test_adding_again_adds_only_what_is_missing_or_failed(storage: str) -> None:
    queue = Queue(storage, "study")
    assert queue.add_missing(cells(3)) == 3
    assert queue.add_missing(cells(3)) == 0
    first, second = queue.claim(), queue.claim()
    assert first is not None
    assert second is not None
    assert queue.add_missing(cells(3)) == 0  # two running, one waiting
    queue.complete(first, 1.0)
    queue.fail(second, "out of memory")
    assert queue.reasons() == {"k1": "out of memory"}
    assert queue.add_missing(cells(4)) == 2  # the failed one and a new one
    assert queue.states() == {"k0": "complete", "k1": "waiting", "k2": "waiting", "k3": "waiting"}


def test_a_cell_once_complete_stays_complete(storage: str) -> None:
    queue = Queue(storage, "study")
    for cell in cells(1) * 2:
        queue.add_missing([cell])
        task = queue.claim()
        if task is not None:
            queue.complete(task, 0.0)
    assert queue.states() == {"k0": "complete"}
    assert queue.claim() is None


def test_claiming_from_an_empty_queue_leaves_no_trace(storage: str) -> None:
    queue = Queue(storage, "study")
    assert queue.claim() is None
    assert queue.states() == {}


def claim_and_wait(storage: str) -> None:
    assert Queue(storage, "study").claim() is not None
    time.sleep(600)


def test_a_killed_workers_cell_is_failed_and_a_living_ones_is_not(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    own = queue.claim()
    assert own is not None
    worker = multiprocessing.get_context("spawn").Process(target=claim_and_wait, args=(storage,))
    worker.start()
    while len(queue.running()) < 2 or not all("worker" in t.user_attrs for t in queue._study.get_trials()):
        time.sleep(0.05)
    assert queue.recover() == []
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert [(cell.key, reason) for cell, reason in queue.recover()] == [("k1", "its worker was killed")]
    assert queue.states() == {"k0": "running", "k1": "failed"}
    assert queue.add_missing(cells(2)) == 1


def test_facts_and_cells_survive_reopening_and_are_gone_after_clearing(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.facts = {"parent": "abc"}
    queue.add_missing(cells(1))
    again = Queue(storage, "study")
    assert again.facts == {"parent": "abc"}
    assert again.states() == {"k0": "waiting"}
    again.clear()
    assert again.facts == {}
    assert again.states() == {}
