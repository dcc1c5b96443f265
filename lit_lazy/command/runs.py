"""`lit-lazy runs`: what a runs folder holds, and the removal of parts of it"""

import argparse
import os
from datetime import datetime
from typing import TYPE_CHECKING

from lit_lazy.command.grid_helpers import require_results, require_runs
from lit_lazy.command.options import Commands, add_command, add_options
from lit_lazy.support.checks import NonEmptyText

if TYPE_CHECKING:
    from lit_lazy.grid.runs_folder import RunsFolder

NOTHING = "Nothing was removed; --yes removes it."


def add_to(commands: Commands) -> None:
    summary = "list what a runs folder holds (without COMMAND), or remove results from it"
    parser = add_command(commands, "runs", list_runs, summary, "--runs")
    below = parser.add_subparsers(title="commands", metavar="COMMAND")
    name = {"results NAME": ("a name that `lit-lazy runs` lists", {"type": NonEmptyText})}
    models = {
        "--models": "also remove the models, final.ckpt, of finished cells, which --keep-checkpoint kept; those "
        "of single trainings and those that an unfinished cell starts from stay"
    }
    yes = {"--yes": "remove it (default: only print what would be removed)"}
    summary = "list ablations, searches, trainings and diagnoses, with cells, state and size"
    add_command(below, "list", list_runs, summary)
    summary = "remove an ablation, a search, a diagnosis or the trainings of an experiment"
    add_command(below, "rm", remove_results, summary, name, yes)
    summary = "remove what no table, report or run that resumes needs"
    add_command(below, "gc", collect_garbage, summary, models, yes)
    for part in below.choices.values():
        # Its default would replace the option that stands before the subcommand.
        add_options(part, "--runs", default=argparse.SUPPRESS)


def list_runs(options: argparse.Namespace, _rest: list[str]) -> int:
    from rich.filesize import decimal

    from lit_lazy.support.console import align

    lines, total = [("name", "kind", "cells", "state", "size", "last change")], 0
    found = _open(options)
    for entry in found.entries.values():
        state = "running" if found.find_users(entry) else entry.state
        done, n = entry.counts["complete"], entry.counts.total()
        cells = "" if entry.kind in ("diagnosis", "other") else f"{done} of {n}"
        changed = "" if entry.changed is None else f"{datetime.fromtimestamp(entry.changed):%Y-%m-%d %H:%M}"
        name = entry.name if entry.grid is None else entry.grid.title
        lines.append((name, entry.kind, cells, state, decimal(entry.size), changed))
        total += entry.size
    print("\n".join(align(lines)))
    print(f"\n{len(lines) - 1} in {options.runs}, {decimal(total)}")
    return 0


def remove_results(options: argparse.Namespace, _rest: list[str]) -> int:
    from rich.filesize import decimal

    if not (os.environ.get("MLFLOW_TRACKING_URI") or (options.runs / "mlflow.db").exists()):  # which may know more
        require_results(options.runs, options.results)
    found = _open(options, writes=True)
    entry = found.get(options.results)
    found.require_removable(entry)
    parts = [f"{entry.folder}: {decimal(entry.size)}, MLflow's artifacts included"]
    if entry.tracked:
        whose = "" if found.has_store else ", only the runs of this folder"
        parts.append(f"its MLflow experiment{whose}, which becomes a deleted one; `mlflow gc` erases it")
    if diagnoses := found.find_diagnoses(entry):
        parts.append(f"its runs in MLflow: {len(diagnoses)}, which become deleted ones; `mlflow gc` erases them")
    print("\n".join(parts))
    if not options.yes:
        print(NOTHING)
        return 0
    found.remove(entry)
    print(f"{entry.name} was removed.")
    return 0


def collect_garbage(options: argparse.Namespace, _rest: list[str]) -> int:
    from rich.filesize import decimal

    from lit_lazy.support.console import align
    from lit_lazy.support.disk import measure_bytes
    from lit_lazy.support.errors import sanitise
    from lit_lazy.support.named_files import find_obstacle

    found = _open(options, writes=True)
    garbage = found.find_garbage(options.models)
    if not garbage:
        print(f"{options.runs}: holds nothing that could be removed")
        return 0
    sizes = {path: measure_bytes(path) for path in garbage}
    print("\n".join(align([(decimal(sizes[path]), str(path), why) for path, why in garbage.items()])))
    for path in [*garbage]:
        if obstacle := find_obstacle(path, options.runs):
            del garbage[path], sizes[path]
            print(f"{sanitise(str(path))} stays: {sanitise(obstacle)}")
    total = decimal(sum(sizes.values()))
    if not options.yes:
        print(f"{total} in all. {NOTHING}")
        return 0
    for path, why in garbage.items():
        found.collect(path, why)
    print(f"{total} were removed.")
    return 0


def _open(options: argparse.Namespace, writes: bool = False) -> "RunsFolder":
    """The runs folder and its MLflow store. Raises a one-line ValueError if one of them cannot be used."""
    require_runs(options.runs)
    from lit_lazy.grid.runs_folder import RunsFolder
    from lit_lazy.support.disk import check_writable_folder
    from lit_lazy.tracking.check_store import check_store
    from lit_lazy.tracking.store import default_uri

    if writes:
        check_writable_folder("--runs", options.runs)
    check_store(uri := default_uri(options.runs))
    return RunsFolder(options.runs, uri)
