"""Matching of model sizes across mixers."""

import torch

from lit_lazy.config.schema import ModelConfig

STEPS = 8, 1
"""Step sizes of the width, tried in order: GPUs are slow for widths that are not multiples of 8."""
CLOSE = 0.005
"""Tolerated relative difference of two blocks' parameter counts."""


def matching_d_ff(cfg: ModelConfig, like: ModelConfig) -> int:
    """The d_ff at which a block of `cfg` has as many parameters as one of `like`, within 0.5 % if a width allows it.

    Does not count parameters that grow with the context length, and allocates none. Raises ValueError if the mixer
    has more than the whole block of `like`.
    """
    mixer, like_mixer = (_count_mixer_parameters(each) for each in (cfg, like))
    per_width = 3 * cfg.d_model
    block = like_mixer + 3 * like.d_model * like.d_ff
    exact = (block - mixer) / per_width
    if exact < 0.5:
        name = type(cfg.mixer).__name__
        raise ValueError(
            f"model.mixer={name}: has {mixer:,} parameters, and the block to match {block:,}; "
            f"give the experiment a model.d_ff of at least {like.d_ff + round(1 - exact)}"
        )
    nearest = (step * round(exact / step) for step in STEPS)
    return next(
        (width for width in nearest if width and abs(width - exact) * per_width <= CLOSE * block), max(1, round(exact))
    )


def _count_mixer_parameters(cfg: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cfg.build_mixer(layer=0, context_length=1).parameters())
