"""Shared code of the kernel tests: inputs away from the ReLU's kink, an independent computation, error bounds."""

import itertools
import math
import os
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_lazy import Stats, lazy_attention
from flash_lazy.call import Call
from flash_lazy.cpu import library
from flash_lazy.fused import configurations
from flash_lazy.reference import reference_weights

THRESHOLDS = ["per_query", "seq_len", "per_token", "constant"]
AXES = {
    "threshold": THRESHOLDS,
    "sign": [1, -1],
    "renormalise": [False, True],
    "bias_width": [None, 1, 20, 300],
    "slopes": [False, True],
    "window": [None, 1, 17, 500],
    "key_mask": [False, True],
    "layout": ["plain", "decode", "ragged", "packed"],
    "group": [1, 3],
    "kv_heads": [1, 2],
}
"""Options of `draw`, for pairwise covers."""
CONTEXT_LENGTH = 40
KINK_MARGIN = 1e-4
TAU = {"per_query": 1.0, "seq_len": 1.0, "per_token": 1.0, "constant": 0.05}


@dataclass(frozen=True)
class Case:
    """One call: float64 tensors, exact in both half types (tau, bias, slopes: in float32), and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    tau: Tensor
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, "tau": self.tau, "bias": self.bias}
        named["slopes"] = self.options.get("slopes")
        return {name: x for name, x in named.items() if x is not None}

    def to(self, dtype: torch.dtype) -> "Case":
        """q, k, v in dtype; tau, bias and slopes in float64 for float64, otherwise float32."""
        own = torch.float64 if dtype == torch.float64 else torch.float32
        options = dict(self.options)
        if "slopes" in options:
            options["slopes"] = options["slopes"].to(own)
        bias = None if self.bias is None else self.bias.to(own)
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return Case(q, k, v, self.tau.to(own), bias, options)

    def to_device(self, device: str) -> "Case":
        """The tensors on a device."""
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        bias = None if self.bias is None else self.bias.to(device)
        return Case(*(x.to(device) for x in (self.q, self.k, self.v, self.tau)), bias, options)


def widest_dtype(backend: str) -> torch.dtype:
    return torch.float32 if backend in ("cpu", "triton") else torch.float64


def device_for(backend: str) -> str:
    """A GPU, if available, for the fused kernels; the CPU for everything else."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def draw(
    seed: int,
    *,
    threshold: str = "per_query",
    sign: int = 1,
    renormalise: bool = False,
    bias_width: int | None = None,
    slopes: bool = False,
    window: int | None = None,
    key_mask: bool = False,
    layout: str = "plain",
    group: int = 1,
    kv_heads: int = 1,
    length: int = 33,
    batch: int = 2,
    width: int = 8,
    rows: int | None = None,
    mean: float = 0.0,
) -> Case:
    """A case, redrawn until no visible p is within KINK_MARGIN of theta.

    layout: "plain"; "decode" (fewer queries than keys); "ragged" (fewer queries, kv_lengths of four sequences, 0 and
    Lk among them); "packed" (cu_seqlens of one sequence, with an empty document and one of a single token).
    rows: queries where they are fewer than keys, a third of the length by default. mean: added to all of k and v.
    """
    for attempt in itertools.count():
        case = _draw_once(random.Random(f"{seed}-{attempt}"), locals())
        if kink_margin(case) > KINK_MARGIN:
            return case
        if attempt == 300:
            raise RuntimeError("no draw keeps off the kink; make the case smaller")
    raise AssertionError("unreachable")


def kink_margin(case: Case, documents: list[tuple[slice, slice]] | None = None) -> float:
    """The least |p / theta - 1| of a visible pair, inf if there is none. documents: rows and keys of each."""
    options = dict(case.options)
    cuts = options.pop("cu_seqlens", None)
    if documents is None:
        parts = [slice(None)] if cuts is None else [slice(*ends) for ends in itertools.pairwise(cuts.tolist())]
        documents = [(part, part) for part in parts if part.start is None or part.start < part.stop]
    margin = math.inf
    for rows, keys in documents:
        own = options | ({"key_mask": options["key_mask"][:, keys]} if "key_mask" in options else {})
        q, k = case.q[:, :, rows].double(), case.k[:, :, keys].double()
        weights = reference_weights(Call(q, k, k, case.tau.double(), case.bias, **own))
        distance = (weights.p / weights.theta[..., None] - 1).abs().masked_fill(~weights.visible, math.inf)
        margin = min(margin, float(distance.min()))
    return margin


def _draw_once(rng: random.Random, asked: dict[str, Any]) -> Case:
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    length, kv_heads, width = asked["length"], asked["kv_heads"], asked["width"]
    heads = kv_heads * asked["group"]
    packed = asked["layout"] == "packed"
    batch = {"packed": 1, "ragged": 4}.get(asked["layout"], asked["batch"])
    rows = asked["rows"] or max(1, length // 3) if asked["layout"] in ("decode", "ragged") else length

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    threshold = asked["threshold"]
    options: dict[str, Any] = {"threshold": threshold, "renormalise": asked["renormalise"], "window": asked["window"]}
    if threshold == "seq_len":
        options["context_length"] = CONTEXT_LENGTH
    if asked["slopes"]:
        options["slopes"] = 0.1 * normal(heads).abs()
    if asked["key_mask"]:
        options["key_mask"] = torch.rand(batch, length, generator=generator) < 0.7
    if asked["layout"] == "ragged":
        options["kv_lengths"] = torch.tensor([rng.randint(1, length), length, 0, rng.randint(1, length)])
    if packed:
        cuts = sorted([0, 0, min(1, length), rng.randint(1, length), rng.randint(1, length), length])
        options["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32)
    tau_shape = (heads, 20) if threshold == "per_token" else (heads,)
    tau = asked["sign"] * TAU[threshold] * (0.8 + 0.4 * torch.rand(*tau_shape, generator=generator))
    shape = batch, kv_heads, length, width
    q, k, v = normal(batch, heads, rows, width), normal(*shape), normal(*shape) + 0.5
    q, k, v = (_round_to_halves(x).double() for x in (q, k + asked["mean"], v + asked["mean"]))
    bias = None if asked["bias_width"] is None else normal(heads, asked["bias_width"])
    return Case(q, k, v, tau, bias, options)


def _round_to_halves(x: Tensor) -> Tensor:
    """x rounded to values that are exact in both bfloat16 and float16."""
    return x.bfloat16().half().float()


def make_noise(case: Case, mean: float = 0.0) -> Tensor:
    """A fixed gradient of the output."""
    return _round_to_halves(torch.randn(case.q.shape, generator=torch.Generator().manual_seed(7)) + mean)


def run(
    case: Case,
    backend: str,
    grad: Tensor | None = None,
    dlse: Tensor | None = None,
    attend: Callable[..., tuple[Tensor, Stats]] = lazy_attention,
) -> tuple[Tensor, Stats, dict[str, Tensor]]:
    """Output, stats, and the gradient of every leaf for the output's gradient (`noise` by default), all on the CPU.

    dlse: gradient of the log-sum-exp `[B, H, Lq]`, none by default.
    """
    grad = make_noise(case) if grad is None else grad
    case = case.to_device(device_for(backend))
    leaves = {name: x.detach().requires_grad_() for name, x in case.leaves().items()}
    options = {**case.options, **{name: leaves[name] for name in ("slopes",) if name in leaves}}
    tensors = (leaves[name] for name in ("q", "k", "v", "tau"))
    out, stats = attend(*tensors, leaves.get("bias"), backend=backend, return_stats=True, **options)
    ends, given = [out], [grad.to(out)]
    if dlse is not None:
        ends, given = [out, stats.lse], [grad.to(out), dlse.to(stats.lse)]
    grads = torch.autograd.grad(ends, list(leaves.values()), given)
    named = dict(zip(leaves, (x.cpu() for x in grads), strict=True))
    return out.detach().cpu(), Stats(*(x.detach().cpu() for x in stats)), named


def run_named(case: Case, backend: str, *given: Any, **options: Any) -> dict[str, Tensor]:
    """Results of `run` by name: out, the stats, dq, dk, ..."""
    out, stats, grads = run(case, backend, *given, **options)
    return {"out": out, **stats._asdict(), **{f"d{name}": x for name, x in grads.items()}}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def require_library() -> None:
    """Skip a test of the compiled backend where it was not built: CI, which installs a compiler, fails instead."""
    why = library.find_obstacle()
    assert why is None or not os.environ.get("LIT_LAZY_REQUIRE_CC"), why
    if why is not None:
        pytest.skip(why)


def use_small_blocks(monkeypatch: pytest.MonkeyPatch, m: int, n: int) -> None:
    """Make every Triton kernel use blocks of m rows and n keys."""
    pytest.importorskip("triton", reason="the fused kernels need triton, which is for Linux")
    blocks = {256: [configurations.Blocks(m, n, 4, 1)]}
    lists = {name: {2: blocks, 4: blocks} for name in configurations.CONFIGURATIONS}
    monkeypatch.setattr(configurations, "CONFIGURATIONS", lists)


class RoundedProducts(TorchFunctionMode):
    """The reference with matrix products of operands, and of gradients, rounded to a dtype; sums stay float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.delta = torch.zeros(())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return _RoundedProduct.apply(*args, self)
        return func(*args, **(kwargs or {}))


class FlashSoftmax(RoundedProducts):
    """RoundedProducts with FlashAttention's backward pass: sum_j p dp from rounded outputs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.softmax:
            return _FlashSoftmax.apply(args[0], self)
        return super().__torch_function__(func, types, args, kwargs)


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        a, b, ctx.mode = args
        a, b = (x.to(ctx.mode.dtype).float() for x in (a, b))
        product = a @ b
        ctx.save_for_backward(a, b, product)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        a, b, product = ctx.saved_tensors
        grad = grads[0].to(ctx.mode.dtype).float()
        ctx.mode.delta = (grad * product.to(ctx.mode.dtype).float()).sum(-1, keepdim=True)
        return grad @ b.mT, a.mT @ grad, None


class _FlashSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        scores, ctx.mode = args
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        # The last product in the backward pass is the one with the values.
        return p * (grads[0] - ctx.mode.delta), None


def replace_infinite(x: Tensor) -> Tensor:
    return x.double().nan_to_num(neginf=0)  # the log-sum-exp of a row without keys is -inf


def max_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, x in found.items():
        assert torch.equal(x.isinf(), exact[name].isinf()), name
    return {name: (replace_infinite(x) - replace_infinite(exact[name])).abs().max() for name, x in found.items()}


def eager_errors(
    case: Case,
    exact: dict[str, Tensor],
    grad: Tensor | None = None,
    mode: type[RoundedProducts] | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Largest error of the reference, or of it under a mode, over several orders of summing the products.

    One order alone is a matter of luck: it may happen to err by nothing.
    """
    generator, worst = torch.Generator().manual_seed(0), dict.fromkeys(exact, torch.zeros(()))
    grad = make_noise(case) if grad is None else grad
    for _ in range(8):
        inner, outer = (torch.randperm(case.q.shape[-1], generator=generator) for _ in range(2))
        turned = replace(case, q=case.q[..., inner], k=case.k[..., inner], v=case.v[..., outer])
        with mode(case.q.dtype) if mode else nullcontext():
            found = run_named(turned, "reference", grad[..., outer], dlse)
        for name, order in {"out": outer, "dq": inner, "dk": inner, "dv": outer}.items():
            found[name] = found[name][..., order.argsort()]
        worst = elementwise_max(worst, max_errors(found, exact))
    return worst


def flash_errors(case: Case, grad: Tensor | None = None) -> dict[str, Tensor]:
    """Largest error of a FlashAttention-style softmax on the case's inputs: tau = 0, not renormalised."""
    case = replace(case, tau=0 * case.tau, options=case.options | {"renormalise": False})
    exact = run_named(case.to(torch.float64), "reference", grad)
    return eager_errors(case, exact, grad, FlashSoftmax)


def tolerance(case: Case) -> dict[str, float]:
    """Tolerance between two outputs of one case in float32: each may have twice the error of the reference."""
    if case.q.dtype == torch.float64:
        return {"rtol": 1e-12, "atol": 1e-13}
    exact = run_named(case.to(torch.float64), "reference")
    rounding = torch.finfo(case.q.dtype).eps * exact["out"].abs().max()
    return {"rtol": 0, "atol": 4 * float(eager_errors(case, exact)["out"] + rounding)}


def elementwise_max(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.maximum(a[name], b[name]) for name in a}


class Errors(NamedTuple):
    """Largest errors of a computation and their bounds, by name of the result."""

    found: dict[str, Tensor]
    eager: dict[str, Tensor]
    rounding: dict[str, Tensor]
    flash: dict[str, Tensor]

    def merge(self, other: "Errors") -> "Errors":
        return Errors(*(elementwise_max(a, b) for a, b in zip(self, other, strict=True)))

    def too_large(self) -> list[str]:
        """Results whose error exceeds twice that of eager plus the result's rounding, or 1.5 times softmax's."""
        found = []
        for name, error in self.found.items():
            allowed = torch.maximum(2 * (self.eager[name] + self.rounding[name]), 1.5 * self.flash[name])
            if not error <= allowed:
                parts = ", ".join(f"{field} {each[name]:.3g}" for field, each in zip(self._fields, self, strict=True))
                found.append(f"{name}: {parts}")
        return found


def measure_errors(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    eager: dict[str, Tensor],
    flash: dict[str, Tensor] | None = None,
    cancelled: dict[str, Tensor] | None = None,
) -> Errors:
    """Errors of results. cancelled: rounding of cancelling terms, which may exceed that of the result."""
    none = dict.fromkeys(found, torch.zeros(()))
    rounding = {name: torch.finfo(x.dtype).eps * replace_infinite(exact[name]).abs().max() for name, x in found.items()}
    rounding = elementwise_max(rounding, none | (cancelled or {}))
    return Errors(max_errors(found, exact), {name: eager[name] for name in found}, rounding, none | (flash or {}))


def assert_small_errors(measure: Callable[[int], Errors], seeds: tuple[int, ...]) -> None:
    """Assert that the errors of the first seed's draw, or the largest over the draws of all seeds, are in their bounds.

    The largest error of few is a matter of luck, eager's as well as that which is tested.
    """
    found = measure(seeds[0])
    if found.too_large():
        for seed in seeds[1:]:
            found = found.merge(measure(seed))
    assert not found.too_large(), found.too_large()


def pairwise_cover(axes: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy list of settings that covers every pair of values of every two axes."""
    rng = random.Random(seed)
    names = list(axes)
    values = [[(name, index) for index in range(len(axes[name]))] for name in names]
    missing = {pair for one, other in itertools.combinations(values, 2) for pair in itertools.product(one, other)}

    def pairs(chosen: dict[str, int]) -> set[tuple[tuple[str, int], ...]]:
        return set(itertools.combinations(chosen.items(), 2))

    cover = []
    while missing:
        first = min(missing)
        trials = []
        for _ in range(40):
            chosen = {name: rng.randrange(len(axes[name])) for name in names} | dict(first)
            trials.append((len(pairs(chosen) & missing), tuple(chosen.values()), chosen))
        chosen = max(trials, key=lambda trial: trial[:2])[2]
        missing -= pairs(chosen)
        cover.append({name: axes[name][index] for name, index in chosen.items()})
    return cover


COMPILED = {
    "plain": {"bias_width": 7, "group": 2, "window": 9},
    "negative tau and a mask": {"sign": -1, "key_mask": True, "slopes": True, "renormalise": True},
    "ragged": {"layout": "ragged", "threshold": "per_token", "bias_width": 7},
    "packed": {"layout": "packed", "sign": -1, "kv_heads": 2},
    "decode": {"layout": "decode", "rows": 1},
}
"""Calls to be compiled."""


def assert_compiles_to_the_same_bits(case: Case, backend: str) -> None:
    """torch.compile sees a call as one operator."""

    def attend(**leaves: Tensor) -> tuple[Tensor, Stats]:
        return lazy_attention(**case.options | leaves, backend=backend, return_stats=True)  # type: ignore[arg-type]

    torch.compiler.reset()
    results = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = {name: x.detach().requires_grad_() for name, x in case.leaves().items()}
        out, stats = call(**leaves)
        ends = out.square().sum() + stats.lse.nan_to_num(neginf=0).square().sum()
        results.append((out, *stats, *torch.autograd.grad(ends, list(leaves.values()))))
    assert all(map(torch.equal, *results))


def assert_refused(call: Callable[[], Any], expected: list[str]) -> None:
    """Assert that the call raises a short error of one line with all of the expected parts."""
    with pytest.raises((ValueError, TypeError), match=re.escape(expected[0])) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 300
    assert all(part in message for part in expected), message
