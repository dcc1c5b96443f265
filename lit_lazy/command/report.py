"""`lit-lazy report`"""

import argparse

from lit_lazy.command.grids import tracked_grid
from lit_lazy.command.options import Commands, add_base, add_runs, command, names, path


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = command(commands, "report", report, "rebuild an ablation's report from MLflow alone")
    parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(parser, "it was run on")
    parser.add_argument("--ui-url", metavar="URL", help="address of MLflow's pages, to link every run there")
    parser.add_argument(
        "--figures", metavar="A,B", type=names, default=[], help="figures of these rows alone (default: the first 30)"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path, help="write it there (default: NAME-EXPERIMENT/report.html in --runs)"
    )
    add_runs(parser)


def report(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy report`"""
    from lit_lazy.grid.plan import newest_parent
    from lit_lazy.report.page import REPORT, report_html
    from lit_lazy.support.disk import writable_file, write_text

    tracker = tracked_grid(options)
    file = options.out or options.runs / tracker.experiment / REPORT
    writable_file("--out" if options.out else "--runs", file)
    page = report_html(tracker, newest_parent(tracker), options.ui_url, options.figures)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)
    print(f"report:     {file}")
    return 0
