"""What grids have finished: `lit-lazy ablate status`, `table`, `compare`, `pack`, `rates`, `verdicts`, `list`."""

import argparse
import json
import os
from pathlib import Path

from lit_lazy.command.grid_helpers import choose_output, open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid, add_options, of_kind
from lit_lazy.support.checked_fields import NonEmptyText
from lit_lazy.support.disk import check_writable_file, check_writable_folder, write_text
from lit_lazy.support.error_messages import did_you_mean, explain, sanitise
from lit_lazy.support.names_to_paths import find, find_grids, list_available

TABLE = "table.json"
"""As in `lit_lazy.table.build`, whose import takes long."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "status", ablate_status, "show finished, running and failed cells, with reasons")
    add_grid(parser)
    parser = add_command(
        commands, "table", ablate_table, "rebuild an ablation's table from its cells or from a table.json"
    )
    add_grid(parser)
    add_options(
        parser,
        {
            "--from FILE": (
                "recompute the statistics of this table.json, by what the ablation declares now, and replace the "
                "file and the table's other files beside it",
                {"dest": "source"},
            ),
            "--out FOLDER": "write the table and its figures here (default: NAME-EXPERIMENT in --runs)",
        },
    )
    summary = "show two tables side by side: means, differences with intervals, and what else differs"
    parser = add_command(commands, "compare", ablate_compare, summary)
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            metavar=name,
            type=of_kind(NonEmptyText),
            help="NAME-EXPERIMENT in --runs, a folder with a table.json, that file, or COMMIT:FOLDER of a git commit",
        )
    add_options(
        parser,
        {
            "--columns KEY,KEY": "metrics to compare, such as loss/excess (default: the primary outcome, otherwise "
            "the plotted metrics)",
            "--out FILE.json": "also write the comparison there, as JSON",
        },
        "--runs",
    )
    _add_further(commands)


def _add_further(commands: Commands) -> None:
    summary = "pack the finished cells of an ablation into one small file, which `ablate run --results` goes on from"
    parser = add_command(commands, "pack", ablate_pack, summary)
    add_grid(parser)
    add_options(
        parser,
        {
            "--out FILE": "file to write: per cell its key, settings, metrics, times, backend, versions, machine and "
            "commit, as lines of JSON compressed by xz (default: cells.jsonl.xz in the grid's folder)"
        },
    )
    summary = "write the best learning rates of a finished first stage into ablations/rates.json, for second stages"
    parser = add_command(commands, "rates", ablate_rates, summary)
    add_options(parser, {"folders FOLDER": ("results of a first stage, with a table.json", {"nargs": "+"})})
    parser = add_command(commands, "verdicts", ablate_verdicts, "print the verdicts of the questions that were run")
    add_options(
        parser,
        {
            "folder FOLDER": (
                "folder that holds the questions' result folders, each with a table.json (default: runs)",
                {"nargs": "?", "default": Path("runs")},
            ),
            "--insert README.md ...": "also fill in this page: its tables, between <!-- findings -->, <!-- verdicts "
            '--> or <!-- reviewers --> and <!-- end -->, and its numbers, as in [0.1](FOLDER/table.md "row: '
            'column"); repeatable',
        },
    )
    add_command(commands, "list", ablate_list, "list ablations, questions, searches and experiments")


def ablate_status(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.progress import print_status
    from lit_lazy.support.console import plain_console

    print_status(grid, plain_console())
    return 0


def ablate_table(options: argparse.Namespace, _rest: list[str]) -> int:
    """Rebuild the table of a grid, or that of a table.json, which it replaces."""
    if options.source is None:
        grid = open_grid_folder(options)
        from lit_lazy.report.ablation_page import save_table
        from lit_lazy.table.render import DETAILS

        place = choose_output(options, grid.path)
        check_writable_folder("--out" if options.out else "--runs", place)
        place.mkdir(parents=True, exist_ok=True)
        table, file = save_table(grid, place), place / DETAILS
    else:
        if given := [name for name in ("base", "out") if getattr(options, name)]:
            raise ValueError(f"--from, --{given[0]}: a {TABLE} says its experiment and place; leave one of the two out")
        from lit_lazy.grid.question import load_ablation_or_question
        from lit_lazy.report.ablation_page import recompute_table

        name = options.ablation.partition("-")[0]  # of NAME-EXPERIMENT
        declared = find("ablations", name if name in list_available("ablations") else options.ablation)
        table, file = recompute_table(options.source, *load_ablation_or_question(declared)), options.source
    from lit_lazy.support.console import text_width
    from lit_lazy.table.render import render_text

    print(render_text(table, file, text_width()))
    return 0


def ablate_compare(options: argparse.Namespace, _rest: list[str]) -> int:
    places = [find_table(name, options.runs) for name in (options.a, options.b)]
    if options.out is not None:
        check_writable_file("--out", options.out)
    from lit_lazy.grid.reused_results import read_row_settings
    from lit_lazy.support.provenance import read_committed
    from lit_lazy.table.build import parse_table, read_table
    from lit_lazy.table.compare_tables import compare_tables, format_comparison

    first, second = (
        read_table(place) if isinstance(place, Path) else parse_table(read_committed(place), repr(place))
        for place in places
    )
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
    for place in (Path(name), runs / name):
        if os.path.isfile(place):
            return place
        if os.path.isfile(place / TABLE):
            return place / TABLE
        if os.path.isdir(place):
            raise ValueError(f"{name!r}: {str(place)!r} holds no {TABLE}; `lit-lazy ablate table` makes that of a grid")
    if ":" in name:
        return name if name.endswith(".json") else f"{name.rstrip('/')}/{TABLE}"
    known = {file.parent.name: file for file in sorted(runs.glob(f"*/{TABLE}"))}
    with explain(f"{name!r}: a table of this name is damaged", "give a folder", ValueError, LookupError):
        same = find_grids(name, known, lambda grid: json.loads(known[grid].read_text())["ablation"])
    if len(same) == 1:
        return known[same[0]]
    problem = "names several tables" if same else f"no such table{did_you_mean(name, known)}"
    listed = ", ".join(same or known) or "it has none"
    raise ValueError(f"{name!r}: {problem}; give a folder with a {TABLE}, or a grid in {str(runs)!r}: {listed}")


def ablate_pack(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.reused_results import CELLS, pack_grid

    out = choose_output(options, grid.path / CELLS)
    check_writable_file("--out", out)
    packed, asked = pack_grid(grid, out)
    missing = asked - packed
    rest = f"; {missing} {'is' if missing == 1 else 'are'} missing" if missing else ""
    print(f"{out}: {packed} of {asked} cells of {grid.path.name}{rest}")
    return 0


def ablate_rates(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.grid.grid_folder import read_current_table
    from lit_lazy.grid.stages import RATES, save_best_rates

    tables = {place.resolve().name: read_current_table(place) for place in options.folders}
    for name, table in tables.items():
        best = save_best_rates(table, name)
        print(f"{RATES}: {name}: {', '.join(f'{row} {rate:g}{edge}' for row, (rate, edge) in best.items())}")
    return 0


def ablate_verdicts(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.report.question_verdicts import collect_answers, fill_page, format_summary, read_questions

    pages = {}
    for file in options.insert:
        check_writable_file("--insert", file)
        fix = "name a file with a pair of markers"
        with explain(f"--insert {str(file)!r}: cannot be read", fix, OSError):
            pages[file] = file.read_text(encoding="utf-8")
    if (options.folder / TABLE).exists():
        raise ValueError(f"{str(options.folder)!r}: is the folder of one table; give its parent folder")
    found = read_questions(options.folder)
    if not found:
        fix = "`lit-lazy ablate run q_text_2` makes one"
        raise ValueError(f"{str(options.folder)!r}: holds no question's {TABLE}; {fix}")
    answers = collect_answers(found, options.folder)
    filled = {file: fill_page(text, answers, options.folder, file.parent) for file, text in pages.items()}
    for file, text in filled.items():
        write_text(file, text)
    print(format_summary(found))
    return 0


def ablate_list(_options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.user_files import load_module

    listed: dict[str, list[str]] = {"ablations": [], "questions": [], "searches": [], "experiments": []}
    kinds = {"question": "questions", "search": "searches"}
    for room in ("ablations", "experiments"):
        for name in list_available(room):
            module = load_module(find(room, name))
            summary = str(module.__doc__ or "").strip().partition("\n")[0]
            kind = next((kind for attribute, kind in kinds.items() if hasattr(module, attribute)), room)
            listed[kind].append(f"  {name:16} {sanitise(summary)}")
    for kind, lines in listed.items():
        print("\n".join([f"{kind}:", *lines]))
    return 0
