"""What the attention of every normaliser costs, forward and backward, beside lazy attention's own implementation."""

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lit_lazy.attention import (
    AttentionCall,
    BiasTerms,
    ClippedSoftmax,
    Differential,
    Elastic,
    Entmax15,
    LayerShape,
    Normaliser,
    OffByOne,
    Relu,
    Sigmoid,
    SinkLogit,
    Softmax,
    Softpick,
    Sparsemax,
    SSMax,
)  # fmt: skip
from lit_lazy.support.timing import Quartiles, measure_memory_rise, run_in_process, time_in_turns

HEADS, HEAD_DIM, SEED = 4, 64, 0
BASELINE = "Elastic"
NORMALISERS: Mapping[str, Normaliser] = {
    type(normaliser).__name__: normaliser
    for normaliser in (
        Elastic(), Softmax(), OffByOne(), SinkLogit(), ClippedSoftmax(), Softpick(), Sigmoid(), Relu(), SSMax(),
        Differential(), *((Entmax15(), Sparsemax()) if importlib.util.find_spec("entmax") else ()),
    )
}  # fmt: skip
"""Those that this machine can run: one with a GPU may have torch alone."""


def measure_rules(length: int, rounds: int, tokens: int, console: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per normaliser: its rule, and its fused path where it has one, over lazy attention's fused path."""
    console(f"L = {length}: {rounds} rounds of every normaliser's attention")
    steppers = {(name, way): _make_step(name, way, length, tokens) for name in NORMALISERS for way in ("rule", "fused")}
    there = {f"{name} {way}": step for (name, way), step in steppers.items() if step is not None}
    seconds = time_in_turns(there, rounds)
    baseline = seconds[f"{BASELINE} fused"]
    peaks = run_in_process(__name__, _measure_peaks, list(there), length, tokens) or {}

    def compare_to_baseline(name: str, way: str) -> dict[str, Any] | None:
        taken, peak = seconds.get(f"{name} {way}"), peaks.get(f"{name} {way}")
        if taken is None:
            return None
        ratios = [a / b for a, b in zip(taken, baseline, strict=True)]
        return {"rounds": taken, "ratio": asdict(Quartiles.of(ratios)), "peak_bytes": peak}

    return [
        {
            "length": length,
            "normaliser": name,
            "rule": compare_to_baseline(name, "rule"),
            "fused": compare_to_baseline(name, "fused"),
        }
        for name in NORMALISERS
    ]


def format_rules_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    head = ["L", "normaliser", "rule / lazy", "fused / lazy", "peak rule (MiB)", "peak fused (MiB)"]
    lines = ["| " + " | ".join(head) + " |", "|---:|:---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        ways = [row["rule"], row["fused"]]
        ratios = [
            _format_cell(way, "ratio", lambda x: f"{x['median']:.2f} [{x['lower']:.2f}, {x['upper']:.2f}]")
            for way in ways
        ]
        peaks = [_format_cell(way, "peak_bytes", lambda x: f"{x / 2**20:.0f}") for way in ways]
        lines.append("| " + " | ".join([str(row["length"]), row["normaliser"], *ratios, *peaks]) + " |")
    slow = statistics.median(row["rule"]["ratio"]["median"] for row in rows)
    return [
        *lines,
        "",
        f"Attention alone, forward and backward, {HEADS} heads of {HEAD_DIM} with a learned bias, over the fused path "
        f"of {BASELINE}; the median rule takes {slow:.2f} times as long.",
    ]


def _format_cell(way: Mapping[str, Any] | None, name: str, write: Callable[[Any], str]) -> str:
    return "–" if way is None or way[name] is None else write(way[name])


def _make_step(name: str, way: str, length: int, tokens: int) -> Callable[[], None] | None:
    """Forward and backward pass, from q, k, v to their gradients; None where there is no fused path."""
    module = NORMALISERS[name].build(LayerShape(HEADS, HEADS, HEAD_DIM, HEADS * HEAD_DIM, length))
    generator = torch.Generator().manual_seed(SEED)

    def draw() -> Tensor:
        return torch.randn(tokens // length, HEADS, length, HEAD_DIM, generator=generator)

    q, k, v = (draw().requires_grad_() for _ in range(3))
    call, grad = AttentionCall(q, k, v, BiasTerms(torch.zeros(HEADS, length, requires_grad=True))), draw()
    if way == "fused" and module.fused(call) is None:
        return None

    def step() -> None:
        ready = call._replace(q=module.queries(call))
        out = module.attend_by_rule(ready)[0] if way == "rule" else module(call)[0]
        out.backward(grad)

    return step


def _measure_peaks(names: Sequence[str], length: int, tokens: int) -> dict[str, int]:
    """Bytes by which each raises the resident memory, one after the other in this process."""
    found = {}
    for each in names:
        name, way = each.split()
        small, step = _make_step(name, way, 16, 16), _make_step(name, way, length, tokens)
        assert small is not None
        assert step is not None
        small()  # loads the libraries' own buffers
        found[each] = measure_memory_rise(step)
    return found
