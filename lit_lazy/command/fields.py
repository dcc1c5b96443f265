"""`lit-lazy fields`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_options


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "fields", fields, "list an experiment's fields that can be overridden")
    add_options(parser, "experiment")
    parser.add_argument("--all", action="store_true", help="also those of the classes that it does not use")


def fields(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.field_docs import list_fields
    from lit_lazy.config.user_files import load_experiment
    from lit_lazy.support.named_files import find

    print("\n".join(list_fields(load_experiment(find("experiments", options.experiment)), options.all)))
    if not options.all:
        print("\n--all lists the fields of all other classes too.")
    return 0
