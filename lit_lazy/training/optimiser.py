"""What an optimiser gets of a model: parameter groups, and the learning rate of a step. Needs torch alone."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_lazy.attention.normaliser import NormaliserModule
from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM


def lr_factor(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then the schedule; a factor on the peak learning rate."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
    return cfg.schedule.factor(min(progress, 1.0), cfg.final_lr_fraction)


def build_optimizer(model: DecoderLM, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser of all parameters that are trained."""
    return cfg.optimiser.build(build_parameter_groups(model, cfg), find_block_matrices(model), cfg.betas)


def find_block_matrices(model: DecoderLM) -> list[Tensor]:
    """Weight matrices of the blocks' linear layers, but for those in positional biases."""
    return [
        module.weight
        for path, module in model.blocks.named_modules()
        if isinstance(module, nn.Linear) and ".bias" not in path
    ]


def build_parameter_groups(model: DecoderLM, cfg: TrainConfig) -> list[dict[str, Any]]:
    """Groups by decay and learning rate: weight matrices of the blocks and an untied head decay; all else does not.

    All else is embeddings (and a head tied to them), norms, tau, and all parameters of positional biases.
    tau has its normaliser's factor on the learning rate.
    """
    decayed = {id(m.weight) for path, m in model.named_modules() if isinstance(m, nn.Linear) and ".bias" not in path}
    decayed.discard(id(model.embedding.weight))
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
