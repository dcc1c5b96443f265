"""What a training changes: the parameters that it trains, their groups, rates and optimiser. Only torch."""

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lit_lazy.attention.normaliser import NormaliserModule
from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import did_you_mean

MOST_NAMED = 3
"""Frozen parameters in a message, at most."""


def freeze_others(model: nn.Module, patterns: Collection[str]) -> set[str]:
    """Freeze the parameters that match none of the patterns; returns their names. No patterns freeze nothing.

    A parameter with two names (a tied head) is trained if one of them matches. One that its own module does not train
    stays as it is. Raises a one-line ValueError for a pattern that matches nothing, or if nothing is left to train.
    """
    if not patterns:
        return set()
    named = [*model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        known = sorted({re.sub(r"\.\d+\.", ".*.", name) for name, _ in named})
        fix = f"matches no parameter{did_you_mean(pattern, known)}; there are {', '.join(known)}"
        require(any(fnmatchcase(name, pattern) for name, _ in named), "train.trainable", pattern, fix)
    chosen = {id(p) for name, p in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    frozen = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in chosen}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    fix = "trains nothing, as its parameters are constants or follow a schedule; add the names of others"
    require(any(p.requires_grad for _, p in named), "train.trainable", patterns, fix)
    return set(frozen)


def require_loaded(patterns: Collection[str], frozen: Collection[str], loaded: Collection[str]) -> None:
    """Raise a one-line ValueError if a parameter that the patterns freeze is not loaded: it would stay random."""
    new = sorted(set(frozen) - set(loaded))
    names = format_names(new, MOST_NAMED)
    fix = f"leaves {names} at their first values; add a pattern that trains them, or an init_from that has them"
    require(not new, "train.trainable", patterns, fix)


def format_names(names: Sequence[str], most: int) -> str:
    """The first names, and how many there are if that is not all."""
    shown = ", ".join(names[:most])
    return f"{shown}, ... ({len(names)})" if len(names) > most else shown or "none"


def lr_factor(step: int, cfg: TrainConfig) -> float:
    """Factor on the peak learning rate: linear warm-up, then the schedule."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
    return float(cfg.schedule.factor(min(progress, 1.0), cfg.final_lr_fraction))


def build_optimizer(model: DecoderLM, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimiser of all trained parameters."""
    return cfg.optimiser.build(build_parameter_groups(model, cfg), find_block_matrices(model), cfg.betas)


def find_block_matrices(model: DecoderLM) -> list[Tensor]:
    """Weight matrices of the blocks that decay."""
    return list(_find_decayed(model.blocks))


def _find_decayed(module: nn.Module) -> Iterator[Tensor]:
    """Weights of linear layers, except within modules that declare `decays = False`."""
    if not getattr(type(module), "decays", True):
        return
    if isinstance(module, nn.Linear):
        yield module.weight
    for child in module.children():
        yield from _find_decayed(child)


def build_parameter_groups(model: DecoderLM, cfg: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups by weight decay and learning rate.

    Weight matrices of the blocks and an untied head decay. Embeddings (and a head tied to them), norms, tau and all
    parameters of positional biases do not. tau has its normaliser's factor on the learning rate.
    """
    decayed = {id(weight) for weight in _find_decayed(model)} - {id(model.embedding.weight)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    seen: set[int] = set()
    for module in model.modules():
        scale = module.lr_scale if isinstance(module, NormaliserModule) else 1.0
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                decay = cfg.weight_decay if id(parameter) in decayed else 0.0
                groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr": cfg.lr * scale}
        for (decay, scale), parameters in groups.items()
    ]
