"""The queue executes every cell once, with concurrent claims, dead workers and unreliable clocks."""

import io
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import optuna
import postgres
import pytest
import sqlalchemy
from filelock import FileLock
from rich.console import Console

from lit_lazy.command.main import main
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.jobs.status import print_status
from lit_lazy.grid.queue.liveness import Heartbeat, Membership, StalenessDetector, is_dead
from lit_lazy.grid.queue.queue import CellLostError, Queue, StorageDamagedError, Task
from lit_lazy.grid.queue.storage import check_storage, default_storage, list_grid_names, normalise_url
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking.databases import StorageError

ME = {"host": "elsewhere", "pid": "1", "lock": "/nowhere"}


def cells(n: int) -> list[Cell]:
    return [Cell(key=f"k{i}", variant="v", source="ours", seed=i, config={}, axes={}) for i in range(n)]


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both databases must behave alike."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'queue.db'}"
    return request.getfixturevalue("postgres_storage")


def claimed(queue: Queue) -> Task:
    task = queue.claim(ME)
    assert task is not None
    return task


def take_all(storage: str, taken: "multiprocessing.Queue[str]") -> None:
    queue = Queue(storage, "study")
    while task := queue.claim(ME):
        taken.put(task.cell.key)
        queue.complete(task, 0.0)


def test_several_workers_take_every_cell_exactly_once(storage: str) -> None:
    """Claims without pauses: without row locks, sqlite would give two workers the same cell."""
    Queue(storage, "study").add_missing(cells(40))
    context = multiprocessing.get_context("fork")
    taken: multiprocessing.Queue[str] = context.Queue()
    workers = [context.Process(target=take_all, args=(storage, taken)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Counter(taken.get(timeout=5) for _ in range(40)) == Counter(f"k{i}" for i in range(40))
    assert set(Queue(storage, "study").states().values()) == {"complete"}


def add(storage: str) -> None:
    Queue(storage, "study").add_missing(cells(30))


def test_processes_that_enqueue_at_once_enqueue_each_cell_once(storage: str) -> None:
    context = multiprocessing.get_context("fork")
    adders = [context.Process(target=add, args=(storage,)) for _ in range(3)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
        assert adder.exitcode == 0
    queue = Queue(storage, "study")
    assert queue.states() == {f"k{i}": "waiting" for i in range(30)}
    assert len(queue.entries("waiting")) == 30


def test_adding_again_adds_only_what_is_missing_or_failed(storage: str) -> None:
    queue = Queue(storage, "study")
    assert queue.add_missing(cells(3)) == 3
    assert queue.add_missing(cells(3)) == 0
    first, second = claimed(queue), claimed(queue)
    assert queue.add_missing(cells(3)) == 0  # two running, one waiting
    queue.complete(first, 1.0)
    queue.fail(second, "out of memory")
    assert [(entry.key, entry.reason, entry.final) for entry in queue.entries("failed")] == [
        ("k1", "out of memory", False)
    ]
    assert queue.add_missing(cells(4)) == 2  # the failed one and a new one
    assert queue.states() == {"k0": "complete", "k1": "waiting", "k2": "waiting", "k3": "waiting"}
    assert queue.entries("failed") == []


def test_a_cell_once_complete_stays_complete(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(1))
    queue.complete(claimed(queue), 0.0)
    assert queue.add_missing(cells(1)) == 0
    assert queue.states() == {"k0": "complete"}
    assert queue.claim(ME) is None


def test_claiming_from_an_empty_queue_leaves_no_trace(storage: str) -> None:
    queue = Queue(storage, "study")
    assert queue.claim(ME) is None
    assert queue.states() == {}


def test_a_worker_can_be_kept_to_some_cells(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(4))
    wanted = {"k1", "k3"}
    taken = [queue.claim(ME, wanted), queue.claim(ME, wanted), queue.claim(ME, wanted)]
    assert [task and task.cell.key for task in taken] == ["k1", "k3", None]
    assert queue.states() == {"k0": "waiting", "k1": "running", "k2": "waiting", "k3": "running"}


def test_a_requeued_cell_waits_again_and_keeps_its_reason(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    queue.requeue(claimed(queue), "interrupted")
    assert queue.states() == {"k0": "waiting", "k1": "waiting"}
    assert [entry.reason for entry in queue.entries("waiting")] == ["interrupted", ""]
    assert claimed(queue).cell.key == "k0"


def test_a_worker_that_was_given_up_cannot_book_its_cell(storage: str) -> None:
    """It seemed dead and another worker has its cell: only the latter's result counts."""
    queue = Queue(storage, "study")
    queue.add_missing(cells(1))
    lost = claimed(queue)
    assert queue.release(queue.entries("running")[0], progress="", most=3)
    taken_over = claimed(queue)
    assert not queue.is_held(lost)
    for book in (
        lambda: queue.complete(lost, 1.0),
        lambda: queue.fail(lost, "late"),
        lambda: queue.requeue(lost, "late"),
    ):
        with pytest.raises(CellLostError, match="given to another worker"):
            book()
    queue.complete(taken_over, 2.0)
    assert queue.states() == {"k0": "complete"}
    with pytest.raises(CellLostError):
        queue.complete(taken_over, 2.0)


def test_a_cell_that_kills_its_workers_fails_unless_it_gets_ahead(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(1))

    def die(progress: str) -> bool:
        claimed(queue)
        return queue.release(queue.entries("running")[0], progress, most=3)

    assert [die("step 1"), die("step 1"), die("step 2"), die("step 2")] == [True] * 4
    assert die("step 2") is False
    assert "died 3 times without progress" in queue.entries("failed")[0].reason


def hold_and_wait(storage: str, folder: Path) -> None:
    with Membership(folder) as membership:
        assert Queue(storage, "study").claim(membership.identity)
        time.sleep(600)


def test_the_lock_tells_a_dead_worker_from_a_living_one(tmp_path: Path) -> None:
    storage = default_storage(tmp_path)
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    locks = tmp_path / "workers"
    with Membership(locks) as own:
        queue.claim(own.identity)
        worker = multiprocessing.get_context("fork").Process(target=hold_and_wait, args=(storage, locks))
        worker.start()
        while len(queue.entries("running")) < 2:
            time.sleep(0.05)
        assert [is_dead(entry.worker, locks) for entry in queue.entries("running")] == [False, False]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        assert [is_dead(entry.worker, locks) for entry in queue.entries("running")] == [False, True]
    assert is_dead(ME, locks) is None
    assert is_dead(own.identity | {"host": "another"}, locks) is None


def test_the_lock_is_found_where_the_runs_folder_lies_now(tmp_path: Path) -> None:
    """The folder was moved, or is seen through another mount."""
    with Membership(tmp_path / "before") as worker:
        (tmp_path / "before").rename(tmp_path / "after")
        assert is_dead(worker.identity, tmp_path / "after") is False
    (tmp_path / "after" / Path(worker.identity["lock"]).name).touch()
    assert is_dead(worker.identity, tmp_path / "after") is True


def test_a_beat_that_stops_changing_is_death_by_the_watchers_own_clock() -> None:
    watch = StalenessDetector(stale_seconds=120)
    assert watch.find_stale({1: "12:00:00", 2: "12:00:00"}, now=0) == set()
    assert watch.find_stale({1: "12:00:15", 2: "12:00:00"}, now=50) == set()
    assert watch.find_stale({1: "12:00:30", 2: "12:00:00"}, now=100) == set()
    assert watch.find_stale({1: "12:00:45", 2: "12:00:00"}, now=121) == {2}
    # The other machine's clock jumps by a day; its beats change, so it is alive.
    assert watch.find_stale({1: "36:00:45"}, now=170) == set()
    assert watch.find_stale({1: "12:00:50"}, now=220) == set()
    # The same holds for a trial without a beat.
    beats = {1: "None"}
    assert [bool(watch.find_stale(beats, now)) for now in (230, 280, 330, 351)] == [False, False, False, True]


def test_after_a_pause_of_its_own_the_watcher_begins_anew() -> None:
    """After an outage of the database or a suspended machine, old beats prove nothing."""
    watch = StalenessDetector(stale_seconds=120)
    watch.find_stale({1: "a"}, now=0)
    assert watch.find_stale({1: "a"}, now=1000) == set()
    assert watch.find_stale({1: "a"}, now=1050) == set()
    assert watch.find_stale({1: "a"}, now=1100) == set()
    assert watch.find_stale({1: "a"}, now=1121) == {1}


def test_a_heart_beats_for_what_is_held(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    held, dropped = claimed(queue), claimed(queue)
    with Heartbeat(queue, 0.05) as heart:
        heart.hold(held)
        end = time.monotonic() + 10
        while queue.beats()[held.trial_id].startswith("None") and time.monotonic() < end:
            time.sleep(0.05)
    assert not queue.beats()[held.trial_id].startswith("None")
    assert queue.beats()[dropped.trial_id].startswith("None")


def test_who_has_just_taken_a_dead_workers_cell_is_not_dead_for_its_silence(storage: str) -> None:
    """Two machines observe; one releases first, and its worker has sent no beat when the other checks."""
    queue, watch = Queue(storage, "study"), StalenessDetector(stale_seconds=120)
    queue.add_missing(cells(1))
    queue.beat(claimed(queue))
    assert [watch.find_stale(queue.beats(), now) for now in (0, 50, 100)] == [set()] * 3
    queue.release(queue.entries("running")[0], progress="", most=3)
    claimed(queue)
    assert watch.find_stale(queue.beats(), now=121) == set()


def test_who_was_given_up_does_not_beat_for_its_successor(storage: str) -> None:
    """Otherwise the new holder's death would go unnoticed."""
    queue = Queue(storage, "study")
    queue.add_missing(cells(1))
    lost = claimed(queue)
    queue.release(queue.entries("running")[0], progress="", most=3)
    claimed(queue)
    before = queue.beats()
    queue.beat(lost)
    assert queue.beats() == before


def test_who_holds_a_cell_of_a_queue_that_was_cleared_has_lost_it(storage: str) -> None:
    """`--fresh` on another machine."""
    queue = Queue(storage, "study")
    queue.add_missing(cells(1))
    lost, entry = claimed(queue), queue.entries("running")[0]
    Queue(storage, "study").clear()
    queue.beat(lost)
    with pytest.raises(CellLostError):
        queue.complete(lost, 1.0)
    assert queue.release(entry, progress="", most=3)
    assert queue.claim(ME) is None


def test_facts_and_cells_survive_reopening_and_are_gone_after_clearing(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.facts = {"parent": "abc"}
    queue.add_missing(cells(1))
    again = Queue(storage, "study")
    assert again.facts == {"parent": "abc"}
    assert again.states() == {"k0": "waiting"}
    assert list_grid_names(storage) == ["study"]
    again.clear()
    assert again.facts == {}
    assert again.states() == {}


def test_a_study_of_something_else_is_refused(storage: str) -> None:
    other = optuna.create_study(storage=normalise_url(storage), study_name="study")
    other.add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(StorageError, match="was not made by `lit-lazy"):
        Queue(storage, "study")
    assert list_grid_names(storage) == []


def sign(storage: str, made_by: str) -> None:
    """Sign the study of a queue as another version does."""
    optuna.load_study(storage=normalise_url(storage), study_name="study").set_user_attr("made_by", made_by)


def test_the_status_of_a_grid_of_an_earlier_version_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It signed its study `queue 2`, and stored cells with the same attributes. Nothing else opens it."""
    storage = default_storage(runs)
    queue = Queue(storage, "study")
    queue.add_missing(cells(3))
    queue.complete(claimed(queue), 1.0)
    queue.fail(claimed(queue), "no reason")
    sign(storage, "lit-lazy ablate run, queue 2")
    before = (runs / "queue.db").read_bytes()
    assert main(["ablate", "status", "study", "--runs", str(runs)]) == 0
    assert (runs / "queue.db").read_bytes() == before
    said = capsys.readouterr().out
    assert "study: 1/3 cells complete" in said
    assert "Made by an earlier version of lit-lazy, which alone can continue it; `lit-lazy ablate table`" in said
    assert "no reason" in said
    assert "The same `ablate run`" not in said
    with pytest.raises(StorageError, match="was made by another version of lit-lazy, which alone can continue it"):
        Queue(storage, "study")
    with pytest.raises(StorageError, match="was made by another version"):
        check_storage(storage, "study")
    sign(storage, "lit-lazy ablate run, queue 4")
    assert main(["ablate", "status", "study", "--runs", str(runs)]) == 2
    assert "was made by another version" in capsys.readouterr().err


def test_storages_that_cannot_be_used(tmp_path: Path, closed_port: int) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(os.urandom(4096))
    for storage, message in (
        ("mysql://localhost/x", "must be sqlite:///FILE or postgresql://"),
        ("queue.db", "must be sqlite:///FILE or postgresql://"),
        (f"sqlite:///{broken}", "file is not a database"),
        ("sqlite:////nowhere/queue.db", "folder '/nowhere' does not exist; create it"),
        (f"postgresql://me:secret@127.0.0.1:{closed_port}/x", "are server, user, password and database right"),
    ):
        with pytest.raises(StorageError, match=message) as raised:
            check_storage(storage, "study")
        assert "\n" not in str(raised.value)
        assert "secret" not in str(raised.value)
    assert redact_url("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"
    check_storage(default_storage(tmp_path), "study")
    assert not (tmp_path / "queue.db").exists()


def damage(path: Path, start: int) -> None:
    """Overwrite a file from an offset."""
    content = path.read_bytes()
    path.write_bytes(content[:start] + b"\xff" * (len(content) - start))


@pytest.mark.parametrize(("start", "why"), [(0, "file is not a database"), (4096, "database disk image is malformed")])
def test_a_damaged_database_is_reported_at_once(start: int, why: str, tmp_path: Path) -> None:
    storage, path = default_storage(tmp_path), tmp_path / "queue.db"
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    task = claimed(queue)
    queue._engine.dispose()
    queue._storage.engine.dispose()
    damage(path, start)
    for ask in (queue.states, lambda: queue.complete(task, 1.0), lambda: Queue(storage, "study")):
        with pytest.raises(StorageDamagedError) as raised:
            ask()
        assert str(raised.value) == (
            f"the queue's database {path} is damaged ({why}); move it away and give the same command again: it finds "
            "the results of finished cells"
        )
    FileLock(f"{path}.lock", timeout=0).acquire()  # no process holds it


def test_a_command_on_a_damaged_database_ends_in_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Queue(default_storage(runs), "table2-backcopy_tiny").add_missing(cells(2))
    damage(runs / "queue.db", 4096)
    assert main(["ablate", "run", "table2", "--base", "backcopy_tiny", "--runs", str(runs)]) == 2
    assert capsys.readouterr().err == (
        f"lit-lazy: --storage 'sqlite:///{runs / 'queue.db'}': cannot be used (database disk image is malformed); move "
        "that file away, or name another\n"
    )


def test_a_database_that_goes_away_for_a_while_is_waited_for(
    postgres_server: "postgres.Server", caplog: pytest.LogCaptureFixture
) -> None:
    storage = postgres.create_database(postgres_server, "away")
    queue = Queue(storage, "study")
    queue.add_missing(cells(2))
    task = claimed(queue)
    postgres_server.stop()
    with pytest.raises((sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)):
        queue.beat(task)

    # The server ends with its starting thread, so the record runs in the other thread.
    recording = threading.Thread(target=queue.complete, args=(task, 1.0))
    recording.start()
    time.sleep(2)
    assert recording.is_alive()
    postgres_server.start()
    recording.join(timeout=60)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "lit_lazy.grid.queue"]
    assert said.startswith("the queue's database postgresql+psycopg://postgres@127.0.0.1:")
    assert said.endswith("; retrying for 10 minutes")
    assert queue.states() == {"k0": "complete", "k1": "waiting"}
    assert claimed(queue).cell.key == "k1"


@pytest.mark.long
def test_what_a_cell_costs_does_not_grow_with_the_grid(tmp_path: Path) -> None:
    """Compare the median time of claims and counts at 200 and at 4,000 cells."""
    seconds = {}
    for n in (200, 4000):
        queue = Queue(f"sqlite:///{tmp_path / f'{n}.db'}", "study")
        with queue._engine.begin() as connection:  # enqueue by SQL; its linear cost is measured elsewhere
            connection.execute(
                sqlalchemy.text("INSERT INTO trials (number, study_id, state) VALUES (:i, :s, 'WAITING')"),
                [{"i": i, "s": queue._study_id} for i in range(n)],
            )
            connection.execute(
                sqlalchemy.text(
                    "INSERT INTO trial_user_attributes (trial_id, key, value_json) SELECT trial_id, 'key', "
                    "'\"k' || number || '\"' FROM trials UNION ALL SELECT trial_id, 'cell', :cell FROM trials"
                ),
                {"cell": '{"key": "", "variant": "v", "source": "", "seed": 0, "config": {}, "axes": {}}'},
            )
        times = []
        for _ in range(30):
            started = time.process_time()
            queue.complete(claimed(queue), 0.0)
            times.append(time.process_time() - started)
        seconds[n] = median(times)
    assert seconds[4000] < 1.5 * seconds[200] + 0.003


def begun(storage: str, n: int) -> Queue:
    """A queue of n waiting cells with configs of typical size; the first was interrupted once."""
    config = {f"setting_{i}": {"value": i, "name": "x" * 20} for i in range(20)}
    queue = Queue(storage, "study")
    engine = sqlalchemy.create_engine(normalise_url(storage))
    with engine.begin() as connection:  # Optuna's API takes half an hour for ten thousand
        for i in range(1, n + 1):
            cell = Cell(key=f"k{i}", variant="v", source="ours", seed=i, config=config, axes={})
            attrs = {"key": cell.key, "cell": asdict(cell)} | ({"reason": "interrupted"} if i == 1 else {})
            trial = connection.execute(
                sqlalchemy.text(
                    "INSERT INTO trials (number, study_id, state) VALUES (:number, 1, 'WAITING') RETURNING trial_id"
                ),
                {"number": i - 1},
            ).scalar_one()
            connection.execute(
                sqlalchemy.text(
                    "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (:trial, :key, :value)"
                ),
                [{"trial": trial, "key": key, "value": json.dumps(value)} for key, value in attrs.items()],
            )
    engine.dispose()
    return queue


def test_status_asks_as_often_for_many_cells_as_for_one(storage: str, tmp_path: Path) -> None:
    queue = begun(storage, 50)
    asked: list[str] = []

    def listen(*given: Any) -> None:
        asked.append(given[2])

    shown = io.StringIO()
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", listen)
    try:
        print_status(queue, tmp_path, Console(file=shown, width=200))
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", listen)
    assert "50 waiting" in shown.getvalue()
    assert "interrupted" in shown.getvalue()
    assert len([query for query in asked if query.startswith("SELECT")]) <= 8, asked


def test_an_entry_is_what_the_queue_knows_of_a_cell(storage: str) -> None:
    queue = Queue(storage, "study")
    queue.add_missing(cells(4))
    before = datetime.now()
    running, failed, requeued = claimed(queue), claimed(queue), claimed(queue)
    queue.fail(failed, "out of memory", final=True)
    queue.requeue(requeued, "interrupted")
    queue.add_missing(cells(2))
    (entry,) = queue.entries("running")
    assert (entry.trial_id, entry.key, entry.run, entry.variant, entry.seed) == (running.trial_id, "k0", "k0", "v", 0)
    assert entry.worker == ME | {"token": running.token}
    assert entry.since is not None
    assert before <= entry.since <= datetime.now()
    assert queue.entries("failed") == []  # requeued as another trial
    waiting = queue.entries("waiting", "running")
    assert [(entry.key, entry.state, entry.reason) for entry in waiting] == [
        ("k2", "waiting", "interrupted"),
        ("k3", "waiting", ""),
        ("k1", "waiting", ""),
        ("k0", "running", ""),
    ]


@pytest.mark.long
def test_status_of_ten_thousand_cells_takes_less_than_a_second_of_a_processor(tmp_path: Path) -> None:
    queue = begun(f"sqlite:///{tmp_path / 'queue.db'}", 10_000)
    started = time.process_time()
    print_status(queue, tmp_path, Console(file=io.StringIO()))
    assert time.process_time() - started < 1.0
