"""Parameter groups, and the learning rate of a step, for an optimiser. Needs only torch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_lazy.attention.normaliser import NormaliserModule
from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM


def lr_factor(step: int, cfg: TrainConfig) -> float:
    """Factor on the peak learning rate: linear warm-up, then the schedule."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
    return cfg.schedule.factor(min(progress, 1.0), cfg.final_lr_fraction)


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
