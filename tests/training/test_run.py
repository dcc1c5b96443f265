"""`run` is bit-identical when repeated or killed and resumed; all variants see the same batches."""

import logging
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from filelock import FileLock
from lightning.pytorch.callbacks import Callback

from flash_lazy.cpu.library import find_obstacle
from lit_lazy.attention import Attention, AttentionSpec, Elastic, GatedDeltaNet, LearnedBias, Mamba2, RetNet, Softmax
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.optim import WSD, Muon
from lit_lazy.support.error_messages import BusyError
from lit_lazy.training import execution_settings, head_monitor
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.execution_settings import Execution, describe_backend
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.run import run, train_logged
from lit_lazy.training.run_folder import DIAGNOSTICS, FINAL_CHECKPOINT, RESULT, RunResult

LAZY = AttentionSpec(Elastic(), LearnedBias())
KERNEL = "chunked" if find_obstacle() else "cpu"
RAMP = Elastic(tau_init=0.0, tau_ramp=0.75, tau_final=1.5)
THEN_LEARNED = replace(RAMP, tau_ramp=0.5, learn_after_ramp=True)


def config(attention=LAZY, seed=0, **train):
    """20 steps of 8 sequences out of 48: a new epoch starts at steps 6, 12 and 18."""
    defaults = {"steps": 20, "batch_size": 8, "warmup_steps": 2, "val_every": 7, "checkpoint_every": 8, "log_every": 5}
    return RunConfig(
        data=Backcopy(vocab_size=16, context_length=16, train_sequences=48, validation_sequences=16),
        model=ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, attention=attention),
        train=TrainConfig(**{**defaults, **train}),
        seed=seed,
    )


def weights(folder):
    return torch.load(folder / FINAL_CHECKPOINT, weights_only=True)["state_dict"]


def logged(folder):
    """All points of all curves."""
    return {(name, line.step): value for line in read_lines(folder / METRICS) for name, value in line.metrics.items()}


def untimed(result):
    return replace(result, timings={})


def assert_same_run(a, b, **others):
    """Results are equal but for timings and others; weights and diagnostics (tau's history too) bit-identical."""
    first, second = RunResult.read(a), RunResult.read(b)
    assert first is not None
    assert second is not None
    assert replace(untimed(first), **others) == replace(untimed(second), **others)
    assert weights(a).keys() == weights(b).keys()
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name
    kept, other = (Diagnostics.load(folder / DIAGNOSTICS).arrays for folder in (a, b))
    assert kept.keys() == other.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


class At(Callback):
    """Calls a function at the first call of one of Lightning's hooks at a step."""

    def __init__(self, step, action, hook="on_train_batch_start"):
        self.step, self.action, self.done = step, action, False
        setattr(self, hook, self.act)

    def act(self, trainer, *_, **__):
        if trainer.global_step == self.step and not self.done:
            self.done = True
            self.action()


def run_until_killed(cfg, folder, step, *callbacks):
    kill = At(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(cfg, folder), kwargs={"callbacks": [*callbacks, kill]}
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (folder / RESULT).exists()


EVERYTHING = {
    "train.optimiser": Muon(),
    "train.schedule": WSD(0.5),
    "train.ema_decay": 0.8,
    "train.z_loss": 1e-2,
    "model.residual_dropout": 0.1,
    "model.attention.qk_norm": True,
}
"""Options beyond the default recipe."""
MIXERS = (Mamba2(), RetNet(), GatedDeltaNet())


def with_mixer(mixer):
    return replace_at(config(AttentionSpec()), {"model.mixer": mixer})


def assert_resumes(cfg, folder, *steps):
    """Killed at these steps, a run ends in the bits of an undisturbed one."""
    run(cfg, folder / "whole", keep_checkpoint=True)
    for step in steps:
        run_until_killed(cfg, folder / "killed", step)
    run(cfg, folder / "killed", keep_checkpoint=True)
    assert not list((folder / "killed").glob("*.damaged")), "it began again"
    assert_same_run(folder / "whole", folder / "killed")


@pytest.mark.parametrize(
    ("cfg", "steps"),
    [
        (config(AttentionSpec(THEN_LEARNED)), (9, 18)),
        (replace_at(config(), EVERYTHING), (11,)),
        (with_mixer(MIXERS[0]), (5, 11)),
        *(pytest.param(with_mixer(mixer), (11,), marks=pytest.mark.long) for mixer in MIXERS[1:]),
    ],
    ids=lambda given: given.model.rule if isinstance(given, RunConfig) else str(given),
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, cfg, steps):
    """Kills in the middle of an epoch, away from the checkpoints (steps 8 and 16), once before the first."""
    assert_resumes(cfg, tmp_path, *steps)
    if cfg.model.mixer.attends:
        return
    result = RunResult.read(tmp_path / "whole")
    assert result is not None
    assert result.labels == {"backend": "fla, plain torch"}
    kinds = {name.removeprefix("init/").partition("/")[0] for name in result.metrics}
    assert kinds == {"loss", "accuracy", "model", "collapse", "steps"}


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes(tmp_path):
    """Up to each checkpoint, from which the next process resumes; the rate is that of the last."""
    run_until_killed(config(), tmp_path, 11, At(3, lambda: time.sleep(1.0)))
    timings = run(config(), tmp_path).timings
    assert 1.0 < timings["train_seconds"] < 30.0
    steps = config().train.steps - 8
    assert timings["tokens_per_second"] > steps * config().train.batch_size * 16 / (timings["train_seconds"] - 1.0)


def test_a_run_that_resumes_on_another_backend_says_so(finished, tmp_path, caplog, monkeypatch):
    """Not on the same one."""
    cfg = config()
    (label,) = RunResult.read(finished).labels.values()
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "backend_name", lambda *_: "cpu")
        patch.setattr(execution_settings, "get_instruction_set", lambda: "rvv")
        run_until_killed(cfg, tmp_path / "same", step=11)
        shutil.copytree(tmp_path / "same", tmp_path / "other")
        run(cfg, tmp_path / "same")
    assert list_said(caplog, "lit_lazy.training.callbacks_and_loggers") == []
    run(cfg, tmp_path / "other")
    (said,) = list_said(caplog, "lit_lazy.training.callbacks_and_loggers")
    here = describe_backend(label)
    assert said.startswith(f"the attention ran on cpu (rvv) until the checkpoint and runs on {here} now: the result is")


@pytest.mark.parametrize(
    ("threads", "percent", "said"), [(1, 100.0, None), (2, 10.0, None), (2, 60.0, "keeps 1.2 of 2")]
)
def test_busy_cores_are_told(threads, percent, said, monkeypatch):
    monkeypatch.setattr(execution_settings, "count_cores", lambda: 2)
    monkeypatch.setattr("psutil.cpu_percent", lambda _: percent)
    torch.set_num_threads(threads)
    found = execution_settings.find_busy_cores()
    assert found == (said and f"other work {said} cores busy; a small model is faster beside it with --threads 1")


def list_said(caplog, logger, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.name == logger and record.levelno >= level]


@pytest.mark.parametrize(
    ("asked", "obstacle", "missing"),
    [("auto", "none; get it", "; none; get it"), ("auto", None, ""), ("chunked", "no", "")],
)
def test_a_run_says_which_backend_it_uses_and_what_a_faster_one_lacks(
    asked, obstacle, missing, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(execution_settings, "find_obstacle", lambda: obstacle)
    monkeypatch.setattr(Attention, "backend_name", lambda *_: "chunked")
    with caplog.at_level(logging.INFO, "lit_lazy.training.run"):
        run(replace_at(config(steps=4), {"model.backend": asked}), tmp_path)
    said = list_said(caplog, "lit_lazy.training.run", logging.INFO)
    assert said == [f"attention: {config().model.rule}, runs on chunked{missing}"]


@dataclass(frozen=True)
class Repeated(Backcopy):
    """A user's data with the same sequences for training and validation."""

    def load(self):
        source = super().load()
        return replace(source, validation=source.train)


@pytest.mark.parametrize(
    ("cfg", "warning"),
    [
        (config(steps=3), None),
        (config(AttentionSpec(Elastic(tau_init=1e30)), steps=3), "the attention passes nothing and gets no gradient"),
        (replace(config(steps=3), data=Repeated(**asdict(config().data))), "data=Repeated: validation begins with the"),
    ],
    ids=["lazy", "dead", "repeated"],
)
def test_a_run_that_can_learn_or_show_nothing_says_so(cfg, warning, tmp_path, caplog):
    run(cfg, tmp_path)
    said = list_said(caplog, "lit_lazy.training.run")
    assert bool(said) == (warning is not None)
    assert all(warning in line for line in said)


def test_losses_on_the_way_are_those_of_the_validations_also_after_kills(tmp_path, monkeypatch):
    """So is the step of learning, here after half of the steps.

    Kills after a step's checkpoint but before its validation, and between validations.
    """
    cfg = replace_at(config(AttentionSpec()), {"train.val_every": 5, "train.checkpoint_every": 5})
    whole = run(cfg, tmp_path / "whole", keep_checkpoint=True)
    assert {"loss/at_25", "loss/at_50", "loss/at_75"} <= whole.metrics.keys()
    assert whole.metrics["loss/at_25"] != whole.metrics["loss/at_50"]
    assert whole.metrics["steps/to_learn"] == 20
    between = (whole.metrics["loss/at_25"] + whole.metrics["loss/at_50"]) / 2
    monkeypatch.setattr(head_monitor, "compute_learned_nats", lambda _: between)
    for step in (5, 12):
        run_until_killed(cfg, tmp_path / "killed", step)
    learned = {"steps/to_learn": 10.0}
    assert run(cfg, tmp_path / "killed", keep_checkpoint=True).metrics == whole.metrics | learned
    assert not any(name.startswith("loss/at_") for name in run(config(AttentionSpec()), tmp_path / "seven").metrics)


def test_a_ramped_tau_is_a_function_of_the_finished_steps(tmp_path):
    """Not of batches, of which a step has two. It rises over 15 of 20 steps in logs, metrics and weights."""
    halves = Execution(micro_batch=4)
    result = run(config(AttentionSpec(RAMP)), tmp_path, keep_checkpoint=True, execution=halves)
    kept = Diagnostics.load(tmp_path / DIAGNOSTICS).arrays
    assert kept["watch/step"].tolist() == [0, 1, 2, 4, 7, 8, 14, 16]
    for step, tau in zip(kept["watch/step"], kept["watch/tau"], strict=True):
        assert tau.flatten().tolist() == [pytest.approx(1.5 * min(1, step / 15))] * 4
    assert (result.metrics["init/tau/mean"], result.metrics["tau/min"], result.metrics["tau/max"]) == (0, 1.5, 1.5)
    taus = [value for name, value in weights(tmp_path).items() if name.endswith("tau")]
    assert [tau.tolist() for tau in taus] == [[1.5, 1.5]] * 2


def test_a_ramped_tau_is_learned_after_its_ramp(tmp_path):
    """The ramp is bit-equal to one that stays, up to step 10; from there on every head's tau moves away from 1.5."""
    for name, normaliser in (("stays", replace(RAMP, tau_ramp=0.5)), ("learned", THEN_LEARNED)):
        run(config(AttentionSpec(normaliser), clip_norm=1e9, val_every=5), tmp_path / name)
    stays, learned = (Diagnostics.load(tmp_path / name / DIAGNOSTICS).arrays for name in ("stays", "learned"))
    steps = learned["watch/step"].tolist()
    assert steps == stays["watch/step"].tolist() == [0, 1, 2, 4, 5, 8, 10, 15, 16, 20]
    until = steps.index(10) + 1
    np.testing.assert_array_equal(learned["watch/tau"][:until], stays["watch/tau"][:until])
    assert (learned["watch/tau"][until - 1] == 1.5).all()
    assert (learned["watch/tau"][until:] != 1.5).all()


def test_batches_are_those_of_the_seed(tmp_path):
    """Also in the second epoch, whatever the variant."""

    class Batches(Callback):
        def __init__(self):
            self.tokens: list[torch.Tensor] = []

        def on_train_batch_start(self, _trainer, _module, batch, _batch_index):
            self.tokens.append(batch["tokens"].clone())

    seen = []
    for i, cfg in enumerate((config(steps=8), config(AttentionSpec(), steps=8), config(seed=1, steps=8))):
        seen.append(Batches())
        run(cfg, tmp_path / str(i), callbacks=[seen[-1]])
    assert len(seen[0].tokens) == 8
    assert all(map(torch.equal, seen[0].tokens, seen[1].tokens))
    assert not any(map(torch.equal, seen[0].tokens, seen[2].tokens))


def test_a_finished_run_is_returned_and_not_trained_again(finished, tmp_path):
    """What a kill left beside its result is removed; another config's is refused, as is a folder in use."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    (folder / "checkpoints").mkdir()
    for name in ("last.ckpt", "last.ckpt.damaged"):
        (folder / "checkpoints" / name).touch()
    assert run(config(), folder, callbacks=[At(0, lambda: pytest.fail("trained again"))]) == RunResult.read(finished)
    assert not (folder / "checkpoints").exists()
    assert (folder / "last.ckpt.damaged").exists()
    with pytest.raises(ValueError, match="holds the result of another config"):
        run(config(seed=1), folder)
    known = RunResult.read(folder)
    replace(known, config=known.config | {"model": known.config["model"] | {"norm_eps": 0.5}}).write(folder)
    said = (
        r"^model\.norm_eps=1e-06: is a default that was 0\.5 when cell \w+ was trained; write the default as a constant"
    )
    with pytest.raises(ValueError, match=said):
        run(config(), folder)
    with pytest.raises(ValueError, match=said):
        train_logged(config(), folder, "p", "n", interrupts=Interrupts())
    with FileLock(tmp_path / "lock"), pytest.raises(BusyError, match="another process works in"):
        run(config(), tmp_path)


def test_bf16_is_mixed_and_keeps_tau_and_bias_in_fp32(tmp_path):
    result = run(config(precision="bf16"), tmp_path, keep_checkpoint=True)
    kept = [value for name, value in weights(tmp_path).items() if "normaliser" in name or ".bias" in name]
    assert {value.dtype for value in kept} == {torch.float32}
    assert result.metrics["tau/mean"] != 1.0


def test_a_damaged_result_is_quarantined_and_the_run_begins_again(finished, tmp_path):
    for content in ('{"key": ', "{}"):
        (tmp_path / RESULT).write_text(content)
        assert untimed(run(config(), tmp_path)) == untimed(RunResult.read(finished))
        assert (tmp_path / f"{RESULT}.damaged").read_text() == content


def test_a_validation_that_a_kill_cut_off_is_made_up_for(tmp_path):
    """Its step is in the checkpoint already: Lightning would leave a gap in the curves, or never start training."""
    cfg = config(steps=30, val_every=10, checkpoint_every=10)
    run(cfg, tmp_path / "whole", logger=MetricFile(tmp_path / "whole"))
    for step in (20, 30):
        folder = tmp_path / str(step)
        kill = At(step, Mock(side_effect=RuntimeError("killed")), "on_validation_start")
        with pytest.raises(RuntimeError, match="killed"):
            run(cfg, folder, logger=MetricFile(folder), callbacks=[kill])
        run(cfg, folder, logger=MetricFile(folder))
        curves = logged(folder)
        assert [step for metric, step in curves if metric == "val/loss"] == [9, 19, 29]
        assert curves == logged(tmp_path / "whole")


def test_what_a_result_holds(finished, tmp_path):
    result = RunResult.read(finished)
    metrics, info = result.metrics, config().data.load().info
    assert metrics["loss/val"] - metrics["loss/excess"] == pytest.approx(info["optimum_nats"], abs=1e-6)
    assert {"accuracy/trigger", "mass/trigger", "mass/non_trigger", "init/sparsity/zero"} <= metrics.keys()
    assert result.labels == {"backend": KERNEL}
    kept = Diagnostics.load(finished / DIAGNOSTICS)
    scalars = kept.scalars()
    assert scalars.items() <= metrics.items()
    assert {"sink/rate", "collapse/effective_rank", "init/sink/rate", "init/scores/spread"} <= scalars.keys()
    # The sample is the full validation set here.
    for array, metric in (("sparsity/zero", "sparsity/zero"), ("loss/by_position", "loss/val"), ("tau", "tau/mean")):
        assert kept.arrays[array].mean(dtype="float64") == pytest.approx(metrics[metric], rel=1e-6, abs=1e-6)
    softmax = run(config(AttentionSpec(Softmax()), steps=3), tmp_path / "softmax")
    assert "sparsity/zero" not in softmax.metrics
    assert softmax.metrics["mass/trigger"] == pytest.approx(1.0, abs=1e-6)
    assert softmax.labels == {"backend": "sdpa" if find_obstacle() else "cpu"}
