"""Models of one size whatever mixes their tokens."""

import torch

from lit_lazy.config.schema import ModelConfig

STEPS = 8, 1
"""Of a width: the first that comes close enough is taken, for GPUs are slow where 8 does not divide it."""
CLOSE = 0.005
"""Share of a block's parameters by which two may differ."""


def matching_d_ff(cfg: ModelConfig, like: ModelConfig) -> int:
    """The d_ff at which a block of `cfg` has as many parameters as one of `like`, within 0.5 % where a width allows it.

    Parameters that grow with the context length are not counted. Nothing is allocated. Raises ValueError where the
    mixer alone has more.
    """
    mixer, other = (_count_mixer_parameters(each) for each in (cfg, like))
    per_width = 3 * cfg.d_model
    block = other + 3 * like.d_model * like.d_ff
    exact = (block - mixer) / per_width
    if exact < 0.5:
        name = type(cfg.mixer).__name__
        raise ValueError(
            f"model.mixer={name}: has {mixer:,} parameters, the block that it is to match {block:,}; "
            f"give the experiment a model.d_ff of at least {like.d_ff + round(1 - exact)}"
        )
    nearest = (step * round(exact / step) for step in STEPS)
    return next(
        (width for width in nearest if width and abs(width - exact) * per_width <= CLOSE * block), max(1, round(exact))
    )


def _count_mixer_parameters(cfg: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cfg.build_mixer(layer=0, context_length=1).parameters())
