"""Checks of a run's settings: initial weights that cannot be loaded, and what does less in a training than it says.

A setting of attention or position has no effect if it changes nothing in a probe: no output and no gradient of a layer.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_lazy.attention import Attention, PassInputs
from lit_lazy.attention.mixer import SelfInitialised
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import get_default, replace_at
from lit_lazy.data.source_interface import Outline
from lit_lazy.model.decoder import parameter_generator
from lit_lazy.support.console import format_count

WIDTH, SIZES = 8, torch.tensor([0.25, 0.5, 1.0, 4.0], dtype=torch.float64)[:, None, None]
"""Width of the probe's tokens and heads, and sizes of the tokens: scores from even to uneven, most weights near 0."""


def list_ineffective(cfg: RunConfig, context_length: int) -> list[str]:
    """A line for each setting that does less in this training than it says. Valid: the model may read longer texts."""
    warmup, steps, decay = cfg.train.warmup_steps, cfg.train.steps, cfg.train.ema_decay
    averaged, tenth = 1 / (1 - decay), steps // 10
    late = f"leaves {steps - warmup} of {steps} steps at the full rate and below; {tenth} would be a tenth"
    long = f"averages about {averaged:,.0f} steps and the first ones; a smaller one forgets these"
    effects = [
        *(_iter_without_effect(cfg.model, context_length) if cfg.model.mixer.attends else ()),
        *([("train.warmup_steps", warmup, late)] if 2 * warmup > steps else ()),
        *([("train.ema_decay", decay, long)] if decay > 0 and averaged > steps else ()),
    ]
    return [f"{field}={value}: {effect}" for field, value, effect in effects]


def _iter_without_effect(model: ModelConfig, context_length: int) -> Iterator[tuple[str, Any, str]]:
    """Settings of attention and position that change nothing in `_probe_layer`: path, value, note."""
    unchanged = cache(lambda layer: _probe_layer(model, layer, context_length))

    def changes_nothing(path: str, value: Any) -> bool:
        # Suppressed if the other settings need what is changed.
        with suppress(ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError):
            changed = replace_at(model, {path: value})
            probes = ((unchanged(i), _probe_layer(changed, i, context_length)) for i in range(model.n_layers))
            return all(_agree(*pair) for pair in probes)
        return False

    where = f"{format_count(context_length, 'token')} in {format_count(model.n_layers, 'layer')}"
    parts, noted = {"attention": model.attention, "position": model.position}, set[str]()
    for path, value, plainer in chain.from_iterable(map(_iter_plainer, parts, parts.values())):
        if path not in noted and changes_nothing(path, plainer):
            noted.add(path)
            shown, same = (type(x).__name__ if dataclasses.is_dataclass(x) else x for x in (value, plainer))
            yield f"model.{path}", shown, f"has no effect on {where}: outputs and gradients are those with {same}"


def _iter_plainer(path: str, part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Path and value of each field at any depth, and what it could be instead: its default, or a tuple with less.

    Without first values, which guide the training and change no output.
    """
    for field in dataclasses.fields(part):
        value, default, below = getattr(part, field.name), get_default(field), f"{path}.{field.name}"
        is_part = dataclasses.is_dataclass(value)
        if field.name in getattr(part, "first_values", ()):  # a user's plain dataclass has none
            continue
        if type(value) is not type(default) if is_part else value != default:
            shorter = [value[:i] + value[i + 1 :] for i in range(len(value))] if isinstance(value, tuple) else []
            yield from ((below, value, other) for other in (default, *shorter))
        if is_part:
            yield from _iter_plainer(below, value)


def _probe_layer(model: ModelConfig, layer: int, context_length: int) -> dict[str, Tensor]:
    """By name, a layer's outputs for last tokens of full and of half contexts, and the gradients of a sum of them.

    In float64. These tokens see what a batch would show, in time and memory linear in the context.
    """
    narrow = dataclasses.replace(model, d_model=WIDTH, head_dim=min(model.head_width, WIDTH), backend="reference")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        mixer = Attention(narrow.attention, narrow.layer_shape(layer, context_length), narrow.backend)
        position = narrow.position.build(WIDTH, mixer.rotary_dim, context_length)
    parts = nn.ModuleDict({"attention": mixer, "position": position}).double()
    for path, part in parts.named_modules():
        if isinstance(part, SelfInitialised):
            part.init_parameters(lambda name, path=path: parameter_generator(0, f"{path}.{name}"))
    found = {"lr_scale": torch.tensor(mixer.normaliser.lr_scale)}
    for seen in (context_length, context_length // 2 + 1):
        draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seen))
        cached, heads = mixer.new_cache(), (len(SIZES), narrow.kv_heads, seen - 1, narrow.head_width)
        cached.extend(draw(heads), draw(heads), lambda keys: keys)
        token = position.embed(SIZES * draw(len(SIZES), 1, WIDTH), seen - 1)
        rotate = position.rotation(1, seen - 1) if position.rotates(layer) else lambda heads: heads
        out = mixer(token, PassInputs(rotate, cached))[0]
        (out * draw(out.shape)).sum().backward()
        found[f"{seen} tokens"] = out.detach()
    return found | {name: p.grad for name, p in parts.named_parameters() if p.grad is not None}


def _agree(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two probes are equal but for rounding, with zeros for what only one has: a longer table, a parameter."""

    def agree(x: Tensor, y: Tensor) -> bool:
        both = tuple(slice(min(sizes)) for sizes in zip(x.shape, y.shape, strict=False))
        pairs = (x[both], y[both]), *((part[both].abs().sum(), part.abs().sum()) for part in (x, y))
        return x.dim() == y.dim() and all(torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in pairs)

    filled = {**first, **second}
    absent = {name: torch.zeros_like(x) for name, x in filled.items()}
    return all(agree(first.get(name, absent[name]), second.get(name, absent[name])) for name in filled)


def check_init_from(cfg: RunConfig, data: Outline) -> None:
    """Raises a one-line ValueError if the run's initial weights cannot be loaded."""
    if cfg.init_from is not None:
        # Imports Lightning, which costs a command that only starts workers four seconds.
        from lit_lazy.training.checkpoints import check_matching_weights

        check_matching_weights(Path(cfg.init_from), cfg, data)
