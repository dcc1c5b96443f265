"""Milliseconds of each pass of the kernels alone, by configuration, and of the whole function, beside SDPA's.

    python3 -m bench.passes --out FOLDER

On a CUDA device. First every case of `correctness` is checked by the default kernels, and one case by each candidate,
in parallel processes; a candidate that is wrong, hangs or crashes is reported and not timed. FOLDER/passes.json and .md
are rewritten after every figure.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import correctness, cuda
from bench.provenance import collect_provenance
from bench.worker import GpuWorker, run_in_parallel
from flash_lazy import lazy_attention
from flash_lazy.call import Call
from flash_lazy.fused import backward, configurations, forward, hopper
from flash_lazy.fused.configurations import Blocks
from flash_lazy.fused.hopper.common import HopperTiles

BATCH, HEADS, LENGTH = 4, 16, 4096
REACH = 512
SHAPES = ((128, REACH), (64, REACH), (128, 0), (64, 0), (64, LENGTH))
"""Head width D and biases per head W."""
SETTINGS: dict[str, dict[str, Any]] = {
    "lazy": {},
    "lazy, not tuned": {"AUTOTUNE": False},
    "lazy, dq for Hopper": {"HOPPER_BACKWARD": True},
    "lazy, merged": {"MERGED_BACKWARD": True},
}
"""Settings of the whole function, all timed at W 512, only the first at other W."""
ROUNDS, WORKERS, CHECK_SECONDS, TIME_SECONDS = 20, 15, 150.0, 30.0
PASSES = ("forward", "query_gradient", "key_gradient", "bias_gradient")


class Candidate(NamedTuple):
    """One way to run a pass."""

    name: str
    """A kernel of `configurations.CONFIGURATIONS`."""
    width: int
    blocks: tuple[int, ...]
    """Of `configurations.Blocks`; of `hopper.HopperTiles` with the kernel made for Hopper."""
    kind: str
    """pointers, descriptors, hopper, or merged: descriptors, dq in the sweep over rows."""

    def __str__(self) -> str:
        return f"{self.name}, D {self.width}, {self.kind}, {' '.join(map(str, self.blocks))}"


CANDIDATES: list[Candidate] = []
COVERED = ("no bias", "window", "two kv heads", "tau < 0", "a tau per position", "few queries", "constant", "documents")
"""Cases of `correctness` at D 64 that the kernels for Hopper cover."""


def add(name: str, width: int, kind: str, *blocks: tuple[int, ...]) -> None:
    CANDIDATES.extend(Candidate(name, width, each, kind) for each in blocks)


for each in (64, 128):
    add("forward", each, "pointers", (128, 64, 8, 3))
    add("bias_gradient", each, "pointers", (64, 64, 4, 1), (64, 64, 8, 1))
add("forward", 64, "hopper", (64, 8))
add("forward", 128, "hopper", (64, 6))
add("query_gradient", 64, "hopper", (64, 8))
add("query_gradient", 128, "hopper", (32, 16), (64, 8))
add("query_gradient", 64, "merged", (128, 64, 8, 3), (64, 32, 4, 3))
add("query_gradient", 128, "merged", (64, 32, 4, 3))
add("key_gradient", 64, "merged", (64, 64, 4, 3))
add("key_gradient", 128, "merged", (64, 64, 8, 2))
add("query_gradient", 64, "descriptors", (64, 32, 4, 3))
add("query_gradient", 128, "pointers", (64, 32, 4, 3))
add("key_gradient", 64, "descriptors", (64, 64, 4, 3))
add("key_gradient", 64, "pointers", (64, 64, 4, 2))
add("key_gradient", 128, "descriptors", (64, 64, 4, 2))


@contextmanager
def use_candidate(candidate: Candidate) -> Iterator[None]:
    """Inside, the pass runs in the candidate's way, all else by the defaults, without tuning."""
    list_choices = configurations.list_choices

    def choose(kernel: str, q: torch.Tensor) -> list[Blocks]:
        name = "merged_gradient" if (candidate.kind, candidate.name) == ("merged", "key_gradient") else candidate.name
        mine = kernel == name and candidate.kind != "hopper" and q.shape[3] == candidate.width
        if not mine:
            return list_choices(kernel, q)
        m, n, warps, stages = candidate.blocks
        return [Blocks(m, n, warps, stages, candidate.kind in ("descriptors", "merged"))]

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(configurations, AUTOTUNE=False, list_choices=choose))
        switches = {"forward": "HOPPER", "query_gradient": "HOPPER_BACKWARD"}
        if switch := switches.get(candidate.name):
            stack.enter_context(patch.object(configurations, switch, candidate.kind == "hopper"))
        stack.enter_context(patch.object(configurations, "HOPPER_DOCUMENTS", candidate.kind == "hopper"))
        stack.enter_context(patch.object(configurations, "MERGED_BACKWARD", candidate.kind == "merged"))
        if candidate.kind == "hopper":
            chosen = {candidate.width: HopperTiles(*candidate.blocks)}
            stack.enter_context(patch.dict(getattr(hopper, candidate.name).CONFIGURATIONS, chosen))
        yield


def make_call(width: int, reach: int) -> Call:
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, width, device=cuda.DEVICE, dtype=torch.bfloat16) for _ in range(3))
    bias = 0.1 * torch.randn(HEADS, reach, device=cuda.DEVICE) if reach else None
    return Call(q, k, v, torch.ones(HEADS, device=cuda.DEVICE), bias)


def make_step(name: str, call: Call) -> Callable[[], Any]:
    """A call of one pass alone."""
    if name == "forward":
        return partial(forward.forward, call, True, False)
    out, softmax, mass, *_ = forward.forward(call, True, False)
    # All results are computed once; the pass then runs alone on what the others left.
    launches: dict[str, Callable[[], Any]] = {}
    originals = {each: getattr(backward, f"_launch_{each}") for each in PASSES[1:]}

    def keep(each: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            launches[each] = partial(originals[each], *arguments)
            launches[each]()

        return run

    with ExitStack() as stack:
        for each in originals:
            stack.enter_context(patch.object(backward, f"_launch_{each}", keep(each)))
        backward.backward(call, None, out, None, softmax, mass, call.bias is not None, False)
    return launches[name]


def check_case(case: str) -> list[dict[str, Any]]:
    """Wrong rows of a case of `correctness` by the default kernels."""
    return [row for row in correctness.check_cases("triton", [case]) if not row["passed"]]


def check_candidate(candidate: Candidate) -> list[dict[str, Any]]:
    """Wrong rows of `correctness` at the candidate's width; also compiles it for the shapes that are timed."""
    with use_candidate(candidate):
        cases = COVERED if candidate.kind == "hopper" and candidate.width == 64 else ()
        wrong = [row for case in (f"bf16, D = {candidate.width}", *cases) for row in check_case(case)]
        if candidate.kind == "merged":  # it adds in no fixed order, so its two calls may differ
            wrong = [row for row in wrong if "failed" in row or not row["error"] <= row["bound"]]
        for width, reach in SHAPES:
            if width == candidate.width and (reach or candidate.name != "bias_gradient"):
                make_step(candidate.name, make_call(width, reach))()
                torch.cuda.synchronize()
    return wrong


def time_candidate(candidate: Candidate, reach: int) -> float:
    """Median milliseconds of the pass."""
    with use_candidate(candidate):
        return time_step(make_step(candidate.name, make_call(candidate.width, reach)))


def time_both(width: int, reach: int, setting: str) -> dict[str, float]:
    """Median milliseconds of the function by the kernels of a setting; and the mean of the host's part."""
    with patch.multiple(configurations, **SETTINGS[setting]):
        return _time_both(width, reach)


def _time_both(width: int, reach: int) -> dict[str, float]:
    call = make_call(width, reach)
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v, call.tau, call.bias) if x is not None]
    grad = torch.randn_like(call.q)

    def attend() -> torch.Tensor:
        return lazy_attention(*leaves[:4], bias=call.bias)

    with torch.no_grad():
        alone = time_step(attend)

    def train() -> None:
        torch.autograd.grad(attend(), leaves, grad)

    both = time_step(train)
    started = time.perf_counter()
    for _ in range(ROUNDS):  # the device's queue takes them all
        train()
    host = 1000 * (time.perf_counter() - started) / ROUNDS
    torch.cuda.synchronize()
    return {"forward": alone, "forward+backward": both, "host": host}


def time_step(step: Callable[[], Any]) -> float:
    events = []
    for index in range(3 + ROUNDS):
        start = cuda.record_event()
        step()
        if index >= 3:
            events.append((start, cuda.record_event()))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def time_softmax(width: int, name: str) -> dict[str, float]:
    """Median milliseconds of the passes of one of RIVALS: softmax attention by SDPA or another library."""
    q, k, v, grad = (
        torch.randn(BATCH, HEADS, LENGTH, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    )
    around, attend = RIVALS[name]()
    with around:
        with torch.no_grad():
            alone = time_step(partial(attend, q, k, v))
        both = time_step(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad.detach()))
    return {"forward": alone, "forward+backward": both}


def _by_sdpa(name: str) -> tuple[AbstractContextManager[Any], Callable[..., torch.Tensor]]:
    return sdpa_kernel(getattr(SDPBackend, name)), partial(F.scaled_dot_product_attention, is_causal=True)


def _by_flex() -> tuple[AbstractContextManager[Any], Callable[..., torch.Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda _batch, _head, row, key: row >= key, None, None, LENGTH, LENGTH, "cuda")
    return nullcontext(), partial(torch.compile(flex_attention), block_mask=mask)


def _by_flash_attention_3() -> tuple[AbstractContextManager[Any], Callable[..., torch.Tensor]]:
    flash_attn_func = import_module("flash_attn_interface").flash_attn_func  # no package here has it

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in inputs), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # its releases differ

    return nullcontext(), attend


RIVALS: dict[str, Callable[[], tuple[AbstractContextManager[Any], Callable[..., torch.Tensor]]]] = {
    "CUDNN_ATTENTION": partial(_by_sdpa, "CUDNN_ATTENTION"),
    "FLASH_ATTENTION": partial(_by_sdpa, "FLASH_ATTENTION"),
    "FlexAttention": _by_flex,
    "FlashAttention-3": _by_flash_attention_3,
}


def _set_up() -> None:
    """A worker needs nothing."""


def bench_passes(out: Path, candidates: Sequence[Candidate]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"made": collect_provenance("bench.passes"), "right": [], "whole": {}, "rows": []}

    def write() -> None:
        (out / "passes.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "passes.md").write_text(format_tables(result))

    started = time.monotonic()
    right = []
    tasks: dict[Any, Callable[[], Any]] = {case: partial(check_case, case) for case in correctness.CASES}
    tasks |= {candidate: partial(check_candidate, candidate) for candidate in candidates}
    for candidate, outcome in run_in_parallel(tasks, WORKERS, lambda: CHECK_SECONDS, _set_up, out / "passes.log"):
        seconds = f"({time.monotonic() - started:.0f} s)"
        if outcome.failed or outcome.value:
            why = outcome.failed or outcome.value
            result["rows"].append({"candidate": str(candidate), "wrong": why})
            print(f"wrong: {candidate}: {str(why)[:400]} {seconds}", flush=True)
        else:
            right += [candidate] * isinstance(candidate, Candidate)
            result["right"].append(str(candidate))
            print(f"right: {candidate} {seconds}", flush=True)
        write()
    with GpuWorker(_set_up, out / "passes.log") as worker:
        for width in (128, 64):
            for rival in RIVALS:
                outcome = worker.run(partial(time_softmax, width, rival), TIME_SECONDS)
                result["whole"][f"{rival}, D {width}"] = outcome.value or outcome.failed
                print(rival, width, outcome.value or outcome.failed, flush=True)
                write()
        for width, reach in SHAPES:
            for setting in SETTINGS if reach == REACH else ("lazy",):
                outcome = worker.run(partial(time_both, width, reach, setting), TIME_SECONDS)
                result["whole"][f"{setting}, D {width}, W {reach}"] = outcome.value or outcome.failed
                print(setting, width, reach, outcome.value or outcome.failed, flush=True)
                write()
            for candidate in sorted(right, key=candidates.index):
                if candidate.width == width and (reach or candidate.name != "bias_gradient"):
                    outcome = worker.run(partial(time_candidate, candidate, reach), TIME_SECONDS)
                    row = {
                        "candidate": str(candidate),
                        "W": reach,
                        "milliseconds": outcome.value,
                        "why": outcome.failed,
                    }
                    result["rows"].append(row)
                    shown = outcome.failed or f"{outcome.value:.3f} ms"
                    print(f"W {reach}: {candidate}: {shown}", flush=True)
                    write()


def format_tables(result: dict[str, Any]) -> str:
    """The whole function and the passes as Markdown, in milliseconds."""
    lines = ["| function | forward | forward + backward | of it on the host |", "|:---|---:|---:|---:|"]
    for name, cell in result["whole"].items():
        figures = [f"{x:.2f}" for x in cell.values()] if isinstance(cell, dict) else [cell, ""]
        figures += [""] * (3 - len(figures))
        lines.append(f"| {name} | {' | '.join(figures)} |")
    reaches = list(dict.fromkeys(row["W"] for row in result["rows"] if "W" in row))
    head = ["pass, head width, loads, blocks", *(f"W {reach}" for reach in reaches)]
    lines += ["", f"| {' | '.join(head)} |", "|:---|" + "---:|" * len(reaches)]
    times = {(row["candidate"], row["W"]): row["milliseconds"] for row in result["rows"] if "W" in row}
    for name in dict.fromkeys(candidate for candidate, _ in times):
        cells = (times.get((name, reach)) for reach in reaches)
        lines.append(f"| {name} | " + " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells) + " |")
    wrong = [f"{row['candidate']}: {row['wrong']}" for row in result["rows"] if "wrong" in row]
    made = ", ".join(f"{name} {value}" for name, value in result["made"].items())
    shape = f"B {BATCH}, H {HEADS}, L {LENGTH}, bfloat16, causal; median of {ROUNDS}."
    checked = f"Checked against float64 beforehand: {len(result['right'])} right, {len(wrong)} wrong."
    return "\n".join([*lines, "", shape, checked, *wrong, "", made + "."]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.passes", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="candidates whose description contains TEXT")
    options = parser.parse_args(argv)
    chosen = [candidate for candidate in CANDIDATES if options.only in str(candidate)]
    bench_passes(options.out, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
