"""What a grid will cost: a few steps of every variant are timed in memory, nothing is written."""

import time
from collections import defaultdict
from dataclasses import replace

import torch
from rich.console import Console

from lit_lazy.config.canonical import from_dict
from lit_lazy.config.schema import RunConfig
from lit_lazy.grid.work.job import Launch
from lit_lazy.grid.work.launch import Grid
from lit_lazy.model.loss import token_nll
from lit_lazy.support.console import clock
from lit_lazy.training.cost import UTILISATION, cost_of, peak_of_device
from lit_lazy.training.module import LitLM
from lit_lazy.training.optimiser import optimizer_of
from lit_lazy.training.prepare import loaded

TIMED_STEPS, WARMUP_STEPS = 5, 2
MOST_FLOPS_OF_A_TIMED_STEP = 3e11
"""Ten seconds on one core."""
BYTES_PER_FINISHED_CELL = 100_000
"""result.json, MLflow's rows and the config artifact, rounded up."""


def print_estimate(grid: Grid, launch: Launch, console: Console) -> None:
    """List the cells with what they are expected to take of time, memory and disk."""
    torch.set_num_threads(launch.threads)
    seeds: dict[str, list[int]] = defaultdict(list)
    configs: dict[str, RunConfig] = {}
    for cell in grid.cells:
        seeds[cell.variant].append(cell.seed)
        configs.setdefault(cell.variant, from_dict(RunConfig, cell.config))
    devices, (kind, peak) = launch.execution.devices, peak_of_device()
    total, largest, by = 0.0, 0, f"{TIMED_STEPS} timed steps of each row on one device"
    for variant, config in configs.items():
        cost = cost_of(config, loaded(config.data), launch.execution)
        if cost.flops / config.train.steps < MOST_FLOPS_OF_A_TIMED_STEP:
            seconds = timed(config)
        else:
            seconds, by = 3600 * cost.hours(devices, peak), f"{UTILISATION:.0%} of the peak of {devices} {kind} each"
        total += seconds * len(seeds[variant])
        largest = max(largest, cost.disk)
        numbers = ",".join(map(str, seeds[variant]))
        console.print(
            f"{variant:40} seeds {numbers:12} {clock(seconds):>9} each, {cost.parameters:>13,} parameters, "
            f"{cost.device_bytes / 1e9:.1f} GB",
            highlight=False,
            soft_wrap=True,
        )
    disk = len(grid.cells) * BYTES_PER_FINISHED_CELL + launch.workers * largest
    console.print(
        f"\n{len(grid.cells)} cells of {grid.id}: about {clock(total / launch.workers)} of training with "
        f"{launch.workers} workers of {launch.threads} thread(s), from {by}; memory of each device without libraries; "
        f"about {disk / 1e6:.0f} MB of disk.\nNothing was created.",
        highlight=False,
    )


def timed(config: RunConfig) -> float:
    """Seconds of training, from timed steps."""
    source = config.data.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LitLM.create(replace(config, seed=0), source.vocab_size, source.context_length).model.to(device)
    optimizer = optimizer_of(model, config.train)
    batch = source.train.__getitems__(list(range(config.train.batch_size)))
    tokens, targets = batch["tokens"].to(device), batch["targets"].to(device)
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
