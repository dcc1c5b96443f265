"""Correctness gate of the benchmark: the kernels' results against float64, over most options.

The expected values come from `reference`, the error bounds from `eager` in the same precision.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench import cuda
from bench.peers import eager_attention, skip_empty_tiles
from bench.worker import format_reason
from flash_lazy import lazy_attention
from flash_lazy.fused import configurations

CASES: dict[str, dict[str, Any]] = {
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
    **{f"decode, D = {width}": {"rows": 1, "keys": 2048, "width": width, "gradients": False} for width in (64, 128)},
    "decode, two kv heads": {"rows": 1, "kv_heads": 2, "lengths": (200, 257), "gradients": False},
}
"""Cases by name, as changes to the arguments of `_make_case`."""


def _make_case(
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
    """Leaves and options of a call with four heads, and whether to check gradients."""
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


def _compute_results(
    attend: Callable[..., Tensor], leaves: Mapping[str, Tensor], options: Mapping[str, Any], gradients: bool
) -> dict[str, Tensor]:
    """Output computed without gradients and, with `gradients`, the gradient of every leaf."""
    with torch.no_grad():
        results = {"out": attend(**leaves, **options)}
    if gradients:
        required = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        out = attend(**required, **options)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out)
        results["out, training"] = out.detach()
        results |= dict(zip(required, torch.autograd.grad(out, list(required.values()), grad), strict=True))
    return results


def check_cases(backend: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Error ||x - ref|| / ||ref|| of every result against `reference` in float64, and whether it passes.

    The bound is twice the error of `eager` in the same precision. A result also fails if a second call that skips empty
    tiles is not bit-identical. Every kernel uses its default blocks, without tuning.
    """
    rows: list[dict[str, Any]] = []
    with patch.object(configurations, "AUTOTUNE", False):
        for name in names:
            rows += _check_case(name, backend)
    return rows


def _check_case(name: str, backend: str) -> list[dict[str, Any]]:
    leaves, options, gradients = _make_case(cuda.DEVICE, **CASES[name])
    call = partial(_compute_results, leaves=leaves, options=options, gradients=gradients)
    exact = {key: x.double() for key, x in leaves.items()}
    expected = _compute_results(partial(lazy_attention, backend="reference"), exact, options, gradients)
    try:
        with skip_empty_tiles(False):
            found = call(partial(lazy_attention, backend=backend))
        with skip_empty_tiles(True):
            again = call(partial(lazy_attention, backend=backend))
    except Exception as error:
        return [{"case": name, "passed": False, "failed": format_reason(error)}]
    plain = call(eager_attention)
    rows = []
    for key, x in found.items():
        error, bound = relative_error(x, expected[key]), 2 * relative_error(plain[key], expected[key])
        passed = error <= bound and torch.equal(x, again[key])
        rows.append({"case": name, "result": key, "error": error, "bound": bound, "passed": passed})
    return rows


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected).norm() / expected.norm())
