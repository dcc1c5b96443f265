"""A SLURM job does not affect a run: Lightning neither requeues the job nor loads its own checkpoints."""

import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from test_run import At, assert_same_run, config

from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile
from lit_lazy.training.run import run

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "grid", "SLURM_NODELIST": "node1", "SLURM_LOCALID": "0"}
TASKS = {
    "one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "second of two": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
}


def train(folder: Path, *callbacks: Callback) -> None:
    run(config(), folder, logger=MetricFile(folder), callbacks=callbacks, keep_checkpoint=True)


def in_job(task: str, bin_folder: Path, work: Callable[..., None], *arguments: object) -> int | None:
    """Run a function in a process as a task of a job. Returns the exit status."""

    def be() -> None:
        os.environ.update(JOB | TASKS[task], PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
        rank_zero_only.rank = int(TASKS[task]["SLURM_PROCID"])  # as Lightning sets it on import
        work(*arguments)

    process = multiprocessing.get_context("fork").Process(target=be)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    """A folder with a fake `scontrol`, which writes a file `called`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{folder / "called"}\n')
    (folder / "scontrol").chmod(0o755)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_signal_of_slurm_is_not_lightnings(task: str, finished: Path, tmp_path: Path, scontrol: Path) -> None:
    """It ends the process, as `sbatch --signal` before a time limit, and the run resumes bit-identically.

    Nothing is requeued without the queue.
    """
    signalled = At(11, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert in_job(task, scontrol, train, tmp_path / "here", signalled) == -signal.SIGUSR1
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"cell.json", "checkpoints", METRICS, "lock"}
    assert in_job(task, scontrol, train, tmp_path / "here") == 0
    assert not (scontrol / "called").exists()
    assert_same_run(finished, tmp_path / "here")


def test_what_lightning_left_in_a_job_is_quarantined_and_never_loaded(
    finished: Path, trained: str, tmp_path: Path, scontrol: Path
) -> None:
    here, noted = tmp_path / "here", tmp_path / "noted"
    here.mkdir()
    shutil.copy(trained, here / "hpc_ckpt_3.ckpt")

    def train_and_note() -> None:
        logging.basicConfig(filename=noted, level=logging.WARNING, force=True)
        train(here)

    assert in_job("one task", scontrol, train_and_note) == 0
    assert_same_run(finished, here)
    assert (here / "hpc_ckpt_3.ckpt.damaged").read_bytes() == Path(trained).read_bytes()
    assert "hpc_ckpt_3.ckpt: left by Lightning's own requeueing; quarantined" in noted.read_text()
