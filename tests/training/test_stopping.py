"""Signals in a training: it stops after its step, with a checkpoint of it, and resumes to the same bits."""

import logging
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from test_run import RAMP, At, assert_same_run, config, logged, run_until_killed

from lit_lazy.attention import AttentionSpec, LearnedBias
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.run import run

CFG = config(AttentionSpec(RAMP, LearnedBias()), ema_decay=0.5)
"""An averaged model with a ramped tau: validations, at steps 7 and 14, replace its weights."""
LAST = "checkpoints/last.ckpt"


def send(number):
    os.kill(os.getpid(), number)


def send_at(step, *numbers, hook="on_train_batch_start"):
    return At(step, lambda: [send(number) for number in numbers], hook)


def train(folder, *callbacks, patient=False, execution=ONE_DEVICE):
    with Interrupts(patient) as interrupts, interrupts.allow():
        options = {"keep_checkpoint": True, "execution": execution, "interrupts": interrupts}
        run(CFG, folder, logger=MetricFile(folder), callbacks=callbacks, **options)


def read_step(folder):
    return torch.load(folder / LAST, weights_only=True)["global_step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    torch.set_num_threads(1)  # as in every test
    train(folder)
    return folder


@pytest.mark.parametrize(
    ("hook", "step", "kept", "number"),
    [
        ("on_train_batch_start", 0, 1, signal.SIGINT),
        ("on_before_optimizer_step", 4, 5, signal.SIGTERM),
        ("on_train_batch_end", 8, 8, signal.SIGINT),  # when a checkpoint is due
        ("on_validation_start", 7, 7, signal.SIGTERM),
        ("on_validation_batch_end", 14, 14, signal.SIGINT),
        ("on_train_batch_start", 19, 20, signal.SIGTERM),  # the last
    ],
)
def test_no_step_is_lost(hook, step, kept, number, undisturbed, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, send_at(step, number, hook=hook))
    assert read_step(tmp_path) == kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(tmp_path)
    assert_same_run(undisturbed, tmp_path)
    assert logged(undisturbed) == logged(tmp_path)


def test_the_newest_checkpoint_is_resumed_whoever_wrote_the_one_before(tmp_path):
    """A process that a signal stopped, that was killed, or that knew the folder by another name."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "one", send_at(4, signal.SIGTERM))
    run_until_killed(CFG, tmp_path / "one", 11)
    assert read_step(tmp_path / "one") == 8
    moved = (tmp_path / "one").rename(tmp_path / "moved")
    run_until_killed(CFG, moved, 18)
    assert read_step(moved) == 16
    assert [path.name for path in (moved / LAST).parent.glob("*.ckpt")] == ["last.ckpt"]


def test_a_second_signal_stops_at_once_but_not_a_patient_worker(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "patient", send_at(4, signal.SIGTERM, signal.SIGTERM, signal.SIGINT), patient=True)
    assert read_step(tmp_path / "patient") == 5
    capfd.readouterr()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "other", send_at(4, signal.SIGINT, signal.SIGINT))
    assert not (tmp_path / "other" / LAST).exists()
    assert capfd.readouterr().err.count("stopping after this step, with a checkpoint of it; once more stops") == 1


def test_a_closed_terminal_costs_no_step(tmp_path):
    """As a dropped connection: the training must not fail by printing to it either."""
    user, terminal = os.openpty()
    stderr, former = os.dup(2), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(user)
        with pytest.raises(OSError, match="Input/output"):
            os.write(2, b"is closed")
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, send_at(4, signal.SIGHUP))
        os.write(2, b"is discarded")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        signal.signal(signal.SIGHUP, former)
    assert read_step(tmp_path) == 5


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As of a command that a shell runs in the background."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(tmp_path, send_at(4, signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("when", [1, 2], ids=["measuring the untrained model", "measuring the trained model"])
def test_outside_of_the_training_a_signal_stops_at_once(when, tmp_path, monkeypatch):
    from lit_lazy.training import run as module

    measure, calls = module.measure_model, []

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == when:
            send(signal.SIGTERM)
        return measure(*args, **options)

    monkeypatch.setattr(module, "measure_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert len(calls) == when


@pytest.mark.long
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("hook", "step", "kept"), [("on_train_batch_start", 4, 6), ("on_validation_start", 14, 14)])
def test_two_processes_agree_on_the_step(hook, step, kept, tmp_path):
    two = Execution(devices=2)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", send_at(step, signal.SIGTERM, hook=hook), execution=two)
    assert read_step(tmp_path / "stopped") == kept
    train(tmp_path / "stopped", execution=two)
    train(tmp_path / "undisturbed", execution=two)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")


# A SLURM job does not affect a run: Lightning neither requeues the job nor loads its own checkpoints

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "grid", "SLURM_NODELIST": "node1", "SLURM_LOCALID": "0"}
TASKS = {
    "one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "second of two": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
}


def in_job(task, bin_folder, work, *arguments):
    """Run a function in a process as a task of a job. Returns the exit status."""

    def be():
        os.environ.update(JOB | TASKS[task], PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
        rank_zero_only.rank = int(TASKS[task]["SLURM_PROCID"])  # as Lightning sets it on import
        work(*arguments)

    process = multiprocessing.get_context("fork").Process(target=be)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def scontrol(tmp_path):
    """A folder with a fake `scontrol`, which writes a file `called`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{folder / "called"}\n')
    (folder / "scontrol").chmod(0o755)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_signal_of_slurm_is_not_lightnings(task, undisturbed, tmp_path, scontrol):
    """It ends the process, as `sbatch --signal` before a time limit, and nothing is requeued; the run resumes."""
    assert in_job(task, scontrol, train, tmp_path / "here", send_at(11, signal.SIGUSR1)) == -signal.SIGUSR1
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"cell.json", "checkpoints", METRICS, "lock"}
    assert in_job(task, scontrol, train, tmp_path / "here") == 0
    assert not (scontrol / "called").exists()
    assert_same_run(undisturbed, tmp_path / "here")


def test_what_lightning_left_in_a_job_is_quarantined_and_never_loaded(undisturbed, trained, tmp_path, scontrol):
    here, noted = tmp_path / "here", tmp_path / "noted"
    here.mkdir()
    shutil.copy(trained, here / "hpc_ckpt_3.ckpt")

    def train_and_note():
        logging.basicConfig(filename=noted, level=logging.WARNING, force=True)
        train(here)

    assert in_job("one task", scontrol, train_and_note) == 0
    assert_same_run(undisturbed, here)
    assert (here / "hpc_ckpt_3.ckpt.damaged").read_bytes() == Path(trained).read_bytes()
    assert "hpc_ckpt_3.ckpt: left by Lightning's own requeueing; quarantined" in noted.read_text()
