"""Checks of a custom rule on a few scores before its first use.

The scores include large ones, so that a rule that overflows fails at its first call and not at step 900.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_lazy import Rows, Rule
from flash_lazy.rules import HIDDEN, call_rule, rule_name

ROWS, KEYS, EXTRA = 4, 7, 3
LARGE = 200.0
"""A score whose exponential overflows float32."""


def probe_weights(
    rule: Rule, heads: int, maps: int, can_zero: bool, signed: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises a one-line ValueError with the fix if a rule violates the contract of `flash_lazy.Rule`, or draws.

    Checks shape and dtype, finite weights for finite scores, no weight at hidden keys, equal weights in a second call,
    independence of the number of hidden keys and of other rows and sequences, no negative weight unless `signed`, and
    no weight of exactly 0 for small scores unless `can_zero` or `signed`.
    """
    rows, name = _make_rows(device, dtype), rule_name(rule)
    for size in (1.0, LARGE):
        scores = size * torch.randn(2, heads, maps, ROWS, KEYS, generator=torch.Generator().manual_seed(0))
        scores = scores.to(device, dtype)
        scores = scores.masked_fill(~rows.visible[:, :, None], HIDDEN)
        with torch.no_grad():
            w = _weights(rule, scores, rows)
            again = _weights(rule, scores, rows)
            more = replace(rows, visible=pad(rows.visible, (EXTRA, 0), value=False), offset=KEYS - ROWS + EXTRA)
            wider = _weights(rule, pad(scores, (EXTRA, 0), value=HIDDEN), more)[..., EXTRA:]
            alone = _weights(rule, scores[1:], _map_rows(rows, lambda x: x[-1:], sequences=slice(1, 2)))
            last = _weights(rule, scores[..., 1:, :], _map_rows(rows, lambda x: x[..., 1:, :], offset=KEYS - ROWS + 1))
        seen = rows.visible.expand_as(w)
        if not w[seen].isfinite().all():
            problem = f"is not finite for scores of size {size:g}"
            raise ValueError(f"{name} {problem}; subtract the row's maximum before an exponential")
        if w[~seen].count_nonzero() or w[~seen].isnan().any():
            raise ValueError(f"{name} gives a hidden key weight; clear it with masked_fill(~rows.visible, 0)")
        if not torch.equal(w, again):
            raise ValueError(f"{name} gives other weights for the same scores; draw nothing at random in it")
        if not torch.allclose(w, wider, rtol=1e-4, atol=1e-6):
            raise ValueError(f"{name} depends on the number of hidden keys; exclude them by rows.visible")
        for part, whole, others in ((alone, w[1:], "sequences of the batch"), (last, w[..., 1:, :], "rows")):
            if not torch.allclose(part, whole, rtol=1e-4, atol=1e-6):
                raise ValueError(f"{name} depends on the other {others}; compute each row from its own scores")
        if not signed and (w < 0).any():
            raise ValueError(f"{name} gives a weight below 0; declare signed = True, or clip it at 0")
        if size == 1.0 and not (can_zero or signed) and (w[seen] == 0).any():
            raise ValueError(f"{name} gives a visible key a weight of 0; declare can_zero = True")


def probe_attention(
    name: str,
    parameters: Mapping[str, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises a one-line ValueError with the fix if a normaliser's attention violates its contract.

    Checks the shape of `output`, causality, and a gradient for queries and keys, if they count, and for each trained
    parameter.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, KEYS, head_dim, generator=generator).to(device, dtype)
    with torch.enable_grad():
        out = attend(q.requires_grad_(), k.requires_grad_(), v)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(f"{name}.output returns {got} for heads {list(q.shape)}; return the same shape")
        changed = (torch.cat([x[:, :, :-1], 1 - 3 * x[:, :, -1:]], 2) for x in (q, k, v))
        if not torch.allclose(out[:, :, :-1], attend(*changed)[:, :, :-1], rtol=1e-4, atol=1e-6):
            raise ValueError(f"{name} lets a later token change an earlier row; compute each row from its own scores")
        negated = attend(-q, k, v)
        asked, both = [q, k, *parameters.values()], (out + 2 * negated).sum()  # one of them may be 0 everywhere
        if both.requires_grad:
            of_query, of_key, *found = torch.autograd.grad(both, asked, allow_unused=True)
        else:
            of_query, of_key, *found = [None] * len(asked)
        learned = any(gradient is not None and gradient.any() for gradient in (of_query, of_key))
        if not learned and not torch.equal(out, negated):
            problem = f"{name} passes no gradient to the scores, so queries and keys would learn nothing"
            raise ValueError(f"{problem}: compute the weights from the scores in torch, without detaching them")
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is None:
            fix = "use it in weights, queries or output without detaching it, or give it requires_grad=False"
            raise ValueError(f"{name}.{parameter} gets no gradient: {fix}")


def _make_rows(device: torch.device, dtype: torch.dtype) -> Rows:
    """The last rows of a sequence, and of one with every third key masked; each row sees a key."""
    position = torch.arange(KEYS - ROWS, KEYS)
    causal = position[:, None] >= torch.arange(KEYS)
    masked = causal & (torch.arange(KEYS) % 3 != 1)
    visible = torch.stack((causal, masked))[:, None].to(device)
    n = visible.sum(-1, keepdim=True)
    return Rows(visible, n.to(dtype), n, KEYS - ROWS)


def _map_rows(rows: Rows, cut: Callable[[Tensor], Tensor], **changes: Any) -> Rows:
    return replace(rows, visible=cut(rows.visible), n=cut(rows.n), position=cut(rows.position), **changes)


def _weights(rule: Rule, scores: Tensor, rows: Rows) -> Tensor:
    """Call a rule with scores `[B, H, maps, R, C]`, without the axis of a single map."""
    if scores.shape[2] == 1:
        return call_rule(rule, scores.squeeze(2), rows)
    return call_rule(rule, scores, rows.with_maps())
