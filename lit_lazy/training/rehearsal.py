"""A rehearsal of a training on a small model: it finds what is wrong in a user's class before anything is created."""

import copy
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.user_classes import iter_user_classes
from lit_lazy.model.decoder import DecoderLM, build_empty
from lit_lazy.support.checked_fields import NonNegativeFloat, check_value
from lit_lazy.support.error_messages import naming, naming_user_errors
from lit_lazy.training.module import LitLM, Teacher
from lit_lazy.training.trained_parameters import format_names, lr_factor

TOKENS, VOCABULARY, LAYERS, WIDTH = 8, 11, 2, 16
"""Most tokens of a sequence, number of words, most layers, and most hidden units of the MLPs of the small model."""
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""Differences of logits of size 1 that are rounding."""
MOST_STEPS, MOST_NAMED = 1000, 3
"""Most steps at which a schedule is asked for its factor, and parameters that a message names."""


def rehearse(cfg: RunConfig, context_length: int, documents: bool, trains: bool = True) -> None:
    """Check that the users' classes in a model and its training make a causal language model that learns.

    documents: whether attention is restricted to documents. trains: whether the model is to be trained, not only
    measured. Raises a one-line ValueError that names the classes.
    """
    in_model, in_training = ({name for name, _ in iter_user_classes(part)} for part in (cfg.model, cfg.train))
    size = {"n_layers": min(cfg.model.n_layers, LAYERS), "d_ff": min(cfg.model.d_ff, WIDTH), "residual_dropout": 0.0}
    # With this deviation logits are of size 1, so that no dependence drowns in rounding.
    model = dataclasses.replace(cfg.model, **size, init_std=cfg.model.d_model**-0.5, embedding_init_std=None)
    small = dataclasses.replace(cfg, model=model, train=dataclasses.replace(cfg.train, trainable=()))
    length = max(1, min(TOKENS, context_length - 1))
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(0))
    with naming(", ".join(sorted(in_model | in_training))), naming_user_errors("in a rehearsal"):
        module = LitLM.create(small, VOCABULARY, context_length)
        if in_model:
            _compare_passes(module.model, tokens[:, :-1], documents)
        if trains:
            _compare_resumed(module, tokens)
        if trains and in_training:
            _check_schedule(cfg)
    build_empty(model, VOCABULARY, context_length)


@torch.no_grad()
def _compare_passes(model: DecoderLM, tokens: Tensor, documents: bool) -> None:
    logits = model(tokens)
    if not logits.isfinite().all():
        raise ValueError("logits are not finite at the start")
    for problem, others in _iter_passes(model, tokens, documents):
        if not torch.allclose(logits, others, rtol=RELATIVE, atol=ABSOLUTE):
            raise ValueError(problem)


def _iter_passes(model: DecoderLM, tokens: Tensor, documents: bool) -> Iterator[tuple[str, Tensor]]:
    """Passes whose logits must equal those of one over all tokens `[B, L]`, and what is wrong where they do not."""
    rows, length = tokens.shape
    yield "a second pass gives other logits; draw nothing at random, and keep no state", model(tokens)
    alone = torch.cat([model(row) for row in tokens.split(1)])
    yield "the logits of a sequence depend on the others of its batch", alone
    prefixes = [model(tokens[:, :end], last_only=True) for end in range(1, length + 1)]
    fix = "compute each position from itself and those before it alone"
    yield f"later tokens change the logits of earlier ones; {fix}", torch.cat(prefixes, 1)
    try:
        cache = model.new_cache()
    except NotImplementedError:  # of a mixer that is only trained
        return
    decoded = [model(token, cache) for token in tokens.split(1, 1)]
    yield "decoding with a cache gives other logits than one pass; mind the offset of the tokens", torch.cat(decoded, 1)
    if not model.attentions:
        return
    if model.position.relative:
        mask = pad(torch.ones_like(tokens, dtype=torch.bool), (1, 0))
        shifted = model(pad(tokens, (1, 0)), key_mask=mask)[:, 1:]
        yield "logits depend on the padding before a text; declare relative = False of a position that does", shifted
    if documents:
        place = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(length))).expand(rows, -1)
        packed = model(pad(tokens, (1, 0)), place=place)[:, 1:]
        yield "the logits of a document depend on the one before it; mind the places of the tokens", packed


def _compare_resumed(module: LitLM, tokens: Tensor) -> None:
    """After a step in mid-training, model and optimiser must go on from their state dicts as if never stopped."""
    resumed = LitLM(**module.hparams)
    if (distillation := module.cfg.train.distillation).active:
        module.teacher = resumed.teacher = Teacher(copy.deepcopy(module.model), distillation)
    optimiser, other = (each.configure_optimizers()["optimizer"] for each in (module, resumed))
    _take_step(module, optimiser, tokens)
    module.apply_schedules(module.cfg.train.steps // 2)
    resumed.load_state_dict(module.state_dict())
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for each, its in ((module, optimiser), (resumed, other)):
        _take_step(each, its, tokens)
    weights = resumed.state_dict()
    if changed := [name for name, x in module.state_dict().items() if not torch.equal(x, weights[name])]:
        problem = (
            "would go on otherwise after a restart: model or optimiser draw, or have a state that state_dict lacks"
        )
        raise ValueError(
            f"{format_names(changed, MOST_NAMED)} {problem}; use register_buffer, or the optimiser's state"
        )


def _take_step(module: LitLM, optimiser: Any, tokens: Tensor) -> None:
    """One step of the optimiser, which must train every parameter that is to be trained."""
    terms = module.compute_terms({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, 0)
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim() or not term.isfinite():
            raise ValueError(f"{name} is {term}; give a tensor with one finite number")
    optimiser.zero_grad()
    torch.stack([*terms.values()]).sum().backward()
    trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    _require_none([name for name, p in trained.items() if p.grad is None], "get no gradient; use them, undetached")
    given = [id(p) for group in optimiser.param_groups for p in group["params"]]
    left = [name for name, p in trained.items() if given.count(id(p)) != 1]
    _require_none(left, "are not in the optimiser's groups, once each; give it all")
    optimiser.step(lambda: terms["loss"].detach())
    _require_none([name for name, p in trained.items() if not p.isfinite().all()], "are not finite after a step")


def _require_none(names: Collection[str], problem: str) -> None:
    if names:
        raise ValueError(f"the parameters {format_names([*names], MOST_NAMED)} {problem}")


def _check_schedule(cfg: RunConfig) -> None:
    for step in range(0, cfg.train.steps + 1, -(-cfg.train.steps // MOST_STEPS)):
        factor = lr_factor(step, cfg.train)
        check_value(f"the schedule's factor at step {step}", factor, NonNegativeFloat)
        if factor != lr_factor(step, cfg.train):
            raise ValueError(f"the schedule's factor at step {step} changes from call to call; draw nothing at random")
