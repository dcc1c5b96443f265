"""`lit-lazy ablate rates`"""

import argparse

from lit_lazy.command.options import Commands, add_command, folder


def add_to(commands: Commands) -> None:
    summary = "write the best learning rates of a finished search into ablations/rates.json, for second stages"
    parser = add_command(commands, "rates", ablate_rates, summary)
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", type=folder, help="results of a first stage, with a table.json"
    )


def ablate_rates(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.grid.stages import choose_best_rates, save_best_rates
    from lit_lazy.table.stored import TABLE, read_table

    tables = {place.resolve().name: read_table(place / TABLE) for place in options.folders}
    for name, table in tables.items():
        rates = choose_best_rates(table)
        print(f"{save_best_rates(table, name)}: {name}: {', '.join(f'{row} {rate:g}' for row, rate in rates.items())}")
    return 0
