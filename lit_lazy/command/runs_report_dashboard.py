"""What a runs folder holds: `lit-lazy runs`, pages by `report`, and in MLflow `dashboard` and `mirror`"""

import argparse
import os
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lit_lazy.command.grid_helpers import choose_output, open_grid_folder, require_results, require_runs
from lit_lazy.command.options import SHARED, Commands, add_command, add_grid, add_options, command, path
from lit_lazy.support.checked_fields import Bounds, NonEmptyText

if TYPE_CHECKING:
    from lit_lazy.grid.runs_folder import RunsFolder

NOTHING = "Nothing was removed; --yes removes it."


def add_runs_to(commands: Commands) -> None:
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
    from lit_lazy.support.error_messages import sanitise
    from lit_lazy.support.names_to_paths import find_obstacle

    found = _open(options, writes=True)
    garbage = found.find_garbage(options.models)
    if not garbage:
        print(f"{options.runs}: holds nothing that could be removed")
        return 0
    sizes = {each: measure_bytes(each) for each in garbage}
    print("\n".join(align([(decimal(sizes[each]), str(each), why) for each, why in garbage.items()])))
    for each in [*garbage]:
        if obstacle := find_obstacle(each, options.runs):
            del garbage[each], sizes[each]
            print(f"{sanitise(str(each))} stays: {sanitise(obstacle)}")
    total = decimal(sum(sizes.values()))
    if not options.yes:
        print(f"{total} in all. {NOTHING}")
        return 0
    for each, why in garbage.items():
        found.collect(each, why)
    print(f"{total} were removed.")
    return 0


def _open(options: argparse.Namespace, writes: bool = False) -> "RunsFolder":
    """The runs folder and its MLflow store. Raises a one-line ValueError if one of them cannot be used."""
    require_runs(options.runs)
    from lit_lazy.grid.runs_folder import RunsFolder
    from lit_lazy.support.disk import check_writable_folder
    from lit_lazy.tracking.check_databases import check_store
    from lit_lazy.tracking.store_address import default_uri

    if writes:
        check_writable_folder("--runs", options.runs)
    check_store(uri := default_uri(options.runs))
    return RunsFolder(options.runs, uri)


@command(
    "report",
    "rebuild an ablation's report, or a page with links to all reports",
    partial(add_grid, nargs="?", help=f"{SHARED['ablation NAME']}; without it, the page over all results in --runs"),
    {
        "--from FOLDER ...": (
            "report, figures and all formats of the table.json in this folder, such as docs/results/table2-backcopy, "
            "without its runs; repeatable",
            {"type": path, "dest": "sources"},
        ),
        "--ui-url URL": "address of the MLflow UI, to which the report links its runs",
        "--figures A,B": "show the figures of these rows, or of `all` (default: the baseline and the first other row)",
        "--out FILE": "output file (default: NAME-EXPERIMENT/report.html in --runs; without NAME, index.html in "
        "--runs; with --from, FOLDER/report.html in dist)",
    },
    "--open",
)
def report(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.support.console import open_page

    for file in _write_table_reports(options) if options.sources else [_write_page(options)]:
        print(f"report:     {file}", flush=True)
        if options.open:
            open_page(file.resolve().as_uri())
    return 0


def _write_page(options: argparse.Namespace) -> Path:
    """Write an ablation's report, or the page over all results."""
    from lit_lazy.support.disk import write_text

    if options.ablation is None:
        from lit_lazy.report.index_and_search_pages import INDEX, list_entries, render_index

        of_one = {"--base": options.base, "--ui-url": options.ui_url, "--figures": options.figures}
        if given := [option for option, value in of_one.items() if value]:
            raise ValueError(f"{given[0]} {of_one[given[0]]!r}: is for the report of one ablation; give its NAME too")
        file = _choose_file(options, options.runs / INDEX)
        entries = list_entries(options.runs) if options.runs.is_dir() else []
        if not entries:
            raise ValueError(
                f"--runs {str(options.runs)!r}: holds no results; `lit-lazy ablate run` and `lit-lazy train` make them"
            )
        page = render_index(entries, options.runs, file.parent)
    else:
        grid = open_grid_folder(options)
        from lit_lazy.report.ablation_page import REPORT, render_report

        file = _choose_file(options, grid.path / REPORT)
        page = render_report(grid, options.ui_url, options.figures)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)
    return file


def _write_table_reports(options: argparse.Namespace) -> Iterator[Path]:
    from lit_lazy.report.ablation_page import REPORT, write_table_report
    from lit_lazy.support.disk import check_writable_file
    from lit_lazy.table.build import TABLE

    given = {"NAME": options.ablation, "--base": options.base, "--ui-url": options.ui_url, "--figures": options.figures}
    if named := [option for option, value in given.items() if value]:
        raise ValueError(f"--from, {named[0]}: a stored table has no runs; leave one of the two out")
    if options.out and len(options.sources) > 1:
        raise ValueError(f"--out {str(options.out)!r}: is one file, --from names {len(options.sources)} folders")
    for source in options.sources:
        file = options.out or Path("dist") / source.resolve().name / REPORT
        check_writable_file("--out", file)
        write_table_report(source / TABLE, file)
        yield file


def _choose_file(options: argparse.Namespace, default: Path) -> Path:
    """The file to write. Raises a one-line ValueError if that is not possible."""
    from lit_lazy.support.disk import check_writable_file

    file = choose_output(options, default)
    check_writable_file("--out" if options.out else "--runs", file)
    return file


@command(
    "dashboard",
    "serve the MLflow UI on 127.0.0.1, with links to the runs",
    {
        "experiment NAME": (
            "print only the links of this MLflow experiment, such as table2-backcopy, or of this ablation",
            {"type": NonEmptyText, "nargs": "?"},
        ),
        "--port N": ("port (default 5000)", {"type": Annotated[int, Bounds(ge=1, le=65535)], "default": 5000}),
    },
    "--open",
    "--runs",
)
def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.tracking.serve import serve

    return serve(options.runs, options.port, options.experiment, options.open)


@command("mirror", "send what MLflow lacks of an ablation, as after an outage", add_grid)
def mirror(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.mlflow_mirror import GridMirror
    from lit_lazy.support.secrets import redact_url
    from lit_lazy.table.render import is_saved, save
    from lit_lazy.tracking.check_databases import check_store
    from lit_lazy.tracking.store_address import default_uri

    check_store(default_uri(options.runs))
    if not is_saved(table := grid.build_table(), grid.path):  # as after an interrupt
        save(table, grid.path)
    GridMirror(grid.path).sync(final=True)
    print(f"MLflow at {redact_url(default_uri(options.runs))} shows {grid.path.name}")
    return 0
