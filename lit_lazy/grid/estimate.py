"""Cost estimate of a grid, of small models from a few timed steps of each row; nothing is written to disk."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.data.source_interface import Outline
from lit_lazy.grid.ablation import Row
from lit_lazy.grid.work_records import LaunchOptions
from lit_lazy.support.console import format_count, format_duration, plain_console, track_progress
from lit_lazy.support.error_messages import naming
from lit_lazy.training.check_before_run import load_outline, prepare_outline
from lit_lazy.training.cost_estimate import estimate_cost, estimate_seconds
from lit_lazy.training.execution_settings import ONE_DEVICE
from lit_lazy.training.ineffective_settings import check_init_from, list_ineffective

BYTES_PER_FINISHED_CELL = 100_000
"""Upper bound for result.json, MLflow's rows and the config artifact."""


def print_estimate(
    grid: str, chosen: Sequence[tuple[Row, tuple[int, ...]]], configs: Mapping[str, RunConfig], launch: LaunchOptions
) -> None:
    """Print a grid's rows with their estimated time, memory and disk space.

    configs: of the rows, by name. Raises a one-line ValueError that names a row whose training cannot start.
    """
    outlines: dict[str, Outline] = {}
    for row, _ in track_progress(chosen, "checking rows"):
        with naming(f"row {row.name!r}"):
            outlines[row.name] = prepare_outline(configs[row.name], launch.execution)
            check_init_from(configs[row.name], outlines[row.name])
    console = plain_console()
    print_line = partial(console.print, soft_wrap=True)
    total, largest, bases, notes = 0.0, 0, dict[str, None](), dict[str, None]()
    for row, seeds in chosen:
        config, data = configs[row.name], outlines[row.name]
        cost = estimate_cost(config, data, launch.execution)
        seconds, basis = estimate_seconds(config, data, cost, launch.execution)
        bases[basis] = None
        notes |= dict.fromkeys(list_ineffective(config, data.context_length))
        total += seconds * len(seeds)
        largest = max(largest, cost.disk)
        print_line(
            f"{row.name:40} seeds {','.join(map(str, seeds)):12} {format_duration(seconds):>9} each, "
            f"{cost.parameters:>13,} parameters, {cost.device_bytes / 1e9:.1f} GB"
        )
    for note in notes:
        print_line(note)
    cells = sum(len(seeds) for _, seeds in chosen)
    disk = cells * BYTES_PER_FINISHED_CELL + launch.workers * largest
    console.print(
        f"\n{cells} cells of {grid}: about {format_duration(total / launch.workers)} of training with "
        f"{format_count(launch.workers, 'worker')} of {format_count(launch.threads, 'thread')}, from "
        f"{' and '.join(bases)}; memory of each device without libraries; about {disk / 1e6:.0f} MB of disk.\n"
        "Each cell's start, evaluation and diagnosis come on top. Nothing was created."
    )


def estimate_training(config: Mapping[str, Any]) -> float:
    """Seconds of a training on one device, whose config is in canonical form."""
    made = from_dict(RunConfig, config)
    data = load_outline(made.data)
    return estimate_seconds(made, data, estimate_cost(made, data, ONE_DEVICE), ONE_DEVICE)[0]
