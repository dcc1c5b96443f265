"""Cost estimate of a grid from a few timed steps of each row; nothing is written to disk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from lit_lazy.config.schema import RunConfig
from lit_lazy.data.base import Outline
from lit_lazy.grid.ablation import Row, check_and_outline_data, check_row
from lit_lazy.grid.jobs.job import LaunchOptions
from lit_lazy.model.loss import token_nll
from lit_lazy.support.console import format_count, format_duration, track_progress
from lit_lazy.training.cost_estimate import UTILISATION, estimate_cost, find_peak_flops, measure_cpu_flops
from lit_lazy.training.module import LitLM
from lit_lazy.training.optimiser import build_optimizer

TIMED_STEPS, WARMUP_STEPS = 5, 2
MOST_FLOPS_OF_A_TIMED_STEP = 3e11
"""About ten seconds on one core."""
BYTES_PER_FINISHED_CELL = 100_000
"""Upper bound for result.json, MLflow's rows and the config artifact."""


def print_estimate(
    grid: str,
    chosen: Sequence[tuple[Row, tuple[int, ...]]],
    configs: Mapping[str, RunConfig],
    launch: LaunchOptions,
    console: Console,
) -> None:
    """Print a grid's rows with their estimated time, memory and disk space.

    configs: of the rows, by name. Raises a one-line ValueError that names a row whose training cannot start.
    """
    outlines: dict[str, Outline] = {}
    for row, _ in track_progress(chosen, "checking rows"):
        outlines[row.name] = check_row(row, lambda row=row: check_and_outline_data(configs[row.name], launch.execution))
    devices, (kind, peak) = launch.execution.devices, find_peak_flops()
    on_cpu = devices == 1 and not torch.cuda.is_available()
    total, largest, by = 0.0, 0, f"{TIMED_STEPS} timed steps of each row on one device"
    for row, seeds in chosen:
        config, data = configs[row.name], outlines[row.name]
        cost = estimate_cost(config, data, launch.execution)
        if cost.flops / config.train.steps < MOST_FLOPS_OF_A_TIMED_STEP:
            seconds = estimate_training_seconds(config, data)
        elif on_cpu:
            seconds, by = cost.flops / measure_cpu_flops(), "the speed of a product of matrices here"
        else:
            seconds, by = (
                3600 * cost.estimate_hours(devices, peak),
                f"{UTILISATION:.0%} of the peak of {devices} {kind} each",
            )
        total += seconds * len(seeds)
        largest = max(largest, cost.disk)
        numbers = ",".join(map(str, seeds))
        console.print(
            f"{row.name:40} seeds {numbers:12} {format_duration(seconds):>9} each, {cost.parameters:>13,} parameters, "
            f"{cost.device_bytes / 1e9:.1f} GB",
            highlight=False,
            soft_wrap=True,
        )
    cells = sum(len(seeds) for _, seeds in chosen)
    disk = cells * BYTES_PER_FINISHED_CELL + launch.workers * largest
    console.print(
        f"\n{cells} cells of {grid}: about {format_duration(total / launch.workers)} of training with "
        f"{format_count(launch.workers, 'worker')} of "
        f"{format_count(launch.threads, 'thread')}, from {by}; memory of each device without libraries; "
        f"about {disk / 1e6:.0f} MB of disk.\nNothing was created.",
        highlight=False,
    )


def estimate_training_seconds(config: RunConfig, data: Outline) -> float:
    """Estimated seconds of training, from timed steps on random tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LitLM.create(replace(config, seed=0), data.vocab_size, data.context_length).model.to(device)
    optimizer = build_optimizer(model, config.train)
    shape = 2, config.train.batch_size, data.context_length
    tokens, targets = torch.randint(data.vocab_size, shape, device=device)
    started = 0.0
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        if step == WARMUP_STEPS:
            started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            loss = token_nll(model(tokens), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    per_step = (time.perf_counter() - started) / TIMED_STEPS
    return per_step * config.train.steps
