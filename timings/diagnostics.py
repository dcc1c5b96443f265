"""Cost of the diagnostics: memory and time of a layer's summary, and the callback during training.

The summary is of one long sequence, in a separate process. Its memory is the rise of the resident memory over the idle
process, inputs included. The callback is measured on complete trainings of shipped experiments on one thread, without
and with it in turns. Its share of the training time is reported twice: the seconds inside the callback over those of
the same training, and the ratio of the CPU seconds of paired trainings, which is complete but as noisy as the machine.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch

from lit_lazy.attention import AttentionCall, Elastic, LayerShape, LearnedBias
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.user_files import load_experiment
from lit_lazy.data import DataSource
from lit_lazy.measure.row_statistics import summarise
from lit_lazy.support.names_to_paths import find
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.head_monitor import HeadMonitor
from lit_lazy.training.module import LitLM
from lit_lazy.training.trainer import fit
from timings.measuring import Quartiles
from timings.results import collect_provenance, format_provenance, format_row, format_spread, publish
from timings.workload import use_one_thread

LENGTH, HEADS, HEAD_DIM = 8192, 16, 64
EXPERIMENTS, ROUNDS, SEQUENCES = ("backcopy", "stdlib"), 5, 4
MOST_BYTES, MOST_SHARE = 10**9, 0.02
"""The project's requirements."""
QUICK: Mapping[str, Any] = {"length": 2048, "heads": 16, "experiments": ("backcopy_tiny",), "rounds": 2}
"""Arguments of a smoke test of seconds; its figures mean nothing."""
SEED = 0


def bench_diagnostics(
    length: int = LENGTH,
    heads: int = HEADS,
    experiments: Sequence[str] = EXPERIMENTS,
    rounds: int = ROUNDS,
    out: Path | None = None,
    console: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the tables with `console`, and write `out` (.json) and the tables (.md).

    rounds: 2 or more pairs of trainings of each experiment. Raises ValueError for fewer and for unknown experiments.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: must be 2 or more, or there is no spread")
    configs = {name: load_experiment(find("experiments", name)) for name in experiments}
    with use_one_thread():
        provenance = collect_provenance(out)
        console(f"summary of {heads} heads at L = {length}: {rounds} rounds")
        summary = _measure_in_process(length, heads, rounds)
        result = {
            **provenance,
            "summary": {"length": length, "heads": heads, "head_dim": HEAD_DIM, **summary},
            "training": [_measure_training(name, cfg, rounds, console) for name, cfg in configs.items()],
        }
    publish(result, format_table(result), out, console)
    return result


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    summary = result["summary"]
    peak = summary["peak_bytes"]
    lines = [
        "| L | heads | head dimension | summary (s) | peak over the idle process (MB) |",
        "|---:|---:|---:|---:|---:|",
        f"| {summary['length']} | {summary['heads']} | {summary['head_dim']} | "
        f"{format_spread(summary['seconds'])} | "
        f"{'not measured' if peak is None else f'{peak / 1e6:.0f}'} |",
        "",
        "| experiment | steps | times it logs | training (s) | inside the callback | with / without - 1 |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for row in result["training"]:
        cells = [
            row["experiment"],
            str(row["steps"]),
            str(row["looks"]),
            format_spread(row["seconds"], digits=1),
            f"{format_spread(row['inside'], 100)} %",
            f"{format_spread(row['paired'], 100)} %",
        ]
        lines.append(format_row(cells))
    lines += [
        "",
        f"Float32 on {result['environment']['threads']} thread: median [quartiles] of {len(summary['rounds'])} rounds. "
        f"The last column compares CPU times. Limits: a peak of {MOST_BYTES / 1e6:.0f} MB at L = {LENGTH} with "
        f"{HEADS} heads; {MOST_SHARE:.0%} of the training time inside the callback.",
        format_provenance(result),
    ]
    return "\n".join(lines) + "\n"


def _measure_in_process(length: int, heads: int, rounds: int) -> dict[str, Any]:
    """Seconds and peak of a summary. The server imports once; its children start from clean memory."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure_summary, length, heads, rounds).result()


def _measure_summary(length: int, heads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    idle = psutil.Process().memory_info().rss
    generator = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(1, heads, length, HEAD_DIM, generator=generator) for _ in range(2))
    shape = LayerShape(heads, heads, HEAD_DIM, heads * HEAD_DIM, length)
    normaliser = Elastic().build(shape)
    bias = LearnedBias(init_std=1.0).build(heads, length)(length)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        summarise(normaliser, AttentionCall(q, k, k, bias))
        seconds.append(time.perf_counter() - started)
    peak = _read_peak_memory()
    return {
        "rounds": seconds,
        "seconds": asdict(Quartiles.of(seconds)),
        "peak_bytes": None if peak is None else peak - idle,
    }


def _read_peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None except on Linux, where ru_maxrss is in KiB."""
    if sys.platform != "linux":
        return None
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Stopwatch(HeadMonitor):
    """The callback with the seconds spent inside it."""

    def __init__(self, source: DataSource) -> None:
        super().__init__(source, sequences=SEQUENCES)
        self.seconds = 0.0

    @contextmanager
    def _time_inside(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self._time_inside():
            super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        with self._time_inside():
            super().on_train_batch_end(trainer, pl_module, *args, **kwargs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self._time_inside():
            super().on_validation_end(trainer, pl_module)


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a training; inside: seconds in the callback; looks: how often it logged."""

    seconds: float
    processor_seconds: float
    inside: float
    looks: int


def _measure_training(name: str, cfg: RunConfig, rounds: int, console: Callable[[str], None]) -> dict[str, Any]:
    """A row of the table: pairs of trainings, whose order alternates from round to round."""
    source = cfg.data.load()
    console(f"{name}: {rounds} pairs of trainings of {cfg.train.steps} steps, after one to warm up")
    _train(cfg, source, None)
    without: list[TrainingCost] = []
    watched: list[TrainingCost] = []
    for index in range(rounds):
        for with_it in (False, True) if index % 2 == 0 else (True, False):
            (watched if with_it else without).append(_train(cfg, source, Stopwatch(source) if with_it else None))
    inside = [training.inside / training.seconds for training in watched]
    paired = [a.processor_seconds / b.processor_seconds - 1 for a, b in zip(watched, without, strict=True)]
    return {
        "experiment": name,
        "steps": cfg.train.steps,
        "looks": watched[0].looks,
        "rounds": {"without": [asdict(x) for x in without], "with": [asdict(x) for x in watched]},
        "seconds": asdict(Quartiles.of([training.seconds for training in without])),
        "inside": asdict(Quartiles.of(inside)),
        "paired": asdict(Quartiles.of(paired)),
    }


def _train(cfg: RunConfig, source: DataSource, stopwatch: Stopwatch | None) -> TrainingCost:
    """A training, including validations and checkpoints."""
    module = LitLM.create(cfg, source.vocab_size, source.context_length)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        callbacks = [] if stopwatch is None else [stopwatch]
        started, processor_started = time.perf_counter(), time.process_time()
        fit(module, source, folder, MetricFile(folder), callbacks)
        seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor_started
        lines = read_lines(folder / METRICS)
    looks = sum(any(name.startswith("watch/") for name in line.metrics) for line in lines)
    return TrainingCost(seconds, processor_seconds, 0.0 if stopwatch is None else stopwatch.seconds, looks)
