"""`lit-lazy report`"""

import argparse

from lit_lazy.command.grid_helpers import choose_output, open_tracker
from lit_lazy.command.options import Commands, add_command, add_grid, add_runs, name_list, path


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "report", report, "rebuild an ablation's report from MLflow")
    add_grid(parser)
    parser.add_argument("--ui-url", metavar="URL", help="address of the MLflow UI, to which the report links its runs")
    parser.add_argument(
        "--figures",
        metavar="A,B",
        type=name_list,
        default=[],
        help="show figures of only these rows (default: the first 30)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path, help="output file (default: NAME-EXPERIMENT/report.html in --runs)"
    )
    add_runs(parser)


def report(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.grid.plan import find_parent
    from lit_lazy.report.page import REPORT, render_report
    from lit_lazy.support.disk import check_writable_file, write_text

    with open_tracker(options) as tracker:
        file = choose_output(options, options.runs / tracker.experiment / REPORT)
        check_writable_file("--out" if options.out else "--runs", file)
        page = render_report(tracker, find_parent(tracker), options.ui_url, options.figures)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)
    print(f"report:     {file}")
    return 0
