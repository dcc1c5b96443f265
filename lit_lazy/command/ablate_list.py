"""`lit-lazy ablate list`"""

import argparse

from lit_lazy.command.options import Commands, add_command


def add_to(commands: Commands) -> None:
    add_command(commands, "list", ablate_list, "list ablations, questions, searches and experiments")


def ablate_list(_options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.user_files import load_module
    from lit_lazy.support.errors import sanitise
    from lit_lazy.support.named_files import find, list_available

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
