"""`lit-lazy ablate compare`"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.options import Commands, add_command, add_options, json_file, name_list, of_kind
from lit_lazy.support.checks import NonEmptyText
from lit_lazy.support.errors import did_you_mean
from lit_lazy.support.named_files import find_grids

if TYPE_CHECKING:
    from lit_lazy.table.records import Table

TABLE = "table.json"


def add_to(commands: Commands) -> None:
    summary = "show two tables side by side: means, differences with intervals, and what else differs"
    parser = add_command(commands, "compare", ablate_compare, summary)
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            metavar=name,
            type=of_kind(NonEmptyText),
            help="NAME-EXPERIMENT in --runs, a folder with a table.json, that file, or COMMIT:FOLDER of a git commit",
        )
    parser.add_argument(
        "--columns",
        metavar="KEY,KEY",
        type=name_list,
        default=[],
        help="metrics to compare, such as loss/excess (default: the primary outcome, otherwise the plotted metrics)",
    )
    parser.add_argument("--out", metavar="FILE.json", type=json_file, help="also write the comparison there, as JSON")
    add_options(parser, "--runs")


def ablate_compare(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.support.disk import check_writable_file, write_text

    places = [find_table(name, options.runs) for name in (options.a, options.b)]
    if options.out is not None:
        check_writable_file("--out", options.out)
    from lit_lazy.grid.packed import read_row_settings
    from lit_lazy.table.comparison import compare_tables, format_comparison

    first, second = (_read_table(place) for place in places)
    settings = [None if isinstance(place, str) else read_row_settings(place.resolve().parent) for place in places]
    names = str(places[0]).removesuffix(f"/{TABLE}"), str(places[1]).removesuffix(f"/{TABLE}")
    found = compare_tables(names, (first, second), options.columns, (settings[0], settings[1]))
    print(format_comparison(found))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    return 0


def find_table(name: str, runs: Path) -> Path | str:
    """The table.json that a name denotes, or COMMIT:PATH of one. Raises a one-line ValueError if there is none."""
    for path in (Path(name), runs / name):
        if os.path.isfile(path):
            return path
        if os.path.isfile(path / TABLE):
            return path / TABLE
        if os.path.isdir(path):
            raise ValueError(f"{name!r}: {str(path)!r} holds no {TABLE}; `lit-lazy ablate table` makes that of a grid")
    if ":" in name:
        return name if name.endswith(".json") else f"{name.rstrip('/')}/{TABLE}"
    known = {path.parent.name: path for path in sorted(runs.glob(f"*/{TABLE}"))}
    same = find_grids(name, known)
    if len(same) == 1:
        return known[same[0]]
    problem = "names several tables" if same else f"no such table{did_you_mean(name, known)}"
    listed = ", ".join(same or known) or "it has none"
    raise ValueError(f"{name!r}: {problem}; give a folder with a {TABLE}, or a grid in {str(runs)!r}: {listed}")


def _read_table(place: Path | str) -> "Table":
    from lit_lazy.support.provenance import read_committed
    from lit_lazy.table.stored import parse_table, read_table

    if isinstance(place, Path):
        return read_table(place)

    return parse_table(read_committed(place), repr(place))
