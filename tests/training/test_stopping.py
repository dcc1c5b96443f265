"""Signals in a training: it stops after its step, with a checkpoint of it, and resumes to the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_run import RAMP, assert_same_run, config

from lit_lazy.attention import AttentionSpec, LearnedBias
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.run import run

CFG = config(AttentionSpec(RAMP, LearnedBias()), ema_decay=0.5)
"""An averaged model with a ramped tau: validations, at steps 7 and 14, replace its weights."""
LAST = "checkpoints/last.ckpt"


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Once(Callback):
    """Sends signals at the first call of one of Lightning's hooks at a step."""

    def __init__(self, hook: str, step: int, *numbers: signal.Signals) -> None:
        self.step, self.numbers = step, numbers
        setattr(self, hook, self.act)

    def act(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == self.step:
            numbers, self.numbers = self.numbers, ()
            for number in numbers:
                send(number)


def train(folder: Path, *callbacks: Callback, patient: bool = False, execution: Execution = ONE_DEVICE) -> None:
    with Interrupts(patient) as interrupts, interrupts.allow():
        options = {"keep_checkpoint": True, "execution": execution, "interrupts": interrupts}
        run(CFG, folder, logger=MetricFile(folder), callbacks=callbacks, **options)  # type: ignore[arg-type]


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """All points of all curves."""
    return {(name, line.step): value for line in read_lines(folder / METRICS) for name, value in line.metrics.items()}


def read_step(folder: Path) -> int:
    return torch.load(folder / LAST, weights_only=True)["global_step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_no_step_is_lost(
    hook: str, step: int, kept: int, number: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Once(hook, step, number))
    assert read_step(tmp_path) == kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(tmp_path)
    assert_same_run(undisturbed, tmp_path)
    assert logged(undisturbed) == logged(tmp_path)


def test_a_second_signal_stops_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Once("on_train_batch_start", 4, signal.SIGINT, signal.SIGINT))
    assert not (tmp_path / LAST).exists()
    assert capfd.readouterr().err.count("stopping after this step, with a checkpoint of it; once more stops") == 1


def test_a_closed_terminal_costs_no_step(tmp_path: Path) -> None:
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
            train(tmp_path, Once("on_train_batch_start", 4, signal.SIGHUP))
        os.write(2, b"is discarded")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        signal.signal(signal.SIGHUP, former)
    assert read_step(tmp_path) == 5


def test_a_patient_worker_keeps_the_step_whatever_else_arrives(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Once("on_train_batch_start", 4, *numbers), patient=True)
    assert read_step(tmp_path) == 5


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As of a command that a shell runs in the background."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(tmp_path, Once("on_train_batch_start", 4, signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("when", [1, 2], ids=["measuring the untrained model", "measuring the trained model"])
def test_outside_of_the_training_a_signal_stops_at_once(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_lazy.training import run as module

    measure, calls = module.measure_model, []

    def interrupted(*args: Any, **options: Any) -> object:
        calls.append(None)
        if len(calls) == when:
            send(signal.SIGTERM)
        return measure(*args, **options)

    monkeypatch.setattr(module, "measure_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert len(calls) == when


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("hook", "step", "kept"),
    [("on_train_batch_start", 4, 6), pytest.param("on_validation_start", 14, 14, marks=pytest.mark.long)],
)
@pytest.mark.long
def test_two_processes_agree_on_the_step(hook: str, step: int, kept: int, tmp_path: Path) -> None:
    two = Execution(devices=2)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", Once(hook, step, signal.SIGTERM), execution=two)
    assert read_step(tmp_path / "stopped") == kept
    train(tmp_path / "stopped", execution=two)
    train(tmp_path / "undisturbed", execution=two)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
