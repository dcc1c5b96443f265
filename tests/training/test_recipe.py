"""Options beyond the default recipe: each takes effect, also in resumed and distributed runs."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_run import EVERYTHING, LAZY, config, weights

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.data import IGNORED
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.model import loss
from lit_lazy.model.loss import head_nll, head_nll_and_log_z
from lit_lazy.optim import SGD, Constant
from lit_lazy.training import checkpoints
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT
from lit_lazy.training.trainer import build_module, fit


def trained(
    cfg: RunConfig, folder: Path, execution: Execution = ONE_DEVICE, callbacks: Sequence[Callback] = ()
) -> dict[str, torch.Tensor]:
    """Final weights of a training without evaluation. Its curves are in the folder."""
    source = cfg.data.load()
    return fit(build_module(cfg, source, execution), source, folder, MetricFile(folder), callbacks).state_dict()


def test_each_choice_changes_the_training(tmp_path: Path) -> None:
    choices = [("seed", 0), ("train.optimiser", SGD()), ("train.schedule", Constant()), *EVERYTHING.items()]
    ends = [
        trained(replace_at(config(steps=6), dict([choice])), tmp_path / str(i))["model.head.weight"]
        for i, choice in enumerate(choices)
    ]
    for i, one in enumerate(ends):
        assert all(not torch.equal(one, other) for other in ends[:i]), choices[i]


def test_the_average_of_the_weights_is_what_is_validated_kept_and_evaluated(finished: Path, tmp_path: Path) -> None:
    """The trained weights equal those of a run without average; their average, recomputed here, is the result."""
    cfg = replace_at(config(LAZY), {"train.ema_decay": 0.9})
    steps = Weights()
    trained(config(LAZY), tmp_path / "plain", callbacks=[steps])
    assert all(torch.equal(value, steps.seen[-1][name]) for name, value in weights(finished).items())
    result = run(cfg, tmp_path / "ema", logger=MetricFile(tmp_path / "ema"), keep_checkpoint=True)
    averages = [steps.seen[0]]
    for seen in steps.seen[1:]:
        averages.append({name: 0.9 * averages[-1][name] + 0.1 * value for name, value in seen.items()})
    for name, value in weights(tmp_path / "ema").items():
        torch.testing.assert_close(value, averages[-1][name], rtol=1e-5, atol=1e-6)
    module = checkpoints.load(tmp_path / "ema" / FINAL_CHECKPOINT)
    source = cfg.data.load()
    assert evaluate(module.model, source, "fp32", 8)["loss/val"] == result.metrics["loss/val"]
    curve = {line.step: line.metrics["val/loss"] for line in lines(tmp_path / "ema") if "val/loss" in line.metrics}
    assert sorted(curve) == [6, 13]
    for step, logged in curve.items():
        module.load_state_dict(averages[step])
        assert evaluate(module.model, source, "fp32", 8)["loss/val"] == pytest.approx(logged, rel=1e-5)


def lines(folder: Path) -> list:
    return read_lines(folder / METRICS)


class Weights(Callback):
    """Records a module's state after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, _trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        self.seen.append({name: value.detach().clone() for name, value in module.state_dict().items()})


class TestZLoss:
    @pytest.mark.parametrize("at_once", [2**26, 30 * 7])
    def test_log_z_is_the_log_of_the_sum_of_exponentials(self, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Values and gradients against the plain formula, with and without blocks; ignored targets do not count."""
        monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
        generator = torch.Generator().manual_seed(0)
        hidden = (3 * torch.randn(2, 12, 8, generator=generator)).requires_grad_()
        head = torch.randn(30, 8, generator=generator, requires_grad=True)
        targets = torch.randint(30, (2, 12), generator=generator)
        targets[:, ::5] = IGNORED
        nll, log_z = head_nll_and_log_z(hidden, head, targets)
        assert torch.equal(nll, head_nll(hidden, head, targets))
        expected = (hidden.double() @ head.double().T).logsumexp(-1).masked_fill(targets == IGNORED, 0)
        torch.testing.assert_close(log_z.double(), expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(log_z.square().sum(), (hidden, head))
        for mine, plain in zip(ours, torch.autograd.grad(expected.square().sum(), (hidden, head)), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-3)

    def test_pulls_the_normaliser_to_one_and_leaves_the_logged_loss_a_cross_entropy(self, tmp_path: Path) -> None:
        losses, log_zs = [], []
        for factor in (0.0, 1.0):
            cfg = config(z_loss=factor, log_every=1, steps=12, lr=1e-2)
            module, source = build_module(cfg, cfg.data.load(), ONE_DEVICE), cfg.data.load()
            folder = tmp_path / str(factor)
            fit(module, source, folder, MetricFile(folder))
            losses.append([line.metrics["train/loss"] for line in lines(folder) if "train/loss" in line.metrics])
            with torch.no_grad():
                log_zs.append(module.model(source.validation.sequences[:8, :-1].long()).logsumexp(-1).abs().mean())
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)  # a penalty is computed by another path
        assert losses[0][1] != losses[1][1]
        assert log_zs[1] < 0.9 * log_zs[0]


def test_micro_batches_drop_what_the_whole_batch_does(tmp_path: Path) -> None:
    cfg = replace_at(config(LAZY, steps=6), {"model.residual_dropout": 0.3})
    whole, parts = (trained(cfg, tmp_path / str(e.micro_batch), e) for e in (ONE_DEVICE, Execution(micro_batch=2)))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5)
