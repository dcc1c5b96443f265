"""What the benchmark compares: inputs with a set share of empty tiles, the function as others compute it, a check.

`eager` and `two_calls` are the definition once more, by means that share nothing with the kernels.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_lazy import lazy_attention
from flash_lazy.fused import configurations

REACH, TILE = 512, 64
LEAST_RECENCY, BISECTIONS, SAMPLED, CLOSE = 1e-2, 40, 32, 0.003


class Inputs(NamedTuple):
    """q, k, v `[B, H, L, D]`, tau `[H]`, bias `[H, REACH]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    tau: Tensor
    bias: Tensor


def draw(
    batch: int, heads: int, length: int, width: int, recency: float, device: torch.device, dtype: torch.dtype
) -> Inputs:
    """Random inputs whose scores rise by `recency` nats from the first key to the last; tau = 1."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, width, generator=generator, device=device) for _ in range(3))
    q[..., 0] = width**0.5
    k[..., 0] = recency * torch.arange(length, device=device) / length
    bias = 0.1 * torch.randn(heads, REACH, generator=generator, device=device)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), torch.ones(heads, device=device), bias)


def empty_share(inputs: Inputs, sampled: int = SAMPLED) -> float:
    """Share of the causal TILE x TILE tiles, per sequence and head, in which no weight survives (tau `per_query`).

    Computed from the definition, in float32, on `sampled` evenly spaced blocks of rows (all where there are no more).
    """
    q, k, _, tau, bias = inputs
    length, reach = q.shape[2], bias.shape[1]
    blocks = length // TILE
    chosen = torch.linspace(0, blocks - 1, min(sampled, blocks)).round().long().tolist()
    table = F.pad(bias, (0, max(0, length - reach)))
    empty, tiles = 0, 0
    for block in chosen:
        row = torch.arange(block * TILE, (block + 1) * TILE, device=q.device)[:, None]
        distance = row - torch.arange((block + 1) * TILE, device=q.device)
        scores = q[:, :, row[:, 0]].float() @ k[:, :, : distance.shape[1]].float().mT * q.shape[3] ** -0.5
        scores += table[:, distance.clamp(min=0)]
        p = scores.masked_fill_(distance < 0, -torch.inf).softmax(-1)
        alive = (p > tau[:, None, None] / (row + 1)) & (distance >= 0)
        per_tile = alive.unflatten(-1, (block + 1, TILE)).any(-1).any(-2)
        empty += int((~per_tile).sum())
        tiles += per_tile.numel()
    return empty / tiles


def draw_with_share(
    share: float,
    batch: int,
    heads: int,
    length: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Inputs, float, float]:
    """Inputs whose share of empty tiles is near `share`, the share measured, and the recency found by bisection.

    Every block of rows keeps a tile, so the share ends at 1 - 2 / (blocks + 1): short sequences may stay below.
    """
    make = partial(draw, batch, heads, length, width, device=device, dtype=dtype)
    low, high = 0.0, 8.0 * length
    recency = 0.0
    for _ in range(BISECTIONS):
        inputs = make(recency)
        found = empty_share(inputs)
        if abs(found - share) < CLOSE or (recency == 0 and found >= share):
            break
        low, high = (recency, high) if found < share else (low, recency)
        recency = (max(low, LEAST_RECENCY) * high) ** 0.5
    return inputs, found, recency


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    threshold: str = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The function in plain PyTorch: products in q's dtype, what lies between in float32 (float64 for float64).

    Arguments as in `lazy_attention`; every row must see a key.
    """
    rows, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    column = torch.arange(keys, device=q.device)
    last = torch.full((1, 1), keys, device=q.device) if kv_lengths is None else kv_lengths[:, None]
    own = last - rows + torch.arange(rows, device=q.device)  # [B or 1, Lq]
    start = torch.zeros_like(own)
    if cu_seqlens is not None:
        start = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), own, right=True) - 1]
    distance = own[..., None] - column
    visible = (distance >= 0) & (column >= start[..., None])
    if window is not None:
        visible &= distance < window
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[3] ** -0.5
    if bias is not None:
        scores = scores + F.pad(bias, (0, 1))[:, distance.clamp(0, bias.shape[1])].transpose(0, 1)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance[:, None]
    p = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    offset = tau[:, (own - start).clamp(max=tau.shape[1] - 1)].transpose(0, 1) if tau.dim() > 1 else tau[:, None]
    seen = visible.sum(-1)[:, None]
    theta = offset / (seen if threshold in ("per_query", "per_token") else context_length or 1)
    w = (p - theta[..., None]).relu().masked_fill(~visible[:, None], 0)
    if renormalise:
        mass = w.sum(-1, keepdim=True)
        w = w / torch.where(mass > 0, mass, 1)
    return w.to(v.dtype) @ v


def two_calls(
    q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor, block_mask: Any, attention: Callable[..., Any]
) -> Tensor:
    """The function (`per_query`) by FlexAttention: a call for the log-sum-exp, and one whose scores are log weights.

    The second normalises by sum w, which its own log-sum-exp undoes. The first multiplies as few values as it can.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    shift, reach = k.shape[2] - q.shape[2], bias.shape[1]

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        distance = row + shift - key
        return score + torch.where(distance < reach, bias[head, distance.clamp(0, reach - 1)], 0.0)

    call = partial(attention, q, k, block_mask=block_mask, return_aux=AuxRequest(lse=True))
    lse = call(v[..., :16], score_mod=biased)[1].lse

    def log_weight(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        p = torch.exp(biased(score, batch, head, row, key) - lse[batch, head, row])
        w = p - tau[head] / (row + shift + 1)
        return torch.where(w > 0, torch.log(torch.where(w > 0, w, 1.0)), -torch.inf)

    out, aux = call(v, score_mod=log_weight)
    return out * torch.exp(aux.lse)[..., None].to(out.dtype)


class Peer(NamedTuple):
    name: str
    attend: Callable[..., Tensor]
    """From q, k, v, tau and bias to the output."""
    kind: str | None
    """Whose products it needs, in PRODUCTS."""
    same: bool = True
    """Whether it computes the same function."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def peers(backend: str, authors: Path | None) -> list[Peer]:
    ours = partial(lazy_attention, backend=backend)
    return [
        Peer("flash_lazy", ours, "lazy"),
        Peer("flash_lazy, nothing skipped", ours, "lazy", around=without_skipping),
        *(
            Peer(f"SDPA {name}", _softmax, "softmax", False, partial(sdpa_kernel, getattr(SDPBackend, name)))
            for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
        ),
        Peer("FlexAttention, two calls", _flex, "lazy"),
        Peer("eager", eager, "lazy"),
        Peer("AdaSplash", _adasplash, None, False),
        Peer("the authors' kernel", partial(_authors, authors), "authors"),
    ]


def without_skipping() -> AbstractContextManager[Any]:
    """Products of empty tiles are computed inside."""
    return patch.object(configurations, "SKIP_EMPTY_TILES", False)


def _softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def _flex(q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    return _compiled_flex()(q, k, v, tau, bias, _causal_mask(q.shape[2], q.device.type))


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(*arguments: Any) -> Tensor:
        return two_calls(*arguments, attention=flex_attention)

    return torch.compile(attend, dynamic=False)


@cache
def _causal_mask(rows: int, device: str) -> Any:
    """None for a single row, which sees every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return row >= key

    return create_block_mask(causal, None, None, rows, rows, device) if rows > 1 else None


def _adasplash(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    if q.shape[2] < k.shape[2]:
        raise NotImplementedError("it has no decoding")
    import adasplash  # pyrefly: ignore [missing-import]

    return adasplash.adasplash(q, k, v, is_causal=True)


def _authors(checkout: Path | None, q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """github.com/Fzkuji/flash-lazy-attention, which adds tau where this package subtracts it."""
    if checkout is None:
        raise FileNotFoundError("no checkout was given (--authors)")
    if q.shape[2] < k.shape[2]:
        raise NotImplementedError("it has no decoding")
    return _module(checkout).lazy_attention_triton(q, k, v, bias, -tau)


@cache
def _module(checkout: Path) -> Any:
    path = checkout / "lazy_attention_triton.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATE: dict[str, dict[str, Any]] = {
    **{f"bf16, D = {width}": {"width": width} for width in (16, 64, 80, 96, 128, 256)},
    **{f"{name}, D = 64": {"dtype": dtype} for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32))},
    "fp32, D = 128": {"dtype": torch.float32, "width": 128},
    "no bias": {"reach": None},
    "one bias": {"reach": 1},
    "more biases than keys": {"reach": 600},
    "slopes": {"slopes": 0.02},
    "most tiles empty": {"slopes": 0.5},
    "window": {"window": 100},
    "documents": {"batch": 1, "cuts": (0, 1, 1, 120, 257)},
    "two kv heads": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "tau < 0": {"tau": -1.0},
    "a tau per position": {"threshold": "per_token", "positions": 100},
    "seq_len": {"threshold": "seq_len", "context_length": 300},
    "constant": {"threshold": "constant", "tau": 0.01},
    "renormalised": {"renormalise": True},
    "few queries": {"rows": 65},
    "ragged": {"rows": 65, "lengths": (200, 257)},
    "more blocks than programs": {"batch": 8, "rows": 2048, "keys": 2048, "reach": 512},
    "decode": {"rows": 1, "kv_heads": 2, "lengths": (200, 257), "gradients": False},
}
"""Cases by name, as changes of `_case`'s arguments."""


def _case(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
    kv_heads: int = 4,
    rows: int = 257,
    keys: int = 257,
    width: int = 64,
    reach: int | None = 100,
    slopes: float = 0.0,
    tau: float = 1.0,
    positions: int | None = None,
    cuts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    gradients: bool = True,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """Leaves and options of a call with four heads, and whether gradients are checked."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    leaves = {name: normal(batch, heads, size, width).to(dtype) for name, heads, size in
              (("q", 4, rows), ("k", kv_heads, keys), ("v", kv_heads, keys))}  # fmt: skip
    leaves["tau"] = tau * (1 + 0.1 * normal(4, *([positions] if positions else [])))
    if reach:
        leaves["bias"] = normal(4, reach)
    if slopes:
        leaves["slopes"] = slopes * (1 + 0.1 * normal(4))
    if cuts:
        options["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32, device=device)
    if lengths:
        options["kv_lengths"] = torch.tensor(lengths, device=device)
    return leaves, options, gradients


def _results(
    attend: Callable[..., Tensor], leaves: Mapping[str, Tensor], options: Mapping[str, Any], gradients: bool
) -> dict[str, Tensor]:
    """The output computed without gradients, and where asked for the gradient of every leaf."""
    with torch.no_grad():
        results = {"out": attend(**leaves, **options)}
    if gradients:
        required = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        out = attend(**required, **options)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out)
        results["out, training"] = out.detach()
        results |= dict(zip(required, torch.autograd.grad(out, list(required.values()), grad), strict=True))
    return results


def gate(backend: str, device: torch.device, names: Sequence[str] = tuple(GATE)) -> list[dict[str, Any]]:
    """Errors ||x - ref|| / ||ref|| of every result against `reference` in float64, and whether they pass.

    The bound is twice the error of `eager` in the same precision. A result that is not bit-identical on a second call,
    in which nothing is skipped, fails too. The default blocks of every kernel are used: nothing is tuned.
    """
    rows: list[dict[str, Any]] = []
    with patch.object(configurations, "AUTOTUNE", False):
        for name in names:
            rows += _checked(name, backend, device)
    return rows


def _checked(name: str, backend: str, device: torch.device) -> list[dict[str, Any]]:
    leaves, options, gradients = _case(device, **GATE[name])
    call = partial(_results, leaves=leaves, options=options, gradients=gradients)
    exact = {key: x.double() for key, x in leaves.items()}
    expected = _results(partial(lazy_attention, backend="reference"), exact, options, gradients)
    try:
        found = call(partial(lazy_attention, backend=backend))
        with without_skipping():
            again = call(partial(lazy_attention, backend=backend))
    except Exception as error:
        return [{"case": name, "passed": False, "failed": reason(error)}]
    plain = call(eager)
    rows = []
    for key, x in found.items():
        error, bound = relative_error(x, expected[key]), 2 * relative_error(plain[key], expected[key])
        passed = error <= bound and torch.equal(x, again[key])
        rows.append({"case": name, "result": key, "error": error, "bound": bound, "passed": passed})
    return rows


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected).norm() / expected.norm())


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"
