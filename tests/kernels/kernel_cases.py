"""Inputs for the kernel tests: a draw that keeps off the ReLU's kink, an independent computation, a pairwise cover."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_lazy import Stats, lazy_attention

CONTEXT_LENGTH = 40
KINK_MARGIN = 1e-4
TAU = {"per_query": 1.0, "seq_len": 1.0, "per_token": 1.0, "constant": 0.05}


@dataclass(frozen=True)
class Case:
    """One call: float64 tensors whose values bfloat16 can hold (tau, bias, slopes: float32), and its options."""

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
        """q, k, v in dtype; tau, bias and slopes float64 beside float64 and float32 otherwise."""
        own = torch.float64 if dtype == torch.float64 else torch.float32
        options = dict(self.options)
        if "slopes" in options:
            options["slopes"] = options["slopes"].to(own)
        bias = None if self.bias is None else self.bias.to(own)
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return Case(q, k, v, self.tau.to(own), bias, options)


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
) -> Case:
    """A case, drawn again until no visible p lies within KINK_MARGIN of theta.

    layout: "plain"; "decode" (fewer queries than keys); "ragged" (fewer queries, kv_lengths of four sequences, 0 and
    Lk among them); "packed" (cu_seqlens of one sequence, with an empty document and one of a single token).
    """
    for attempt in itertools.count():
        case = _draw_once(random.Random(f"{seed}-{attempt}"), locals())
        if naive(case)[2] > KINK_MARGIN:
            return case
        if attempt == 300:
            raise RuntimeError("no draw keeps off the kink; make the case smaller")
    raise AssertionError("unreachable")


def _draw_once(rng: random.Random, asked: dict[str, Any]) -> Case:
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    length, kv_heads, width = asked["length"], asked["kv_heads"], asked["width"]
    heads = kv_heads * asked["group"]
    packed = asked["layout"] == "packed"
    batch = {"packed": 1, "ragged": 4}.get(asked["layout"], asked["batch"])
    rows = max(1, length // 3) if asked["layout"] in ("decode", "ragged") else length

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
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    bias = None if asked["bias_width"] is None else normal(heads, asked["bias_width"])
    return Case(q, k, v, tau, bias, options)


def run(case: Case, backend: str, grad: Tensor | None = None) -> tuple[Tensor, Stats, dict[str, Tensor]]:
    """Output, stats and the gradient of every leaf for the output's gradient `grad` (fixed noise by default)."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.leaves().items()}
    options = {**case.options, **{name: leaves[name] for name in ("slopes",) if name in leaves}}
    out, stats = lazy_attention(
        *(leaves[name] for name in ("q", "k", "v", "tau")),
        leaves.get("bias"),
        backend=backend,  # type: ignore[arg-type]
        return_stats=True,
        **options,
    )
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return out.detach(), stats, dict(zip(leaves, grads, strict=True))


def naive(case: Case) -> tuple[np.ndarray, Stats, float]:
    """Output and stats from loops over rows that see a plain list of keys, and min |p / theta - 1| (inf if none).

    Shares nothing with the package: visibility is decided key by key.
    """
    options = case.options
    q, k, v = (x.double().numpy() for x in (case.q, case.k, case.v))
    tau = case.tau.double().numpy()
    bias = None if case.bias is None else case.bias.double().numpy()
    slopes = options["slopes"].double().numpy() if "slopes" in options else None
    (batch, heads, rows, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    cuts = options["cu_seqlens"].tolist() if "cu_seqlens" in options else [0, keys]
    scale = options.get("scale") or 1 / math.sqrt(width)
    out = np.zeros_like(q)
    stats = Stats(*(np.zeros((batch, heads, rows)) for _ in Stats._fields))  # type: ignore[arg-type]
    stats.lse.fill(-np.inf)
    margin = np.inf
    for b, r in itertools.product(range(batch), range(rows)):
        here = int(options["kv_lengths"][b]) if "kv_lengths" in options else keys
        here += r - rows  # index of the row's own key
        start = max((cut for cut in cuts if cut <= here), default=0)
        window = options.get("window") or keys
        seen = [
            j
            for j in range(keys)
            if start <= j <= here and here - j < window and ("key_mask" not in options or options["key_mask"][b, j])
        ]
        if not seen:
            continue
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = k[b, kv, seen] @ q[b, h, r] * scale
            for index, j in enumerate(seen):
                if bias is not None and here - j < bias.shape[1]:
                    scores[index] += bias[h, here - j]
                if slopes is not None:
                    scores[index] -= slopes[h] * (here - j)
            lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            p = np.exp(scores - lse)
            match options["threshold"]:
                case "per_query":
                    theta = tau[h] / len(seen)
                case "per_token":
                    theta = tau[h, min(here - start + 1, tau.shape[1]) - 1] / len(seen)
                case "seq_len":
                    theta = tau[h] / options["context_length"]
                case "constant":
                    theta = tau[h]
            if theta:
                margin = min(margin, np.abs(p / theta - 1).min())
            w = np.maximum(p - theta, 0)
            stats.lse[b, h, r], stats.mass[b, h, r], stats.zeros[b, h, r] = lse, w.sum(), (p <= theta).sum()
            if options["renormalise"] and w.sum() > 0:
                w = w / w.sum()
            stats.first_weight[b, h, r] = w[seen.index(start)] if start in seen else 0
            out[b, h, r] = w @ v[b, kv, seen]
    return out, stats, float(margin)


def pairwise_cover(axes: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy list of settings in which every pair of values of every two axes occurs."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def pairs(chosen: dict[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        return {((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(names, 2)}

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


def without(case: Case, *names: str) -> Case:
    return replace(case, options={name: x for name, x in case.options.items() if name not in names})
