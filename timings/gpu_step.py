"""What a training step of a 340M model costs on a GPU: lazy attention beside PyTorch's softmax attention.

    PYTHONPATH=.:kernels python3 -m timings.gpu_step --out FOLDER

Needs torch and triton alone. Whole steps (forward, loss, backward, clipping, fused AdamW) in bfloat16 autocast, the
same number of tokens at every length, with and without torch.compile. Each case runs in a process of its own and is
written as soon as it is measured: what fails, runs out of memory or hangs costs itself. On a CPU it measures a tiny
model, which shows that everything runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config.schema import ModelConfig, TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.timing import Quartiles
from lit_lazy.training.optimiser import build_parameter_groups
from timings.results import collect_provenance, format_provenance

ATTENTION = {"softmax": AttentionSpec(), "lazy": AttentionSpec(Elastic(), LearnedBias())}
PROGRAM = "timings.gpu_step"
PEAK_FLOPS = 989e12
"""bfloat16 products of an H100 or H200 in a second (data sheet): what MFU is a share of."""
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
    """Of a step."""
    steps: int


FULL = Sizes(1024, 24, 16, 2816, 32_000, (2048, 4096, 8192), 16_384, 20)
TINY = Sizes(32, 2, 2, 64, 64, (32, 64), 128, 3)


class Case(NamedTuple):
    """One measurement."""

    attention: str
    length: int
    compiled: bool


def measure(case: Case, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds of a step (median and quartiles), tokens a second, MFU, and the peak of the device's memory in bytes."""
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
    """Of a training step, as the field counts them for MFU: 6 for a parameter that is multiplied with, and softmax
    attention's products over the visible half (PaLM, appendix B, with causality)."""
    embeddings = sizes.vocabulary * sizes.d_model
    return 6 * (parameters - embeddings) + 6 * sizes.n_layers * sizes.d_model * length


def _make_step(case: Case, sizes: Sizes, device: str) -> tuple[Callable[[], None], int]:
    """A training step on one batch, and how many parameters the model has."""
    config = ModelConfig(
        d_model=sizes.d_model, n_layers=sizes.n_layers, n_heads=sizes.n_heads, d_ff=sizes.d_ff,
        attention=ATTENTION[case.attention], tie_embeddings=False,
    )  # fmt: skip
    model, train = DecoderLM(config, sizes.vocabulary, case.length, SEED).to(device), TrainConfig()
    optimizer = torch.optim.AdamW(build_parameter_groups(model, train), betas=train.betas, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    shape = sizes.tokens // case.length, case.length + 1
    ids = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
        return token_nll(logits, ids[:, 1:]).mean()

    forward = torch.compile(loss) if case.compiled else loss

    def step() -> None:
        optimizer.zero_grad()
        forward(ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()

    return step, sum(parameter.numel() for parameter in model.parameters())


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_in_process(case: Case, sizes: Sizes, device: str) -> dict[str, Any]:
    """The case with its figures, or with the reason for which there are none."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        return {**case._asdict(), **pool.submit(measure, case, sizes, device).result(SECONDS)}
    except Exception as error:  # of a case: the others go on
        for process in list((pool._processes or {}).values()):
            process.kill()  # it may hang
        lines = str(error).strip().splitlines()
        why = lines[0][:200] if lines else f"nothing came within {SECONDS:.0f} s"
        return {**case._asdict(), "not_run": f"{type(error).__name__}: {why}"}
    finally:
        pool.shutdown()


def make_cases(lengths: Iterable[int]) -> list[Case]:
    """Both attentions in turn, uncompiled first."""
    return [
        Case(attention, length, compiled) for compiled, length, attention in product((False, True), lengths, ATTENTION)
    ]


def bench_gpu_step(out: Path, sizes: Sizes, device: str, console: Callable[[str], None] = print) -> None:
    """Measures every case; `out`/gpu-step.json and .md hold what there is after each."""
    command = f"python3 -m {PROGRAM} --out {out}"
    rows: list[dict[str, Any]] = []
    result = {**collect_provenance(out / "gpu-step.json"), "command": command, "sizes": sizes._asdict(), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    for case in make_cases(sizes.lengths):
        row = measure_in_process(case, sizes, device)
        rows.append(row)
        (out / "gpu-step.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "gpu-step.md").write_text(format_table(result))
        console(_format_row(row))
    console(format_table(result))


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    head = "| attention | L | torch.compile | step (ms) | tokens/s | MFU | peak (GiB) |"
    lines = [head, "|:---|---:|:---|" + "---:|" * 4, *map(_format_row, result["rows"])]
    sizes = result["sizes"]
    lines += [
        "",
        f"{sizes['tokens']} tokens a step, {sizes['n_layers']} layers of width {sizes['d_model']}, bfloat16 autocast;",
        f"median of {sizes['steps']} steps [quartiles]. MFU: of {PEAK_FLOPS / 1e12:.0f} TFLOP/s, with softmax",
        "attention's products for both.",
        "",
        format_provenance(result),
    ]
    return "\n".join(lines) + "\n"


def _format_row(row: Mapping[str, Any]) -> str:
    cells = [row["attention"], str(row["length"]), "yes" if row["compiled"] else "no"]
    if "not_run" in row:
        cells += [f"not run: {row['not_run'].replace('|', '/')}", "", "", ""]
    else:
        median, lower, upper = (1000 * row["seconds"][name] for name in ("median", "lower", "upper"))
        mfu, peak = row["mfu"], row["peak_bytes"]
        cells += [f"{median:.1f} [{lower:.1f}, {upper:.1f}]", f"{row['tokens_per_second']:.0f}"]
        cells += ["-" if mfu is None else f"{mfu:.1%}", "-" if peak is None else f"{peak / 2**30:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for gpu-step.json and .md")
    out = parser.parse_args(argv).out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        bench_gpu_step(out, FULL if device == "cuda" else TINY, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
