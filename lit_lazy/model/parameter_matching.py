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
    with torch.device("meta"):
        modules = [each.build_mixer(layer=0, context_length=1) for each in (cfg, like)]
    mixer, like_mixer = (sum(parameter.numel() for parameter in module.parameters()) for module in modules)
    per_width = 3 * cfg.d_model
    block = like_mixer + 3 * like.d_model * like.d_ff
    exact = (block - mixer) / per_width
    if exact < 0.5:
        problem = f"has {mixer:,} parameters, and the block to match {block:,}"
        fix = f"give the experiment a model.d_ff of at least {like.d_ff + round(1 - exact)}"
        raise ValueError(f"model.mixer={type(cfg.mixer).__name__}: {problem}; {fix}")
    nearest = (step * round(exact / step) for step in STEPS)
    return next(
        (width for width in nearest if width and abs(width - exact) * per_width <= CLOSE * block), max(1, round(exact))
    )
