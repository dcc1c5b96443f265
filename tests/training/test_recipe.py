"""Parameter groups, schedule, loss and what goes beyond the default recipe, also in resumed and distributed runs."""

import math

import lightning as L
import pytest
import torch
from layers import LargestTensor
from lightning.pytorch.callbacks import Callback
from test_run import EVERYTHING, LAZY, THEN_LEARNED, config, weights
from torch.utils.data import DataLoader

from lit_lazy.attention import AttentionSpec, Elastic, Fire, LearnedAbsolute
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_module
from lit_lazy.data import IGNORED
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.model import loss
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import head_nll, head_nll_and_log_z, token_nll
from lit_lazy.optim import SGD, Constant
from lit_lazy.support.machine import measure_saved_bytes
from lit_lazy.support.names_to_paths import find
from lit_lazy.training import checkpoints
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT
from lit_lazy.training.trained_parameters import build_parameter_groups, lr_factor
from lit_lazy.training.trainer import build_module, fit


def trained(cfg, folder, execution=ONE_DEVICE, callbacks=()):
    """Final weights of a training without evaluation. Its curves are in the folder."""
    source = cfg.data.load()
    return fit(build_module(cfg, source, execution), source, folder, MetricFile(folder), callbacks).state_dict()


def test_each_choice_changes_the_training(tmp_path):
    choices = [("seed", 0), ("train.optimiser", SGD()), ("train.schedule", Constant()), *EVERYTHING.items()]
    ends = [
        trained(replace_at(config(steps=6), dict([choice])), tmp_path / str(i))["model.head.weight"]
        for i, choice in enumerate(choices)
    ]
    for i, one in enumerate(ends):
        assert all(not torch.equal(one, other) for other in ends[:i]), choices[i]


def test_the_average_of_the_weights_is_what_is_validated_kept_and_evaluated(finished, tmp_path):
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


def test_a_tau_that_first_follows_a_ramp_is_averaged_over_the_values_that_it_had(tmp_path):
    steps = Weights()
    ends = trained(config(AttentionSpec(THEN_LEARNED), ema_decay=0.9), tmp_path, callbacks=[steps])
    name, *_ = (name for name in ends if name.endswith("tau"))
    average = steps.seen[0][name]
    for seen in steps.seen[1:]:
        average = 0.9 * average + 0.1 * seen[name]
    torch.testing.assert_close(ends[name], average)


def lines(folder):
    return read_lines(folder / METRICS)


class Weights(Callback):
    """Records a module's state after each step."""

    def __init__(self):
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, _trainer, module, *_):
        self.seen.append({name: value.detach().clone() for name, value in module.state_dict().items()})


@pytest.mark.parametrize("at_once", [2**26, 30 * 7])
@pytest.mark.parametrize("with_z", [False, True])
def test_the_loss_and_log_z_in_blocks_of_tokens_equal_those_of_all_logits(at_once, with_z, monkeypatch):
    """Values and gradients against the plain formulas; ignored targets do not count.

    In blocks, no pass holds all logits.
    """
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(2, 52, 4, generator=generator)).requires_grad_()
    head = torch.randn(30, 4, generator=generator, requires_grad=True)
    targets = torch.randint(30, (2, 52), generator=generator)
    targets[:, ::5] = IGNORED
    with LargestTensor() as largest:
        nll, log_z = head_nll_and_log_z(hidden, head, targets) if with_z else (head_nll(hidden, head, targets), None)
        term = nll.mean() if log_z is None else nll.mean() + log_z.square().sum()
        found = torch.autograd.grad(term, (hidden, head))
    assert largest.elements <= max(at_once, hidden.numel())
    kept = measure_saved_bytes(lambda: head_nll(hidden, head, targets), [hidden, head])
    assert (kept < 4 * targets.numel() * len(head)) == (at_once < targets.numel() * len(head))
    logits, counted = hidden.double() @ head.double().T, targets != IGNORED
    expected_z = logits.logsumexp(-1).where(counted, 0)
    expected = expected_z - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(counted, 0)
    torch.testing.assert_close(nll.double(), expected, rtol=1e-5, atol=1e-5)
    term = expected.mean()
    if log_z is not None:
        torch.testing.assert_close(log_z.double(), expected_z, rtol=1e-5, atol=1e-5)
        term = term + expected_z.square().sum()
    for mine, plain in zip(found, torch.autograd.grad(term, (hidden, head)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-3 if with_z else 1e-6)


def test_z_loss_pulls_the_normaliser_to_one_and_leaves_the_logged_loss_a_cross_entropy(tmp_path):
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


def test_micro_batches_drop_what_the_whole_batch_does(tmp_path):
    cfg = replace_at(config(LAZY, steps=6), {"model.residual_dropout": 0.3})
    whole, parts = (trained(cfg, tmp_path / str(e.micro_batch), e) for e in (ONE_DEVICE, Execution(micro_batch=2)))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5)


VOCAB, CONTEXT = 11, 12
BASE = RunConfig(
    Backcopy(vocab_size=VOCAB - 1, context_length=CONTEXT, train_sequences=32, validation_sequences=8),
    ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=12, tie_embeddings=False),
    TrainConfig(steps=20, warmup_steps=4, lr=0.01, weight_decay=0.1, log_every=1, val_every=100),
)
TIED = {"model.tie_embeddings": True}
OTHERS = {"model.position": LearnedAbsolute(), "model.attention": AttentionSpec(Elastic(), Fire())}
VARIANTS = {
    **{row.name: row.changes for row in load_module(find("ablations", "table2")).ablation.all_rows},
    "tied": TIED,
    "tied, FIRE, learned positions": TIED | OTHERS,
    "frozen tau": {"model.attention.normaliser": Elastic(learn_tau=False)},
}
MATRICES = {f"attention.{name}.weight" for name in "qkv"} | {
    *("attention.out.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")
}


def module(cfg=BASE):
    return LitLM.create(cfg, VOCAB, CONTEXT)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parameter_groups(changes):
    """Every trainable parameter is in one group; only the blocks' matrices and an untied head decay."""
    cfg = replace_at(BASE, changes).model
    model = DecoderLM(cfg, VOCAB, CONTEXT, 0)
    groups = build_parameter_groups(model, BASE.train)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    head = set() if cfg.tie_embeddings else {"head.weight"}
    assert decayed == {f"blocks.{i}.{name}" for i in range(2) for name in MATRICES} | head
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    scale = getattr(cfg.attention.normaliser, "tau_lr_scale", 1.0)
    for group in groups:
        for parameter in group["params"]:
            is_tau = names[id(parameter)].endswith("normaliser.tau")
            assert group["lr"] == pytest.approx(0.01 * (scale if is_tau else 1))


def test_tau_keeps_its_ratio_through_the_schedule():
    lit = module(replace_at(BASE, {"model.attention.normaliser": Elastic(tau_lr_scale=0.25)}))
    configured = lit.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert configured["lr_scheduler"]["interval"] == "step"
    taus = {id(a.normaliser.tau) for a in lit.model.attentions}
    for step in range(BASE.train.steps + 1):
        for group in optimizer.param_groups:
            scale = 0.25 if taus & {id(p) for p in group["params"]} else 1
            assert group["lr"] == pytest.approx(scale * 0.01 * lr_factor(step, BASE.train))
        optimizer.step()
        scheduler.step()
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_the_loss_is_minus_the_log_probability_in_fp32():
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    nll = token_nll(logits, targets)
    for b in range(2):
        for t in range(5):
            p = logits[b, t].double().exp()
            assert nll[b, t].item() == pytest.approx(-math.log(p[targets[b, t]] / p.sum()), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_validation_is_the_mean_over_tokens_and_the_excess_over_the_oracle(tmp_path):
    """Also if the last batch is smaller."""
    data, lit = BASE.data.load().validation, module()
    loader = DataLoader(data, batch_size=3, collate_fn=lambda batch: batch)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    (logged,) = trainer.validate(lit, loader, verbose=False)
    whole = data.__getitems__(list(range(8)))
    with torch.no_grad():
        nll = token_nll(lit.model.cpu()(whole["tokens"]), whole["targets"]).double()
    assert logged["val/loss"] == pytest.approx(nll.mean().item(), rel=1e-6)
    assert logged["val/excess"] == pytest.approx((nll - whole["oracle_nll"]).mean().item(), rel=1e-6)
