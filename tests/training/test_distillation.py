"""Distillation from the model before the swap: its formulas, its memory, and a teacher that stays as it was."""

from dataclasses import replace

import pytest
import torch
from layers import LargestTensor
from test_run import LAZY, assert_resumes, config
from torch import Tensor

from lit_lazy.data import IGNORED
from lit_lazy.model import loss
from lit_lazy.model.loss import average_logits
from lit_lazy.optim import AttentionOutputs, Logits
from lit_lazy.optim.optimisers_schedules_distillation import Passes
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.cost_estimate import estimate_cost
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.trainer import build_module, fit

TERMS = [Logits(weight=0.5, temperature=2.0), AttentionOutputs(weight=0.3)]
KIND = {"ids": lambda term: type(term).__name__}


def distilling(trained, term, attention=LAZY, **train):
    return replace(config(attention, distillation=term, **train), init_from=trained)


@pytest.mark.parametrize("at_once", [2**26, 2 * 30 * 7])
def test_the_divergence_of_the_logits_in_blocks_and_whole(at_once, monkeypatch):
    """Value and gradients against the plain formula in float64; ignored targets do not count.

    The largest tensor is a block of one model's logits.
    """
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(2, 24, 4, generator=generator) for _ in range(2))
    head, other_head = (torch.randn(30, 4, generator=generator) for _ in range(2))
    leaves = hidden.requires_grad_(), head.requires_grad_()
    targets = torch.randint(30, (2, 24), generator=generator)
    targets[:, ::5] = IGNORED
    average = lambda function: average_logits((hidden, head), (other, other_head), targets, function)  # noqa: E731
    with LargestTensor() as largest:
        found = Logits(temperature=3.0).compute(Passes([], average))
        ours = torch.autograd.grad(found, leaves)
    assert largest.elements <= at_once / 2
    pairs = ((hidden, head), (other, other_head))
    own, teacher = ((x.double() @ w.double().T / 3).softmax(-1)[targets != IGNORED] for x, w in pairs)
    expected = 9 * (teacher * (teacher / own).log()).sum(-1).mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, plain in zip(ours, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_the_error_of_the_attention_outputs(trained):
    """Against a loop over layers and sequences of what each layer adds."""
    cfg = distilling(trained, AttentionOutputs())
    module = build_module(cfg, prepare(cfg), ONE_DEVICE)
    teacher, batch = module.teacher.model, cfg.data.load().train.__getitems__([0, 1, 2])
    mixed: dict[int, list[Tensor]] = {0: [], 1: []}
    for which, model in enumerate((module.model, teacher)):
        for mixer in model.mixers:
            mixer.register_forward_hook(lambda _, __, out, which=which: mixed[which].append(out[0]))
        model.compute_hidden(batch["tokens"])
    errors = [
        ((own[b] - taught[b]).square().mean() / taught[b].square().mean()).item()
        for own, taught in zip(mixed[0], mixed[1], strict=True)
        for b in range(3)
    ]
    forward = lambda: module.model.compute_hidden(batch["tokens"])  # noqa: E731
    _, term = module.teacher.compute_term(module.model, forward, batch)
    assert term.item() == pytest.approx(sum(errors) / 6, rel=1e-5)
    assert term.item() > 0.01


@pytest.mark.parametrize("term", TERMS, **KIND)
def test_it_pulls_towards_the_teacher_which_stays_and_is_in_no_checkpoint(trained, tmp_path, term):
    """The term ends lower than in a training that hardly has it, and is logged beside the plain loss."""
    terms, losses = {}, {}
    for weight in (1e-6, 20.0):
        cfg = distilling(trained, replace(term, weight=weight), steps=20, log_every=1)
        source, folder = prepare(cfg), tmp_path / str(weight)
        module = build_module(cfg, source, ONE_DEVICE)
        before = {name: value.clone() for name, value in module.teacher.model.state_dict().items()}
        names = module.state_dict().keys()
        fit(module, source, folder, MetricFile(folder))
        logged = [line.metrics for line in read_lines(folder / METRICS) if "train/loss" in line.metrics]
        terms[weight] = [line["train/distillation"] / weight for line in logged]
        losses[weight] = [line["train/loss"] for line in logged]
    assert [len(found) for found in losses.values()] == [20, 20]
    assert losses[20.0][0] == losses[1e-6][0]
    assert terms[20.0][0] == pytest.approx(terms[1e-6][0], rel=1e-5)
    assert terms[20.0][-1] < terms[1e-6][-1]
    for name, value in module.teacher.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(p.requires_grad or p.grad is not None for p in module.teacher.model.parameters())
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["state_dict"].keys() == names
    assert not any("teacher" in key for key in content)


@pytest.mark.parametrize("term", [pytest.param(TERMS[0], marks=pytest.mark.long), TERMS[1]], **KIND)
def test_a_killed_run_resumes_bit_for_bit(trained, tmp_path, term):
    assert_resumes(distilling(trained, term), tmp_path, 11)


@pytest.mark.parametrize(
    ("term", "execution"),
    [
        (TERMS[0], Execution(micro_batch=2)),
        (TERMS[1], Execution(checkpoint_activations=True)),
        pytest.param(TERMS[0], Execution(checkpoint_activations=True), marks=pytest.mark.long),
        pytest.param(TERMS[1], Execution(micro_batch=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_execution_changes_no_more_than_rounding(trained, tmp_path, term, execution):
    cfg = distilling(trained, term, steps=4)
    ends = []
    for number, chosen in enumerate((ONE_DEVICE, execution)):
        module, source = build_module(cfg, prepare(cfg), chosen), cfg.data.load()
        ends.append(fit(module, source, tmp_path / str(number)).state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-5)


def test_its_cost_is_a_second_model_and_a_forward_pass(trained):
    cfg = distilling(trained, Logits())
    outline = prepare(cfg).outline
    with_teacher, alone = (
        estimate_cost(one, outline, ONE_DEVICE) for one in (cfg, replace(cfg, train=config(LAZY).train))
    )
    assert with_teacher.memory["teacher"] == 4 * alone.parameters
    assert with_teacher.flops == pytest.approx(4 / 3 * alone.flops)
