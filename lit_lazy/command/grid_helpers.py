"""Shared by the commands on grids: find a grid, its experiment and tracker, check destinations, print results."""

import argparse
import hashlib
import re
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_lazy.command.options import append_init_from
from lit_lazy.support.disk import check_writable_folder, is_read_only
from lit_lazy.support.error_messages import did_you_mean
from lit_lazy.support.machine import count_cores, require_memory
from lit_lazy.support.names_to_paths import LONGEST_NAME, find, find_grids, list_available

if TYPE_CHECKING:
    from lit_lazy.config import RunConfig
    from lit_lazy.grid.ablation import Ablation
    from lit_lazy.grid.grid_folder import GridFolder
    from lit_lazy.grid.search.definition import Search

BYTES_PER_WORKER = 3 * 2**29
"""1.5 GiB: torch, lightning and mlflow take 0.9 GB before a small model is trained."""
LEAST_BYTES_PER_WORKER = 2**28
"""Lower bound for processes that share the pages of their libraries."""
NAMEABLE = re.compile(r"[A-Za-z0-9_.-]+")
"""A value that can stand in a name."""


class Base(NamedTuple):
    """The experiment under an ablation or a search."""

    file: Path
    name: str
    """Of its results: that of the file, and what the command overrides: `backcopy_tiny-steps=400`."""
    title: str
    """The same with the values that no folder's name can hold."""
    config: "RunConfig"
    overridden: list[str]
    """Dotted paths."""


def make_base(options: argparse.Namespace, definition: "Ablation | Search", overrides: list[str], prefix: str) -> Base:
    """The experiment under an ablation or a search, with the command's overrides and `--init-from`.

    prefix: what precedes its name in that of the results. Results of a version that named overrides by a hash keep
    their name.
    """
    from lit_lazy.config.key import list_changes, settings_key
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.config.serialisation import replace_at
    from lit_lazy.config.user_files import load_experiment

    path = find("experiments", options.base or definition.base)
    experiment = replace_at(load_experiment(path), definition.common)
    base, overridden = apply_overrides(experiment, append_init_from(options, overrides))
    changes = list_changes(experiment, base)

    def join_changes(spell: Callable[[str], str]) -> str:
        return "-".join([path.stem, *(f"{field}={spell(str(value))}" for field, value in changes.items())])

    # In a name a value stands as it is, otherwise six digits of its hash.
    name = join_changes(lambda v: v if NAMEABLE.fullmatch(v) else hashlib.sha256(v.encode()).hexdigest()[:6])
    former = f"{path.stem}-{settings_key(base)}"
    is_former = (options.runs / f"{prefix}-{former}").is_dir() and not (options.runs / f"{prefix}-{name}").exists()
    if is_former or len(name.encode()) > LONGEST_NAME:
        name = former
    title = name if is_former else join_changes(lambda v: v if len(v) <= LONGEST_NAME else f"{v[:LONGEST_NAME]}...")
    return Base(path, name, title, base, overridden)


def check_destinations(options: argparse.Namespace) -> None:
    """Raise a one-line ValueError if results, study or MLflow's runs cannot be stored. Creates nothing."""
    from lit_lazy.grid.study import check_storage
    from lit_lazy.tracking.check_databases import check_store
    from lit_lazy.tracking.store_address import default_uri

    check_writable_folder("--runs", options.runs)
    if options.storage:
        check_storage(options.storage)
    check_store(default_uri(options.runs))


def require_runs(runs: Path) -> None:
    """Raise a one-line ValueError, before anything heavy is imported, if the runs folder does not exist."""
    if not runs.is_dir():
        raise ValueError(f"--runs {str(runs)!r}: does not exist; `lit-lazy train` or `ablate run` creates it")


def require_results(runs: Path, name: str) -> None:
    """Raise a one-line ValueError if a runs folder does not exist, or has no results `name` and no file defines them.

    It imports nothing heavy.
    """
    require_runs(runs)
    known = sorted(path.name for path in runs.iterdir() if path.is_dir() and path.name != "mlartifacts")
    if not (find_grids(name, {*known, *list_available("ablations")}) or Path(name).is_file()):
        listed = ", ".join(one for one in known if not one.startswith(("train-", "diagnose")))
        problem = f"{str(runs)!r} has no such results{did_you_mean(name, known)}"
        raise ValueError(f"{name!r}: {problem}; it has {listed or 'no ablation or search'}")


def check_workers(options: argparse.Namespace) -> None:
    """Raise a one-line ValueError if this machine cannot start --workers processes."""
    if options.workers:
        require_memory({"--workers": options.workers}, options.workers * LEAST_BYTES_PER_WORKER)


def default_workers(threads: int, devices: int = 1) -> int:
    """One worker per `devices` GPUs; without GPUs, as many workers as cores and memory allow."""
    import psutil
    import torch

    memory = psutil.virtual_memory().available // BYTES_PER_WORKER
    return max(1, (torch.cuda.device_count() or min(count_cores() // threads, memory)) // devices)


def open_grid_folder(options: argparse.Namespace) -> "GridFolder":
    """The folder of the grid that NAME and --base mean. Raises a one-line ValueError if --runs has no such grid."""
    name, where = options.ablation, options.runs
    require_results(where, name)
    from lit_lazy.grid.grid_folder import list_grids, read_grid

    known = list_grids(where)
    if name in known and options.base:
        raise ValueError(f"--base {options.base!r}: {name!r} names its experiment already; leave --base out")
    if name not in known:
        name = _name_grid(name, options.base, where, known)
    if name not in known:
        listed = ", ".join(find_grids(name, known) or known) or "none"
        problem = f"{where} holds no such grid{did_you_mean(name, known)}; it has {listed}"
        raise ValueError(f"ablation {name!r}: {problem}; `lit-lazy ablate run` creates it")
    return read_grid(where / name)


def _name_grid(name: str, base: str | None, runs: Path, known: Collection[str]) -> str:
    """The grid of an ablation's name or file on an experiment, by default its own; of another name, its only grid."""
    if base and (asked := f"{name}-{Path(base).stem}") in known:  # without importing the ablation, and torch with it
        return asked
    from lit_lazy.grid.grid_folder import read_grid
    from lit_lazy.grid.question import load_ablation_or_question

    if name in list_available("ablations") or name.endswith(".py"):
        ablation, _ = load_ablation_or_question(find("ablations", name))
        return f"{ablation.name}-{Path(base or ablation.base).stem}"
    same = find_grids(name, known, lambda grid: read_grid(runs / grid).plan.ablation)
    return same[0] if len(same) == 1 and base is None else name


def choose_output(options: argparse.Namespace, default: Path) -> Path:
    """--out, or a path in --runs. Raises a one-line ValueError if --runs is read-only and --out is not given."""
    if options.out is None and any(is_read_only(folder) for folder in (options.runs, default.parent)):
        raise ValueError(f"--runs {str(options.runs)!r}: is read-only; say by --out where to write")
    return options.out or default


def print_results(text: str, where: Path, runs: Path) -> None:
    """Print what was found, and where all results are."""
    from lit_lazy.support.console import get_program_name

    print(f"\n{text}\nresults:    {where}/ (table.*, figures, cells/, workers' logs)")
    print(f"dashboard:  {shlex.join([get_program_name(), 'dashboard', where.name, '--runs', str(runs)])}")
