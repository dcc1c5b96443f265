"""Optimisers take the steps of their definitions, for the intended parameters."""

import copy
import io

import pytest
import torch
from torch import Tensor

from lit_lazy.attention import AttentionSpec, Elastic, Fire, LearnedBias, OutputGate
from lit_lazy.config.schema import ModelConfig, TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.optim import SGD, Muon
from lit_lazy.training.trained_parameters import build_optimizer, build_parameter_groups, find_block_matrices, lr_factor

VOCAB, CONTEXT = 11, 8
MATRICES = {
    *(f"attention.{name}.weight" for name in ("q", "k", "v", "out", "gate.linear")),
    *(f"mlp.{name}.weight" for name in ("gate", "up", "down")),
}
GATED = AttentionSpec(Elastic(tau_lr_scale=0.25), LearnedBias(), gate=OutputGate())


def small(attention=GATED, tied=False):
    cfg = ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=12, attention=attention, tie_embeddings=tied)
    return DecoderLM(cfg, VOCAB, CONTEXT, seed=0)


def recipe(optimiser, **changes):
    return TrainConfig(
        **{"steps": 20, "warmup_steps": 2, "lr": 0.01, "weight_decay": 0.1, "optimiser": optimiser, **changes}
    )


def set_gradients(model, seed):
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None


def train(model, optimiser, steps):
    for step in steps:
        set_gradients(model, step)
        optimiser.step()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", [GATED, AttentionSpec(Elastic(), Fire())], ids=["gated", "FIRE"])
def test_muon_has_the_blocks_matrices_and_adamw_all_else(attention, tied):
    model = small(attention, tied)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(model, recipe(Muon())).param_groups
    by = {rule: {names[id(p)] for g in groups if (rule in g) for p in g["params"]} for rule in ("ns_steps", "betas")}
    assert by["ns_steps"] == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in MATRICES} & set(names.values())
    assert by["betas"] == set(names.values()) - by["ns_steps"]
    assert {"embedding.weight", "norm.weight", "blocks.0.attention.normaliser.tau"} <= by["betas"]
    assert sum(len(g["params"]) for g in groups) == len(names)


def test_muon_joined_with_adamw_steps_as_the_two_do_by_themselves():
    """Includes the schedule, weight decay and tau's learning rate factor."""
    settings = Muon(momentum=0.8, lr_scale=2.0, eps=1e-6)
    cfg, ours, theirs = recipe(settings), small(), small()
    joined = build_optimizer(ours, cfg)
    schedule = torch.optim.lr_scheduler.LambdaLR(joined, lambda step: lr_factor(step, cfg))
    matrices = find_block_matrices(theirs)
    chosen = {id(matrix) for matrix in matrices}
    others = [
        {**group, "params": [p for p in group["params"] if id(p) not in chosen]}
        for group in build_parameter_groups(theirs, cfg)
    ]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, betas=cfg.betas, eps=1e-6, fused=True)
    for step in range(4):
        for optimiser, peak in ((muon, lambda _: 0.02), (adamw, lambda group: group["peak"])):
            for group in optimiser.param_groups:
                group.setdefault("peak", group["lr"])
                group["lr"] = peak(group) * lr_factor(step, cfg)
        for model in (ours, theirs):
            set_gradients(model, step)
        for optimiser in (joined, muon, adamw):
            optimiser.step()
        schedule.step()
    assert equal(ours.state_dict(), theirs.state_dict())
    assert not equal(ours.state_dict(), small().state_dict())


@pytest.mark.parametrize("optimiser", [Muon(), SGD(), SGD(momentum=0.0)], ids=repr)
def test_a_saved_state_goes_on_bit_for_bit(optimiser):
    whole, cut = small(), small()
    train(whole, build_optimizer(whole, recipe(optimiser)), range(6))
    first = build_optimizer(cut, recipe(optimiser))
    train(cut, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    again = copy.deepcopy(cut)
    second = build_optimizer(again, recipe(optimiser))
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(again, second, range(3, 6))
    assert equal(again.state_dict(), whole.state_dict())


def test_sgd_is_heavy_ball_momentum():
    model = small()
    weight = model.blocks[1].mlp.down.weight
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    optimiser = build_optimizer(model, recipe(SGD(momentum=0.7)))
    for step in range(3):
        set_gradients(model, step)
        momentum = 0.7 * momentum + weight.grad + 0.1 * expected
        expected = expected - 0.01 * momentum
        optimiser.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimiser", [Muon(), SGD(), SGD(momentum=0.0)], ids=repr)
def test_moments_are_what_is_kept(optimiser):
    model = small()
    made = build_optimizer(model, recipe(optimiser))
    train(model, made, range(1))
    matrices = {id(matrix) for matrix in find_block_matrices(model)}
    for parameter in model.parameters():
        kept = [x for x in made.state[parameter].values() if isinstance(x, Tensor) and x.shape == parameter.shape]
        if parameter.ndim:  # a scalar has the shape of the step counter
            assert len(kept) == optimiser.moments(id(parameter) in matrices)
