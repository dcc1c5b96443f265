"""What a rule has to keep, tried on a few small scores before it is trusted with large ones.

The scores are small and large, so that a rule which overflows fails at its first call and not at step 900.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flash_lazy import Rows, Rule
from flash_lazy.rules import HIDDEN

ROWS, KEYS, EXTRA = 4, 7, 3
LARGE = 200.0
"""A score whose exponential is beyond float32."""


def probe_weights(
    name: str,
    rule: Rule,
    heads: int,
    maps: int,
    signed: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError, in one line with the fix, where a rule breaks what `flash_lazy.Rule` promises.

    Shape and dtype; no NaN from finite scores; no weight at hidden keys, nor any that depends on how many there are; no
    negative weight unless signed.
    """
    rows = _rows(device, dtype)
    for size in (1.0, LARGE):
        scores = size * torch.randn(2, heads, maps, ROWS, KEYS, generator=torch.Generator().manual_seed(0))
        scores = scores.to(device, dtype)
        scores = scores.masked_fill(~rows.visible[:, :, None], HIDDEN)
        with torch.no_grad():
            w = _apply(name, rule, scores, rows)
            wider = _apply(name, rule, *_widened(scores, rows))[..., EXTRA:]
        seen = rows.visible.expand_as(w)
        if not w[seen].isfinite().all():
            bad = f"is not finite for scores of size {size:g}"
            raise ValueError(f"{name}.weights {bad}; subtract the row's maximum before an exponential")
        if w[~seen].count_nonzero() or not torch.equal(w[~seen], w[~seen]):
            raise ValueError(f"{name}.weights gives a hidden key weight; clear it with masked_fill(~rows.visible, 0)")
        if not torch.allclose(w, wider, rtol=1e-4, atol=1e-6):
            raise ValueError(f"{name}.weights changes with the number of hidden keys; leave them out by rows.visible")
        if not signed and (w < 0).any():
            raise ValueError(f"{name}.weights gives a weight below 0; declare signed = True, or cut it at 0")


def probe_gradients(
    name: str,
    parameters: Mapping[str, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError, in one line with the fix, where a parameter that is to be trained gets no gradient."""
    if not parameters:
        return
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, KEYS, head_dim, generator=generator).to(device, dtype)
    with torch.enable_grad():
        out = attend(q, k, v)
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


def _rows(device: torch.device, dtype: torch.dtype) -> Rows:
    """The last rows of a sequence, and of one whose every third key is masked; every row sees a key."""
    own = torch.arange(KEYS - ROWS, KEYS)
    causal = own[:, None] >= torch.arange(KEYS)
    masked = causal & (torch.arange(KEYS) % 3 != 1)
    visible = torch.stack((causal, masked))[:, None].to(device)
    n = visible.sum(-1, keepdim=True).to(dtype)
    return Rows(visible, n, (own + 1).view(1, 1, -1, 1).to(device))


def _widened(scores: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """The same with hidden keys before them."""
    more = torch.nn.functional.pad(rows.visible, (EXTRA, 0), value=False)
    return torch.nn.functional.pad(scores, (EXTRA, 0), value=HIDDEN), Rows(more, rows.n, rows.position)


def _apply(name: str, rule: Rule, scores: Tensor, rows: Rows) -> Tensor:
    """scores `[B, H, maps, R, C]`, handed over without the axis of a single map."""
    if scores.shape[2] == 1:
        scores = scores.squeeze(2)
    else:
        rows = Rows(*(x.unsqueeze(2) for x in (rows.visible, rows.n, rows.position)))
    expected = (*scores.shape[:2], *scores.shape[-2:])
    w = rule(scores, rows)
    if not isinstance(w, Tensor) or w.shape != expected or w.dtype != scores.dtype:
        got = f"{w.dtype} {list(w.shape)}" if isinstance(w, Tensor) else f"{type(w).__name__}"
        raise ValueError(
            f"{name}.weights returns {got} for scores {scores.dtype} {list(scores.shape)}; return {scores.dtype} "
            f"{list(expected)}"
        )
    return w
