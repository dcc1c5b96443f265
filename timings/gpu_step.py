"""Cost of a training step of a 340M model on a GPU: lazy attention compared with PyTorch's softmax attention.

    PYTHONPATH=.:kernels python3 -m timings.gpu_step --out FOLDER

Needs only torch and triton. Steps (forward, loss, backward, clipping, fused AdamW) in bfloat16 autocast, the same
number of tokens at every length, with and without torch.compile. Each case runs in a separate process and is written
as soon as it is measured, so a case that fails, runs out of memory or hangs does not affect the others. On a CPU it
measures a tiny model, as a smoke test.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config.schema import ModelConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from timings.measuring import Quartiles
from timings.results import collect_provenance, format_provenance, format_row, format_spread
from timings.workload import make_training_step

ATTENTION = {
    "softmax": AttentionSpec(),
    "lazy, W 512": AttentionSpec(Elastic(), LearnedBias(512)),  # the authors' length
    "lazy, W = L": AttentionSpec(Elastic(), LearnedBias()),
}
PROGRAM = "timings.gpu_step"
PEAK_FLOPS = 989e12
"""bfloat16 FLOP/s of an H100 or H200 (data sheet), the denominator of MFU."""
WARM_UP, SEED, SECONDS = 3, 0, 180.0


class Sizes(NamedTuple):
    """A model and its batch."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    vocabulary: int
    lengths: tuple[int, ...]
    tokens: int
    """Tokens per step."""
    steps: int


FULL = Sizes(1024, 24, 16, 2816, 32_000, (2048, 4096, 8192), 16_384, 20)
TINY = Sizes(32, 2, 2, 64, 64, (32, 64), 128, 3)


class Case(NamedTuple):
    """One measurement."""

    attention: str
    length: int
    compiled: bool


def measure(case: Case, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds per step (median and quartiles), tokens per second, MFU, and peak device memory in bytes."""
    step, parameters = _make_step(case, sizes, device)
    for _ in range(WARM_UP):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(sizes.steps):
        _synchronise(device)
        started = time.perf_counter()
        step()
        _synchronise(device)
        seconds.append(time.perf_counter() - started)
    spread = Quartiles.of(seconds)
    rate = sizes.tokens / spread.median
    return {
        "parameters": parameters,
        "seconds": asdict(spread),
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(parameters, case.length, sizes) / PEAK_FLOPS if device == "cuda" else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def flops_per_token(parameters: int, length: int, sizes: Sizes) -> float:
    """FLOPs of a training step per token, for MFU: 6 per multiplied parameter, and softmax attention's products over
    the visible half (PaLM, appendix B, with causality)."""
    embeddings = sizes.vocabulary * sizes.d_model
    return 6 * (parameters - embeddings) + 6 * sizes.n_layers * sizes.d_model * length


def _make_step(case: Case, sizes: Sizes, device: str) -> tuple[Callable[[], None], int]:
    """A training step on one batch, and the model's number of parameters."""
    config = ModelConfig(
        d_model=sizes.d_model, n_layers=sizes.n_layers, n_heads=sizes.n_heads, d_ff=sizes.d_ff,
        attention=ATTENTION[case.attention], tie_embeddings=False,
    )  # fmt: skip
    model = DecoderLM(config, sizes.vocabulary, case.length, SEED).to(device)
    generator = torch.Generator().manual_seed(SEED)
    shape = sizes.tokens // case.length, case.length + 1
    ids = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)

    def compute_loss(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
        return token_nll(logits, ids[:, 1:]).mean()

    step = make_training_step(model, torch.compile(compute_loss) if case.compiled else compute_loss, fused=True)
    return partial(step, ids), sum(parameter.numel() for parameter in model.parameters())


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_in_process(case: Case, sizes: Sizes, device: str) -> dict[str, Any]:
    """The case with its figures, or with `not_run`, the reason why it has none."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        return {**case._asdict(), **pool.submit(measure, case, sizes, device).result(SECONDS)}
    except Exception as error:  # the other cases continue
        for process in list((pool._processes or {}).values()):
            process.kill()  # it may hang
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else f"no result within {SECONDS:.0f} s"
        return {**case._asdict(), "not_run": f"{type(error).__name__}: {reason}"}
    finally:
        pool.shutdown()


def make_cases(lengths: Iterable[int], kinds: Iterable[bool] = (False, True)) -> list[Case]:
    """The attentions in turn, uncompiled first. kinds: whether they are compiled."""
    return [Case(attention, length, compiled) for compiled, length, attention in product(kinds, lengths, ATTENTION)]


def bench_gpu_step(
    out: Path, sizes: Sizes, device: str, console: Callable[[str], None] = print, compiled: bool | None = None
) -> None:
    """Measure every case, or those (not) compiled; `out`/gpu-step.json and .md are rewritten after each."""
    command = f"python3 -m {PROGRAM} --out {out}"
    if sizes.lengths not in (FULL.lengths, TINY.lengths):
        command += f" --lengths {','.join(map(str, sizes.lengths))}"
    if compiled is not None:
        command += " --compiled" if compiled else " --no-compiled"
    rows: list[dict[str, Any]] = []
    result = {**collect_provenance(out / "gpu-step.json"), "command": command, "sizes": sizes._asdict(), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    for case in make_cases(sizes.lengths, (False, True) if compiled is None else (compiled,)):
        row = measure_in_process(case, sizes, device)
        rows.append(row)
        (out / "gpu-step.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (out / "gpu-step.md").write_text(format_table(result), encoding="utf-8")
        console(_format_case(row))
    console(format_table(result))


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    head = "| attention | L | torch.compile | step (ms) | tokens/s | MFU | peak (GiB) |"
    lines = [head, "|:---|---:|:---|" + "---:|" * 4, *map(_format_case, result["rows"])]
    sizes = result["sizes"]
    lines += [
        "",
        f"{sizes['tokens']} tokens per step, {sizes['n_layers']} layers of width {sizes['d_model']}, bfloat16",
        f"autocast; median of {sizes['steps']} steps [quartiles]. MFU: of {PEAK_FLOPS / 1e12:.0f} TFLOP/s, with",
        "softmax attention's products for both.",
        "",
        format_provenance(result),
    ]
    return "\n".join(lines) + "\n"


def _format_case(row: Mapping[str, Any]) -> str:
    cells = [row["attention"], str(row["length"]), "yes" if row["compiled"] else "no"]
    if "not_run" in row:
        cells += [f"not run: {row['not_run'].replace('|', '/')}", "", "", ""]
    else:
        mfu, peak = row["mfu"], row["peak_bytes"]
        cells += [format_spread(row["seconds"], 1000, 1), f"{row['tokens_per_second']:.0f}"]
        cells += ["-" if mfu is None else f"{mfu:.1%}", "-" if peak is None else f"{peak / 2**30:.2f}"]
    return format_row(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for gpu-step.json and .md")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="only with, or without torch.compile")
    parser.add_argument("--lengths", metavar="N,M", help="only these of the lengths")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        sizes = FULL if device == "cuda" else TINY
        if options.lengths:
            sizes = sizes._replace(lengths=tuple(map(int, options.lengths.split(","))))
        bench_gpu_step(options.out, sizes, device, compiled=options.compiled)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
