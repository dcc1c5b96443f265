"""Cells as Ray tasks on a cluster of two nodes on this machine."""

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from instant import read_pid, wait_until
from mistakes import expect_refusal

from lit_lazy.command.main import main
from lit_lazy.grid.cell_state import read_state
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.grid.run import GridDriver
from lit_lazy.grid.work_records import Job
from lit_lazy.table.build import read_table
from lit_lazy.training.run_folder import read_failure, read_grid_id

pytest.importorskip("ray", reason="needs Ray: pip install 'lit-lazy[ray]'")

from lit_lazy.grid import ray_pool
from lit_lazy.grid.ray_pool import count_cells

pytestmark = pytest.mark.xdist_group("ray")

LONG = (
    *("--rows", "softmax,lazy", "--seeds", "0", "--train.steps=2500", "--train.checkpoint_every=20"),
    *("--train.val_every=1000", "--train.log_every=100"),
)
"""Two cells that train for a few seconds, long enough to be stopped in training."""
NODE = {"object_store_memory": ray_pool.OBJECT_STORE_BYTES, "include_dashboard": False}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes, one of them with two (nominal) GPUs."""
    from ray.cluster_utils import Cluster as TestCluster

    with (
        # A short path for Ray's socket names, and not the user's home, which has a token.
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = TestCluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE})
        cluster.add_node(num_cpus=4, num_gpus=2, **NODE)
        yield cluster.address
        cluster.shutdown()


def command(runs: Path, pair: str, *more: str) -> list[str]:
    return ["ablate", "run", pair, "--runs", str(runs), "--workers", "2", *more]


def log_of(folder: Path) -> list[str]:
    (path,) = folder.glob("worker-*-ray.log")
    return [line.partition("lit_lazy.worker ")[2] for line in path.read_text().splitlines()]


@pytest.mark.long
def test_the_table_is_that_of_local_workers(runs, pair, address, capsys, monkeypatch) -> None:
    """Every cell is executed once; a diverging cell does not affect others."""
    assert main(command(runs, pair)) == 1
    local = read_table(runs / "pair-backcopy_tiny" / "table.json")
    monkeypatch.setenv("RAY_ADDRESS", address)
    capsys.readouterr()
    assert main(command(runs / "ray", pair, "--launcher", "ray", "--gpus", "0")) == 1
    assert "4/5 cells done, 0 running, 1 failed" in capsys.readouterr().out
    folder = runs / "ray" / "pair-backcopy_tiny"
    found = read_table(folder / "table.json")
    assert [row.metrics for row in found.rows] == [row.metrics for row in local.rows]
    assert [row.n for row in found.rows] == [2, 2, 0]
    started = [line for line in log_of(folder) if line.startswith("start ")]
    assert len(started) == len(set(started)) == 5


@pytest.mark.long
def test_interrupted_and_killed_cells_go_on(runs, pair, address, capsys) -> None:
    """Ctrl-C with a local Ray; then the same command on a cluster, where a task is killed in training."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_lazy", *command(runs, pair, "--launcher", "ray", *LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    grid = wait_for_training(runs, time.time())
    # Like a terminal: to the command's process group.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, out + err
    assert err.splitlines()[-1] == "interrupted; the same command resumes"
    assert "Traceback" not in err
    assert "ray" not in out.lower()
    assert {cell.status for cell in read_grid(runs / grid).cells} == {"waiting"}

    killed: list[int] = []
    begun = time.time()
    killer = threading.Thread(target=lambda: killed.append(kill_one(runs, begun)))
    killer.start()
    on_cluster = ["--launcher", "ray", "--ray-address", address, "--gpus", "0"]
    assert main(command(runs, pair, *on_cluster, *LONG)) == 0
    killer.join()
    assert f"its worker (process {killed[0]} on" in capsys.readouterr().out
    assert {cell.status for cell in read_grid(runs / grid).cells} == {"complete"}
    lines = log_of(runs / grid)
    for variant in ("softmax", "lazy"):
        assert lines.count(f"done {variant} seed 0") == 1


def wait_for_training(runs: Path, since: float) -> str:
    """Wait until a cell has written a checkpoint; returns the grid's id, which includes a hash of the overrides."""

    def find() -> list[Path]:
        written = runs.glob("pair-*/cells/*/checkpoints/last.ckpt")
        return [checkpoint for checkpoint in written if checkpoint.stat().st_mtime > since]

    return wait_until(find, seconds=180)[0].relative_to(runs).parts[0]


def kill_one(runs: Path, since: float) -> int:
    """SIGKILL a task in training; returns its process."""
    grid = runs / wait_for_training(runs, since)
    pids = [read_pid(folder) for folder in (grid / "cells").iterdir() if read_state(folder) == "running"]
    os.kill(pids[0], signal.SIGKILL)
    return pids[0]


WRONG = [
    (["--launcher", "ray"], "pip install 'lit-lazy[ray]'"),
    (["--gpus", "1"], "--gpus 1.0: needs --launcher ray"),
    (["--ray-address", "auto"], "--ray-address auto: needs --launcher ray"),
    (["--launcher", "ray", "--ray-address", "ray://head:10001"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "head:0"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "127.0.0.1:{closed}"], "does not answer ([Errno 111] Connection refused)"),
    (["--launcher", "ray", "--ray-address", "127.0.0.1:{silent}"], "answers, but not as a Ray cluster"),
    *(
        pytest.param(["--launcher", "ray", "--ray-address", "{cluster}", *share], said, marks=pytest.mark.long)
        for share, said in (
            (["--gpus", "3"], "asks for 1 CPU and 3 GPUs, which no machine"),
            (["--threads", "5"], "asks for 5 CPUs and 1 GPU, which no"),
        )
    ),
]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_mistake_is_one_line_and_creates_nothing(options, said, pair, closed_port, request, monkeypatch, capsys):
    cluster = request.getfixturevalue("address") if "{cluster}" in options else ""
    monkeypatch.setattr(ray_pool, "JOIN_SECONDS", 5.0 if cluster else 1.0)
    if "pip install" in said:
        monkeypatch.setitem(sys.modules, "ray", None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"closed": closed_port, "silent": silent.getsockname()[1], "cluster": cluster}
        words = ["ablate", "run", pair, *(option.format(**ports) for option in options)]
        assert said in expect_refusal(words, capsys)


def test_as_many_cells_run_at_once_as_machines_carry() -> None:
    """A share of 0.4 lies within one GPU."""
    times = {(1, 0): 8 + 2, (3, 0): 2, (1, 1): 2, (1, 2): 1, (1, 0.5): 4, (1, 0.4): 4, (1, 0.1): 8}
    assert {share: count_cells([(8.0, 2.0), (2.0, 0.0)], *share) for share in times} == times


def test_a_worker_that_does_not_share_the_folder_sends_its_files(lab, tmp_path, monkeypatch) -> None:
    """They are written here, the result last, and the cell is done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a task sets its own
    lab.folder.mkdir(parents=True)
    cell, driver = lab.work.cells[0], GridDriver(lab.work, None)
    mark = read_grid_id(lab.folder)
    there = tmp_path / "elsewhere"
    ending = ray_pool.execute_task(cell, Job(lab.move(there).folder, mark, 1, ()), str(tmp_path))
    elsewhere = lab.move(there / f"ray-{mark[:8]}")
    assert (ending.kind, [*(ending.files or {})]) == ("done", ["cell.json", "metrics.jsonl", "result.json"])
    assert read_state(lab.cell(cell.key)) == "waiting"
    driver.record(ending)
    assert read_state(lab.cell(cell.key)) == "complete"
    sent, kept = (found.cell(cell.key) for found in (elsewhere, lab))
    assert all((sent / name).read_bytes() == (kept / name).read_bytes() for name in ending.files or {})
    here = ray_pool.execute_task(lab.work.cells[1], Job(lab.folder, mark, 1, ()), str(tmp_path))
    assert (here.kind, here.files) == ("done", None)

    # What fails there has failed here. The command decides who tries again.
    cell, job = lab.work.cells[2], Job(lab.move(there).folder, mark, 1, ())
    with monkeypatch.context() as patch:
        patch.setattr(lab.training, "at_step", Mock(side_effect=ValueError("why")))
        driver.record(ray_pool.execute_task(cell, job, str(tmp_path)))
    assert driver.states()[cell.key] == "failed"
    assert "why" in read_failure(lab.cell(cell.key))
    driver.retry(cell.key)
    lab.training.log.unlink()
    driver.record(ray_pool.execute_task(cell, job, str(tmp_path)))
    assert driver.states()[cell.key] == "complete"
    ray_pool.execute_task(cell, dataclasses.replace(job, mark="another"), str(tmp_path))
    assert {*lab.count_steps().values()} == {2}, "a grid that starts anew finds nothing of the former one there"
