"""`train.trainable`: what it leaves out is neither changed, nor differentiated, nor in the optimiser, nor paid for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_run import LAZY, assert_resumes, config, weights

from lit_lazy.attention import AttentionSpec, Elastic
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.model.decoder import DecoderLM, flops_per_token
from lit_lazy.optim import SGD, AdamW, Muon, Optimiser
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.cost_estimate import estimate_cost
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.module import LitLM
from lit_lazy.training.parameter_groups import build_optimizer, freeze_others, lr_factor
from lit_lazy.training.run import run
from lit_lazy.training.trainer import build_module, fit

PATTERNS = ("blocks.*.attention.q.weight", "*.normaliser.tau", "*.bias.table", "*norm.weight")


def adapting(trained: str, **train: object) -> RunConfig:
    return replace(config(LAZY, trainable=PATTERNS, **train), init_from=trained)


def is_trained(name: str) -> bool:
    return name.endswith(("q.weight", "tau", "table", "norm.weight"))


@pytest.mark.parametrize("optimiser", [AdamW(), SGD(), Muon()], ids=lambda one: type(one).__name__)
def test_the_frozen_weights_are_bit_equal_and_have_no_state(trained: str, tmp_path: Path, optimiser: Optimiser) -> None:
    betas = {} if optimiser.adaptive else {"betas": (0.9, 0.95)}
    cfg = adapting(trained, optimiser=optimiser, ema_decay=0.8, weight_decay=0.1, lr=1e-2, **betas)
    source = prepare(cfg)
    module = build_module(cfg, source, ONE_DEVICE)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    fit(module, source, tmp_path)
    after = dict(module.model.named_parameters())
    moved = {name for name in before if is_trained(name)}
    assert {name for name in before if not torch.equal(before[name], after[name])} == moved
    assert {name for name, p in after.items() if p.grad is not None} <= moved
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    assert len(state["state"]) == sum(len(group["params"]) for group in state["param_groups"]) == len(moved)
    assert checkpoint["weight_average"].keys() == moved
    stored = [value for entry in state["state"].values() for value in entry.values() if value.dim()]
    assert {value.shape for value in stored} == {after[name].shape for name in moved}


@pytest.mark.parametrize(
    "optimiser", [pytest.param(AdamW(), marks=pytest.mark.long), Muon()], ids=lambda one: type(one).__name__
)
def test_a_killed_run_resumes_bit_for_bit(trained: str, tmp_path: Path, optimiser: Optimiser) -> None:
    assert_resumes(adapting(trained, optimiser=optimiser, ema_decay=0.8), tmp_path, 11)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_freeze_the_same(trained: str, tmp_path: Path, strategy: str) -> None:
    cfg, execution = adapting(trained), Execution(devices=2, strategy=strategy)  # type: ignore[arg-type]
    run(cfg, tmp_path / "2", logger=MetricFile(tmp_path / "2"), keep_checkpoint=True, execution=execution)
    run(cfg, tmp_path / "1", keep_checkpoint=True, execution=Execution(micro_batch=4))
    start = torch.load(trained, weights_only=True)["state_dict"]
    for name, value in weights(tmp_path / "2").items():
        if is_trained(name):
            torch.testing.assert_close(value, weights(tmp_path / "1")[name], rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(value, start[name]), name


def make_model(**changes: object) -> DecoderLM:
    return DecoderLM(ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, **changes), 17, 16, seed=0)  # type: ignore[arg-type]


def test_a_tied_head_is_trained_by_either_name() -> None:
    for pattern in ("head.weight", "embedding.weight"):
        model = make_model()
        assert "embedding.weight" not in freeze_others(model, [pattern])
        assert model.head.weight.requires_grad
    assert freeze_others(make_model(), []) == set()


def test_what_a_module_does_not_train_stays_so() -> None:
    """And needs no value from init_from: it is a constant, not random."""
    model = make_model(attention=AttentionSpec(Elastic(learn_tau=False)))
    frozen = freeze_others(model, ["*.q.weight", "*0*.tau"])
    assert not any("tau" in name for name in frozen)
    assert [attention.normaliser.tau.requires_grad for attention in model.attentions] == [False, False]


def test_muon_without_matrices_and_without_others() -> None:
    for patterns in (["*norm.weight"], ["*.q.weight"]):
        model, cfg = make_model(), config(trainable=tuple(patterns), optimiser=Muon()).train
        freeze_others(model, patterns)
        (group,) = build_optimizer(model, cfg).param_groups
        assert len(group["params"]) == (5 if "norm" in patterns[0] else 2)


class TestCost:
    def test_state_is_that_of_the_trained_parameters(self, trained: str) -> None:
        cfg = adapting(trained, ema_decay=0.5)
        source = prepare(cfg)
        cost = estimate_cost(cfg, source.outline, ONE_DEVICE)
        model = LitLM.create(cfg, source.vocab_size, source.context_length).model
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert 0 < count < cost.parameters == sum(p.numel() for p in model.parameters())
        assert cost.memory["weights"] == 4 * cost.parameters
        assert cost.memory["gradients"] == cost.memory["average"] == cost.memory["optimiser"] // 2 == 4 * count
        assert cost.disk == 2 * 4 * (cost.parameters + 3 * count)

    def test_a_frozen_matrix_costs_four_products_a_token(self) -> None:
        model = make_model()
        whole = flops_per_token(model, 16)
        freeze_others(model, ["*norm.weight"])
        matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
        assert flops_per_token(model, 16) == whole - 2 * matrices


def test_the_logged_rate_is_the_schedules(trained: str, tmp_path: Path) -> None:
    """Not that of tau, here the only group, which has a factor of its own."""
    attention, only_tau = AttentionSpec(Elastic(tau_lr_scale=10.0)), {"trainable": ("*.tau",), "log_every": 1}
    cfg = replace(config(attention, steps=5, **only_tau), init_from=trained)
    run(cfg, tmp_path, logger=MetricFile(tmp_path))
    logged = [line.metrics["train/lr"] for line in read_lines(tmp_path / METRICS) if "train/lr" in line.metrics]
    assert logged == [cfg.train.lr * lr_factor(step, cfg.train) for step in range(5)]
