"""The execution of a run (processes, micro-batches, checkpointing, compiling) changes results only by rounding."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_run import EVERYTHING, RAMP, assert_same_run, config, weights

from lit_lazy.attention import AttentionSpec, Elastic, Entmax15, Normaliser, Softmax
from lit_lazy.config.key import list_user_files
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.model import loss
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import head_nll, token_nll
from lit_lazy.optim import Muon
from lit_lazy.tracking.spool import METRICS, MetricFile, read_lines
from lit_lazy.training.distributed import process_group
from lit_lazy.training.distributed.process_group import RankFailedError, RankLostError
from lit_lazy.training.execution import Execution
from lit_lazy.training.module import DivergedError
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import run

TWO, HALVES = Execution(devices=2), Execution(micro_batch=4)
SPREAD = Execution(devices=2, strategy="fsdp")


pytestmark = pytest.mark.usefixtures("forked_ranks")


def train(folder: Path, execution: Execution, *callbacks: Callback, cfg: RunConfig | None = None) -> RunResult:
    return run(
        cfg or config(),
        folder,
        logger=MetricFile(folder),
        callbacks=callbacks,
        keep_checkpoint=True,
        execution=execution,
    )


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """All points of all curves."""
    return {(name, line.step): value for line in read_lines(folder / METRICS) for name, value in line.metrics.items()}


class At(Callback):
    """Calls a function at the start of a step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "cfg",
    [
        config(),
        pytest.param(replace_at(config(), EVERYTHING), marks=pytest.mark.long),
        pytest.param(config(AttentionSpec(RAMP), steps=6), marks=pytest.mark.long),
    ],
    ids=["default", "other recipe", "ramped"],
)
def test_two_processes_are_one_that_accumulates_bit_for_bit(tmp_path: Path, cfg: RunConfig) -> None:
    """In weights, logged values and final metrics; both divide a step's batch into the same two parts."""
    one, two = train(tmp_path / "one", HALVES, cfg=cfg), train(tmp_path / "two", TWO, cfg=cfg)
    assert replace(one, timings={}, execution={}) == replace(two, timings={}, execution={})
    for name, value in weights(tmp_path / "one").items():
        assert torch.equal(value, weights(tmp_path / "two")[name]), name
    assert logged(tmp_path / "one") == logged(tmp_path / "two")
    assert (one.execution["micro_batch"], two.execution["devices"]) == (4, 2)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        path.name for path in (tmp_path / "two").iterdir()
    )


def test_two_processes_that_were_stopped_resume_to_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "undisturbed", TWO)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", TWO, At(11, interrupt))
    train(tmp_path / "stopped", TWO)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
    assert logged(tmp_path / "undisturbed") == logged(tmp_path / "stopped")


def assert_close(plain: RunResult, other: RunResult) -> None:
    assert plain.key == other.key
    for name, value in plain.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("execution", [HALVES, Execution(checkpoint_activations=True)], ids=["micro", "checkpointed"])
def test_no_more_than_rounding_changes(tmp_path: Path, execution: Execution) -> None:
    assert_close(train(tmp_path / "plain", Execution()), train(tmp_path / "other", execution))


@pytest.fixture
def _real(monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> None:  # noqa: ARG001 (overrides it)
    """Start the other ranks as new processes: a fork would inherit torch's state of rank 0's shards."""
    monkeypatch.setattr(process_group, "subprocess", subprocess)
    monkeypatch.setattr("lit_lazy.training.run.list_user_files", list_user_files)


@pytest.mark.long
@pytest.mark.usefixtures("_real")
def test_a_model_that_is_spread_over_processes_stops_and_resumes(tmp_path: Path) -> None:
    """With 17 tokens and 2 heads, rows do not divide evenly over two processes. The result is an ordinary model."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "spread", SPREAD, At(11, interrupt))
    assert_close(train(tmp_path / "plain", Execution()), train(tmp_path / "spread", SPREAD))
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "spread")[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("_real")
def test_a_model_that_is_spread_resumes_to_the_same_bits_and_may_be_taken_over(tmp_path: Path) -> None:
    train(tmp_path / "undisturbed", SPREAD)
    for name, then in (("stopped", SPREAD), ("taken over", TWO), ("taken over by one", Execution())):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / name, SPREAD, At(11, interrupt))
        train(tmp_path / name, then)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
    for name in ("taken over", "taken over by one"):
        for key, value in weights(tmp_path / "undisturbed").items():
            torch.testing.assert_close(weights(tmp_path / name)[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_a_model_that_is_spread_needs_no_logger(tmp_path: Path) -> None:
    """In a process of its own, which can be ended: without a logger rank 0 once waited for ever."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_execution import *\n"
        "cfg = replace_at(config(), {'train.steps': 2, 'train.warmup_steps': 1})\n"
        "plain, spread = (run(cfg, Path(name), execution=x) for name, x in (('1', Execution()), ('2', SPREAD)))\n"
        "assert_close(plain, spread)"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)


def others_of(pid: int) -> list[int]:
    """Child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def none_left() -> Iterator[None]:
    before = set(others_of(os.getpid()))
    yield
    assert set(others_of(os.getpid())) <= before


@pytest.mark.usefixtures("none_left")
def test_a_rank_that_dies_ends_the_run_which_resumes(tmp_path: Path) -> None:
    known = set(others_of(os.getpid()))

    def kill() -> None:
        (other,) = set(others_of(os.getpid())) - known
        os.kill(other, signal.SIGKILL)

    train(tmp_path / "undisturbed", TWO)
    with pytest.raises(RankLostError, match="rank 1 of 2 was ended by SIGKILL; the same command resumes"):
        train(tmp_path / "killed", TWO, At(11, kill))
    train(tmp_path / "killed", TWO)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "killed")


@pytest.mark.usefixtures("none_left")
def test_what_the_other_ranks_say_of_one_that_died_is_no_error_of_the_run(tmp_path: Path) -> None:
    """The other ranks raise in the same collective as rank 0."""
    known = set(others_of(os.getpid()))
    with pytest.raises(RankLostError, match=r"rank \d of 4 was ended by SIGKILL"):
        train(
            tmp_path,
            Execution(devices=4),
            At(5, lambda: os.kill(min(set(others_of(os.getpid())) - known), signal.SIGKILL)),
        )


@pytest.mark.usefixtures("none_left")
def test_what_another_rank_raises_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_lazy.training import module

    own, step = os.getpid(), module.LitLM.training_step

    def raises(self: L.LightningModule, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if os.getpid() != own and self.global_step == 3:
            raise MemoryError("no room")
        return step(self, batch, index)

    monkeypatch.setattr(module.LitLM, "training_step", raises)
    with pytest.raises(RankFailedError, match="rank 1: MemoryError: no room"):
        train(tmp_path, TWO)


@pytest.mark.usefixtures("none_left")
def test_a_rank_that_cannot_begin_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_lazy.training.distributed import rank_process

    def unreadable(_config: object) -> None:
        raise ValueError("data.path='gone': cannot be read")

    monkeypatch.setattr(rank_process, "load_data", unreadable)
    monkeypatch.setattr(runpy, "run_module", lambda *_args, **_kwargs: sys.exit(rank_process.main()))
    with pytest.raises(RankFailedError, match=r"rank 1: ValueError: data\.path='gone': cannot be read"):
        train(tmp_path, TWO)


@pytest.mark.usefixtures("none_left")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_is_seen_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    from lit_lazy.training import module

    own, step = os.getpid(), module.LitLM.training_step

    def diverges(self: L.LightningModule, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = step(self, batch, index)
        if (os.getpid() != own) == bool(rank) and self.global_step == 4:
            self._means["loss"] = self._means["loss"] * torch.nan
        return loss

    monkeypatch.setattr(module.LitLM, "training_step", diverges)
    with pytest.raises(DivergedError, match="training loss is nan at step 4"):
        train(tmp_path, TWO)


def test_the_untrained_model_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_lazy.training import run as module

    key = train(tmp_path / "undisturbed", Execution()).key
    evaluations = []
    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *args, **kwargs: evaluations.append(1) or evaluate(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", Execution(), At(11, interrupt))
    train(tmp_path / "stopped", Execution())
    assert len(evaluations) == 2
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
    untrained = tmp_path / "again" / "checkpoints" / f"untrained-{key}.npz"
    untrained.parent.mkdir(parents=True)
    untrained.write_bytes(b"PK damaged")
    train(tmp_path / "again", Execution())
    assert_same_run(tmp_path / "undisturbed", tmp_path / "again")


def test_the_gradient_norm_is_logged(tmp_path: Path) -> None:
    train(tmp_path, Execution())
    curve = {step: value for (name, step), value in logged(tmp_path).items() if name == "train/grad_norm"}
    assert sorted(curve) == [4, 9, 14, 19]
    assert all(value > 0 for value in curve.values())


@pytest.mark.parametrize(
    ("execution", "changes", "message"),
    [
        (Execution(devices=3), {}, "--devices=3: must divide train.batch_size=8"),
        (Execution(micro_batch=3), {}, "--micro-batch=3: must divide the 8 of 8 sequences"),
        (Execution(devices=2, micro_batch=8), {}, "--micro-batch=8: must divide the 4 of 8 sequences"),
        (SPREAD, {"train.optimiser": Muon()}, "train.optimiser='Muon': .* --strategy fsdp"),
        (SPREAD, {"train.ema_decay": 0.9}, "train.ema_decay=0.9: .* --strategy fsdp"),
    ],
)
def test_what_cannot_be_shared_out_is_named(execution: Execution, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(replace_at(config(), changes), execution)


class TestHeadNll:
    """Loss in blocks of tokens."""

    @pytest.fixture
    def drawn(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 50, 16, generator=generator, requires_grad=True)
        head = torch.randn(40, 16, generator=generator, requires_grad=True)
        return hidden, head, torch.randint(40, (3, 50), generator=generator)

    @pytest.mark.parametrize("at_once", [40, 40 * 7, 40 * 149])
    def test_equals_the_loss_of_all_logits(
        self, drawn: tuple[torch.Tensor, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hidden, head, targets = drawn
        whole = token_nll(hidden @ head.T, targets)
        expected = torch.autograd.grad(whole.mean(), (hidden, head))
        monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
        blocks = head_nll(hidden, head, targets)
        torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(torch.autograd.grad(blocks.mean(), (hidden, head)), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)

    def test_never_holds_all_logits(self, drawn: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        """In neither the forward nor the backward pass."""
        hidden, head, targets = drawn
        monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 40 * 10)
        seen: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                seen.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
                return out

        with Sizes():
            head_nll(hidden, head, targets).mean().backward()
        assert max(seen) <= max(40 * 10, hidden.numel(), head.numel())


@pytest.mark.parametrize("normaliser", [Softmax(), Elastic(), Entmax15()], ids=lambda one: type(one).__name__)
def test_checkpointed_blocks_have_the_same_gradients(normaliser: Normaliser) -> None:
    """Also in the first pass, which checks the normaliser."""
    cfg = ModelConfig(d_model=16, n_layers=3, n_heads=2, d_ff=32, attention=AttentionSpec(normaliser))
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients = []
    for kept in (False, True):
        model = DecoderLM(cfg, 20, 12, seed=0)
        model.checkpoint_activations = kept
        model.compute_hidden(tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.long
def test_a_compiled_run_ends_where_the_plain_one_does(tmp_path: Path) -> None:
    plain, compiled = train(tmp_path / "plain", Execution()), train(tmp_path / "compiled", Execution(compile=True))
    for name, value in plain.metrics.items():
        assert compiled.metrics[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
