"""Cost of every normaliser's attention, forward and backward, relative to lazy attention's fused path."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lit_lazy.attention import AttentionCall, BiasTerms, LayerShape, Normaliser
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.support.machine import time_in_turns
from timings.measuring import Quartiles, measure_memory_rise, run_in_process
from timings.results import format_row, format_spread

HEADS, HEAD_DIM, SEED = 4, 64, 0
BASELINE = "Elastic"
NORMALISERS: Mapping[str, Normaliser] = {
    name: cls() for name, cls in find_leaf_classes(Normaliser).items() if cls.__module__.startswith("lit_lazy.")
}


def measure_rules(length: int, rounds: int, tokens: int, console: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per normaliser: its rule, and its fused path if it has one, relative to lazy attention's fused path."""
    console(f"L = {length}: {rounds} rounds of every normaliser's attention")
    candidates = {f"{name} {path}": (name, path) for name in NORMALISERS for path in ("rule", "fused")}
    steps = {label: _make_step(*candidate, length, tokens) for label, candidate in candidates.items()}
    steps = {label: step for label, step in steps.items() if step is not None}
    seconds = time_in_turns(steps, rounds)
    baseline = seconds[f"{BASELINE} fused"]
    peaks = run_in_process(__name__, _measure_peaks, list(steps), length, tokens) or {}

    def compare_to_baseline(name: str, path: str) -> dict[str, Any] | None:
        taken, peak = seconds.get(f"{name} {path}"), peaks.get(f"{name} {path}")
        if taken is None:
            return None
        ratios = [a / b for a, b in zip(taken, baseline, strict=True)]
        return {"rounds": taken, "ratio": asdict(Quartiles.of(ratios)), "peak_bytes": peak}

    return [
        {"length": length, "normaliser": name} | {path: compare_to_baseline(name, path) for path in ("rule", "fused")}
        for name in NORMALISERS
    ]


def format_rules_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    head = ["L", "normaliser", "rule / lazy", "fused / lazy"]
    lines = [format_row(head), "|---:|:---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        ratios = [format_spread(path["ratio"]) if path else "–" for path in (row["rule"], row["fused"])]
        lines.append(format_row([str(row["length"]), row["normaliser"], *ratios]))
    slow = statistics.median(row["rule"]["ratio"]["median"] for row in rows)
    return [
        *lines,
        "",
        f"Attention alone, forward and backward, with {HEADS} heads of dimension {HEAD_DIM} and a learned bias. Times "
        f"are relative to {BASELINE}'s fused path; the median of `rule / lazy` is {slow:.2f}. The JSON file lists peak "
        "memory.",
    ]


def _make_step(name: str, path: str, length: int, tokens: int) -> Callable[[], None] | None:
    """Forward and backward pass from q, k, v to their gradients; None if the normaliser has no fused path."""
    module = NORMALISERS[name].build(LayerShape(HEADS, HEADS, HEAD_DIM, HEADS * HEAD_DIM, length))
    generator = torch.Generator().manual_seed(SEED)

    def draw() -> Tensor:
        return torch.randn(tokens // length, HEADS, length, HEAD_DIM, generator=generator)

    q, k, v = (draw().requires_grad_() for _ in range(3))
    call, grad = AttentionCall(q, k, v, BiasTerms(torch.zeros(HEADS, length, requires_grad=True))), draw()
    call = call._replace(x=draw().transpose(1, 2).flatten(2))
    if path == "fused" and module.fused(call) is None:
        return None

    def step() -> None:
        by_rule = path == "rule"
        out, _ = module.attend_by_rule(call._replace(q=module.queries(call))) if by_rule else module(call)
        out.backward(grad)

    return step


def _measure_peaks(labels: Sequence[str], length: int, tokens: int) -> dict[str, int]:
    """Bytes by which each step raises the resident memory, one after the other in this process."""
    peaks = {}
    for label in labels:
        name, path = label.split()
        small, step = _make_step(name, path, 16, 16), _make_step(name, path, length, tokens)
        assert small is not None
        assert step is not None
        small()  # allocates the libraries' buffers
        peaks[label] = measure_memory_rise(step)
    return peaks
