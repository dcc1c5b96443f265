"""Pages: `lit-lazy report`, and in MLflow `lit-lazy dashboard` and `lit-lazy mirror`."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from lit_lazy.command.grid_helpers import choose_output, open_grid_folder
from lit_lazy.command.options import SHARED, add_grid, command, path
from lit_lazy.support.checks import Bounds, NonEmptyText


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
        from lit_lazy.report.index import INDEX, list_entries, render_index

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
        from lit_lazy.report.page import REPORT, render_report

        file = _choose_file(options, grid.path / REPORT)
        page = render_report(grid, options.ui_url, options.figures)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)
    return file


def _write_table_reports(options: argparse.Namespace) -> Iterator[Path]:
    """Write the reports of stored tables."""
    from lit_lazy.report.page import REPORT
    from lit_lazy.report.publish import write_table_report
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
    from lit_lazy.grid.mirror import GridMirror
    from lit_lazy.support.errors import redact_url
    from lit_lazy.tracking.check_store import check_store
    from lit_lazy.tracking.store import default_uri

    check_store(default_uri(options.runs))
    GridMirror(grid.path).sync(final=True)
    print(f"MLflow at {redact_url(default_uri(options.runs))} shows {grid.path.name}")
    return 0
