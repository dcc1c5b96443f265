"""What a grid will cost: a few steps of every variant are timed in memory, nothing is written."""

import time
from collections import defaultdict
from dataclasses import replace

import torch
from rich.console import Console

from lit_lazy.config.canonical import from_dict
from lit_lazy.config.schema import RunConfig
from lit_lazy.grid.work.launch import Grid
from lit_lazy.grid.work.progress import clock
from lit_lazy.model.loss import token_nll
from lit_lazy.training.module import LitLM
from lit_lazy.training.optimiser import parameter_groups

TIMED_STEPS, WARMUP_STEPS = 5, 2
BYTES_PER_CHECKPOINTED_PARAMETER = 12
"""fp32 weight and AdamW's two moments."""
BYTES_PER_FINISHED_CELL = 100_000
"""result.json, MLflow's rows and the config artifact, rounded up."""


def print_estimate(grid: Grid, workers: int, threads: int, console: Console) -> None:
    """List the cells with the time and disk they are expected to take."""
    torch.set_num_threads(threads)
    seeds: dict[str, list[int]] = defaultdict(list)
    configs: dict[str, RunConfig] = {}
    for cell in grid.cells:
        seeds[cell.variant].append(cell.seed)
        configs.setdefault(cell.variant, from_dict(RunConfig, cell.config))
    total, largest = 0.0, 0
    for variant, config in configs.items():
        seconds, parameters = cost(config)
        total += seconds * len(seeds[variant])
        largest = max(largest, parameters)
        numbers = ",".join(map(str, seeds[variant]))
        console.print(f"{variant:40} seeds {numbers:12} {clock(seconds):>9} each", highlight=False)
    disk = len(grid.cells) * BYTES_PER_FINISHED_CELL + workers * largest * BYTES_PER_CHECKPOINTED_PARAMETER
    console.print(
        f"\n{len(grid.cells)} cells of {grid.id}: about {clock(total / workers)} of training with {workers} workers of "
        f"{threads} thread(s), from {TIMED_STEPS} timed steps of each row; about {disk / 1e6:.0f} MB of disk.\n"
        f"Nothing was created.",
        highlight=False,
    )


def cost(config: RunConfig) -> tuple[float, int]:
    """Seconds of training, from timed steps, and the number of parameters."""
    source = config.data.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LitLM.create(replace(config, seed=0), source.vocab_size, source.context_length).model.to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.train), betas=config.train.betas)
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
    return per_step * config.train.steps, sum(p.numel() for p in model.parameters())
