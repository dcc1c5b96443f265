"""What a rule has to keep, tried on a few small scores before it is trusted with large ones.

The scores are small and large, so that a rule which overflows fails at its first call and not at step 900.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flash_lazy import Rows, Rule
from flash_lazy.rules import HIDDEN, call_rule, rule_name

ROWS, KEYS, EXTRA = 4, 7, 3
LARGE = 200.0
"""A score whose exponential is beyond float32."""


def probe_weights(
    rule: Rule,
    heads: int,
    maps: int,
    can_zero: bool,
    signed: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError, in one line with the fix, where a rule breaks what `flash_lazy.Rule` promises.

    Shape and dtype; no NaN from finite scores; no weight at hidden keys, nor any that depends on how many there are; no
    negative weight unless signed, and no weight of exactly 0 for a small score unless it can be.
    """
    rows, name = _make_rows(device, dtype), rule_name(rule)
    for size in (1.0, LARGE):
        scores = size * torch.randn(2, heads, maps, ROWS, KEYS, generator=torch.Generator().manual_seed(0))
        scores = scores.to(device, dtype)
        scores = scores.masked_fill(~rows.visible[:, :, None], HIDDEN)
        with torch.no_grad():
            w = _weights(rule, scores, rows)
            wider = _weights(rule, *_prepend_hidden_keys(scores, rows))[..., EXTRA:]
        seen = rows.visible.expand_as(w)
        if not w[seen].isfinite().all():
            bad = f"is not finite for scores of size {size:g}"
            raise ValueError(f"{name} {bad}; subtract the row's maximum before an exponential")
        if w[~seen].count_nonzero() or w[~seen].isnan().any():
            raise ValueError(f"{name} gives a hidden key weight; clear it with masked_fill(~rows.visible, 0)")
        if not torch.allclose(w, wider, rtol=1e-4, atol=1e-6):
            raise ValueError(f"{name} changes with the number of hidden keys; leave them out by rows.visible")
        if not signed and (w < 0).any():
            raise ValueError(f"{name} gives a weight below 0; declare signed = True, or cut it at 0")
        if size == 1.0 and not (can_zero or signed) and (w[seen] == 0).any():
            raise ValueError(f"{name} gives a visible key a weight of 0; declare can_zero = True: there is a sparsity")


def probe_attention(
    name: str,
    parameters: Mapping[str, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError, in one line with the fix, where the whole of a normaliser breaks its promises.

    The shape of what `output` returns, and a gradient for each parameter that is to be trained.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, KEYS, head_dim, generator=generator).to(device, dtype)
    with torch.enable_grad():
        out = attend(q, k, v)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(f"{name}.output returns {got} for heads {list(q.shape)}; return the same shape")
        if not parameters:
            return
        if out.requires_grad:
            found = torch.autograd.grad(out.sum(), list(parameters.values()), allow_unused=True)
        else:
            found = (None,) * len(parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is None:
            raise ValueError(
                f"{name}.{parameter} gets no gradient: use it in weights, queries or output without detaching it, or "
                "give it requires_grad=False"
            )


def _make_rows(device: torch.device, dtype: torch.dtype) -> Rows:
    """The last rows of a sequence, and of one whose every third key is masked; every row sees a key."""
    own = torch.arange(KEYS - ROWS, KEYS)
    causal = own[:, None] >= torch.arange(KEYS)
    masked = causal & (torch.arange(KEYS) % 3 != 1)
    visible = torch.stack((causal, masked))[:, None].to(device)
    n = visible.sum(-1, keepdim=True).to(dtype)
    return Rows(visible, n, (own + 1).view(1, 1, -1, 1).to(device))


def _prepend_hidden_keys(scores: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """The same with hidden keys before them."""
    more = torch.nn.functional.pad(rows.visible, (EXTRA, 0), value=False)
    return torch.nn.functional.pad(scores, (EXTRA, 0), value=HIDDEN), Rows(more, rows.n, rows.position)


def _weights(rule: Rule, scores: Tensor, rows: Rows) -> Tensor:
    """scores `[B, H, maps, R, C]`, handed over without the axis of a single map."""
    if scores.shape[2] == 1:
        return call_rule(rule, scores.squeeze(2), rows)
    return call_rule(rule, scores, rows.with_maps())
