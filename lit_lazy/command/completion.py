"""`lit-lazy completion`"""

import argparse
from collections.abc import Iterator

from lit_lazy.command.options import Commands, add_command, checkpoint, folder, json_file, path

SHELLS = ("bash", "zsh", "tcsh")
ROOMS = {"EXPERIMENT": "experiments", "NAME": "ablations"}
"""Metavar -> folder whose files it completes."""


def add_to(commands: Commands, root: argparse.ArgumentParser) -> None:
    """root: the parser of all commands."""
    parser = add_command(commands, "completion", completion, "print a shell's completion script")
    parser.epilog = (
        "Write it to the folder from which the shell loads completions, for example\n"
        "  lit-lazy completion bash > ~/.local/share/bash-completion/completions/lit-lazy"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")
    parser.set_defaults(root=root)


def completion(options: argparse.Namespace, _rest: list[str]) -> int:
    import shtab

    from lit_lazy.support.named_files import list_available

    for action in _iter_actions(options.root):
        if action.type in (path, folder, json_file, checkpoint):
            action.complete = shtab.DIRECTORY if action.type is folder else shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in ("experiment", "ablation", "base") and action.metavar in ROOMS:
            action.choices = list_available(ROOMS[action.metavar])  # type: ignore[index]
    print(shtab.complete(options.root, options.shell))
    return 0


def _iter_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and arguments of a parser and of its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _iter_actions(below)
        else:
            yield action
