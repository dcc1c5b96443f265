"""The execution of a run (processes, micro-batches, checkpointing, compiling) changes results only by rounding."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from test_run import EVERYTHING, RAMP, At, assert_same_run, config, logged, weights

from lit_lazy.attention import AttentionSpec
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_classes import list_user_files
from lit_lazy.training import ranks
from lit_lazy.training.callbacks_and_loggers import MetricFile
from lit_lazy.training.execution_settings import Execution
from lit_lazy.training.module import DivergedError, LitLM
from lit_lazy.training.ranks import RankFailedError, RankLostError
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import RESULT, RunResult

TWO, HALVES = Execution(devices=2), Execution(micro_batch=4)
SPREAD = Execution(devices=2, strategy="fsdp")


pytestmark = pytest.mark.usefixtures("forked_ranks")


def train(folder, execution, *callbacks, cfg=None):
    options = {"keep_checkpoint": True, "execution": execution, "callbacks": callbacks}
    return run(cfg or config(), folder, logger=MetricFile(folder), **options)


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The folder of an undisturbed run of `config()` in halves of a batch; not to be changed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("halves")
    train(folder, HALVES)
    return folder


@pytest.mark.parametrize(
    "cfg",
    [
        None,
        pytest.param(replace_at(config(), EVERYTHING), marks=pytest.mark.long),
        pytest.param(config(AttentionSpec(RAMP), steps=6), marks=pytest.mark.long),
    ],
    ids=["default", "other recipe", "ramped"],
)
def test_two_processes_are_one_that_accumulates_bit_for_bit(halves, tmp_path, cfg):
    """In weights, logged values and final metrics; both divide a step's batch into the same two parts."""
    folder = tmp_path / "one" if cfg else halves
    if cfg:
        train(folder, HALVES, cfg=cfg)
    one, two = RunResult.read(folder), train(tmp_path / "two", TWO, cfg=cfg)
    assert_same_run(folder, tmp_path / "two", execution={})
    assert logged(folder) == logged(tmp_path / "two")
    assert (one.execution["micro_batch"], two.execution["devices"]) == (4, 2)
    names = [sorted(path.name for path in of.iterdir()) for of in (folder, tmp_path / "two")]
    assert names[0] == names[1]


def test_two_processes_that_were_stopped_or_lost_a_rank_resume_to_the_same_bits(halves, tmp_path):
    """As those of one process that accumulates."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "ended", TWO, At(11, interrupt))
    known = others_of(os.getpid())

    def kill():
        (other,) = others_of(os.getpid()) - known
        os.kill(other, signal.SIGKILL)

    with pytest.raises(RankLostError, match="rank 1 of 2 was ended by SIGKILL; the same command resumes"):
        train(tmp_path / "ended", TWO, At(17, kill))
    assert others_of(os.getpid()) <= known
    train(tmp_path / "ended", TWO)
    assert_same_run(halves, tmp_path / "ended", execution={})
    assert logged(halves) == logged(tmp_path / "ended")


def assert_close(plain, other):
    assert plain.key == other.key
    for name, value in plain.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


def test_no_more_than_rounding_changes(finished, halves, tmp_path):
    train(tmp_path, Execution(checkpoint_activations=True))
    for folder in (halves, tmp_path):
        assert_close(RunResult.read(finished), RunResult.read(folder))
        curve = {step: value for (name, step), value in logged(folder).items() if name == "train/grad_norm"}
        assert sorted(curve) == [4, 9, 14, 19]
        assert all(value > 0 for value in curve.values())


@pytest.fixture
def _real(monkeypatch, forked_ranks):  # noqa: ARG001 (overrides it)
    """Start the other ranks as new processes: a fork would inherit torch's state of rank 0's shards."""
    monkeypatch.setattr(ranks, "subprocess", subprocess)
    monkeypatch.setattr("lit_lazy.training.run.list_user_files", list_user_files)


@pytest.mark.long
@pytest.mark.usefixtures("_real")
def test_a_model_that_is_spread_stops_and_resumes_as_it_is_or_taken_over(finished, tmp_path):
    """With 17 tokens and 2 heads, rows do not divide evenly over two processes. The result is an ordinary model."""
    assert_close(RunResult.read(finished), train(tmp_path / "undisturbed", SPREAD))
    for name, then in (("stopped", SPREAD), ("taken over", TWO), ("taken over by one", Execution())):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / name, SPREAD, At(11, interrupt))
        train(tmp_path / name, then)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
    for folder in (finished, tmp_path / "taken over", tmp_path / "taken over by one"):
        for key, value in weights(tmp_path / "undisturbed").items():
            torch.testing.assert_close(weights(folder)[key], value, rtol=1e-3, atol=1e-5)


def others_of(pid):
    """Child processes of a process."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.fixture
def none_left():
    before = others_of(os.getpid())
    yield
    assert others_of(os.getpid()) <= before


@pytest.mark.usefixtures("none_left")
def test_what_the_other_ranks_say_of_one_that_died_is_no_error_of_the_run(tmp_path):
    """The other ranks raise in the same collective as rank 0."""
    known = others_of(os.getpid())
    kill = At(5, lambda: os.kill(min(others_of(os.getpid()) - known), signal.SIGKILL))
    with pytest.raises(RankLostError, match=r"rank \d of 4 was ended by SIGKILL"):
        train(tmp_path, Execution(devices=4), kill)


@pytest.mark.usefixtures("none_left")
@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (1, RankFailedError, "rank 1: MemoryError: no room"),
        (0, DivergedError, "training loss is nan at step 4"),
        (1, DivergedError, "training loss is nan at step 4"),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all(rank, error, message, tmp_path, monkeypatch):
    own, step = os.getpid(), LitLM.training_step

    def go_wrong(self, batch, index):
        loss = step(self, batch, index)
        if (os.getpid() != own) == bool(rank) and self.global_step == 4:
            if error is RankFailedError:
                raise MemoryError("no room")
            self._means["loss"] = self._means["loss"] * torch.nan
        return loss

    monkeypatch.setattr(LitLM, "training_step", go_wrong)
    with pytest.raises(error, match=message):
        train(tmp_path, TWO)
    assert not (tmp_path / RESULT).exists()


@pytest.mark.usefixtures("none_left")
def test_a_rank_that_cannot_begin_is_reported(tmp_path, monkeypatch):
    from lit_lazy.training import trainer

    def unreadable(_config):
        raise ValueError("data.path='gone': cannot be read")

    monkeypatch.setattr(trainer, "load_data", unreadable)
    monkeypatch.setattr(runpy, "run_module", lambda *_args, **_kwargs: sys.exit(trainer.main()))
    with pytest.raises(RankFailedError, match=r"rank 1: ValueError: data\.path='gone': cannot be read"):
        train(tmp_path, TWO)


def test_the_untrained_model_is_evaluated_once(finished, tmp_path, monkeypatch):
    from lit_lazy.training import run as module

    evaluations = []
    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *args, **kwargs: evaluations.append(1) or evaluate(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", Execution(), At(11, interrupt))
    train(tmp_path / "stopped", Execution())
    assert len(evaluations) == 2
    assert_same_run(finished, tmp_path / "stopped")
    untrained = tmp_path / "again" / "checkpoints" / f"untrained-{RunResult.read(finished).key}.npz"
    untrained.parent.mkdir(parents=True)
    untrained.write_bytes(b"PK damaged")
    train(tmp_path / "again", Execution())
    assert_same_run(finished, tmp_path / "again")


def test_an_end_in_the_evaluation_repeats_no_step(finished, tmp_path, monkeypatch):
    """Although no checkpoint was due at the last step."""
    from lit_lazy.training import run as module

    with monkeypatch.context() as patch:
        evaluations = iter((module.evaluate, Mock(side_effect=RuntimeError("killed"))))
        patch.setattr(module, "evaluate", lambda *args, **kwargs: next(evaluations)(*args, **kwargs))
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, Execution())
    train(tmp_path, Execution(), At(16, lambda: pytest.fail("repeated")))
    assert_same_run(finished, tmp_path)


@pytest.mark.long
def test_a_compiled_run_ends_where_the_plain_one_does(finished, tmp_path):
    compiled = train(tmp_path, Execution(compile=True))
    for name, value in RunResult.read(finished).metrics.items():
        assert compiled.metrics[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_a_run_may_resume_in_other_parts_after_every_step(tmp_path):
    """Each of four executions follows each other one. Of a step's 8 sequences, a device's parts have 8, 4, 2 and 2."""
    executions = Execution(), HALVES, Execution(micro_batch=2), Execution(devices=2, micro_batch=2)
    cfg = config(checkpoint_every=1, log_every=1)
    whole = train(tmp_path / "whole", Execution(), cfg=cfg)
    for step, number in enumerate((0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3), start=1):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "parts", executions[number], At(step, interrupt), cfg=cfg)
    assert_close(whole, train(tmp_path / "parts", Execution(), cfg=cfg))
    curves = logged(tmp_path / "whole")
    assert logged(tmp_path / "parts") == {point: pytest.approx(curves[point], rel=2e-4, abs=2e-5) for point in curves}


def test_a_step_that_a_kill_cuts_off_is_repeated(halves, tmp_path):
    """In the step after it resumes, Lightning writes a checkpoint before the last part."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", HALVES, At(11, interrupt))
    left = [None]

    def end_at_the_second_part():
        left.pop()
        at.done = False

    at = At(8, end_at_the_second_part)
    with pytest.raises(IndexError):
        train(tmp_path / "cut", HALVES, at)
    train(tmp_path / "cut", HALVES)
    assert_same_run(halves, tmp_path / "cut")
    assert logged(halves) == logged(tmp_path / "cut")
