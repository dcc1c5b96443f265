"""`lit-lazy fields` and `lit-lazy new`."""

import argparse
import importlib.util
import keyword
import os
import shlex
import sys
import sysconfig
from pathlib import Path

from lit_lazy.command.options import command
from lit_lazy.support.named_files import require_usable_name


@command(
    "fields",
    "list an experiment's fields that can be overridden",
    "experiment",
    {"--all": "also those of the classes that it does not use"},
)
def fields(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.overrides import list_fields
    from lit_lazy.config.user_files import experiment

    print("\n".join(list_fields(experiment(options.experiment), options.all)))
    if not options.all:
        print("\n--all lists the fields of all other classes too.")
    return 0


COMMANDS = {
    "ablation": ("ablate", "run"),
    "question": ("ablate", "run"),
    "normaliser": ("train",),
    "bias": ("train",),
    "data": ("train",),
    "metric": ("train",),
}
"""The command that runs a file, by its kind. `templates/` has a file of each kind."""


def identifier(text: str) -> str:
    """Option type: a name that Python code can define."""
    if keyword.iskeyword(text) or not text.isidentifier():
        need = "letters, digits and _, no digit first, and no keyword"
        raise ValueError(f"{text!r}: must be a Python identifier: {need}; for example my_variant")
    return text


@command(
    "new",
    "write a commented file, which runs as it is: an ablation, a question, a rule, a bias, data or a metric",
    {
        "kind KIND": (", ".join(COMMANDS), {"choices": [*COMMANDS]}),
        "identifier NAME": ("its name, a Python identifier", {"type": identifier}),
        "--out FILE.py": "file to write (default: NAME.py)",
    },
)
def new(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.support.console import get_program_name
    from lit_lazy.support.disk import check_writable_folder, write_text

    file = options.out or Path(f"{options.identifier}.py")
    option = "--out" if options.out else "NAME"
    named = f"{option} {str(file)!r}"
    if file.suffix != ".py" or not file.stem:
        raise ValueError(f"{named}: must end in .py")
    if os.path.lexists(file):
        raise ValueError(f"{named}: exists already; give another name, or another file by --out")
    require_usable_name(file)
    if (place := _find_installed(file.stem)) is not None:  # files that import that module would be refused
        raise ValueError(f"{named}: {file.stem} is the name of a Python module ({place}); give another")
    check_writable_folder(option, file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, fill_template(options.kind, options.identifier))
    print(f"{file}: written; its comments say what to change")
    print(f"run it:  {shlex.join([get_program_name(), *COMMANDS[options.kind], str(file)])}")
    return 0


def fill_template(kind: str, name: str) -> str:
    """The text of a kind's file, with the name in place of its own and, for its classes, `My` and the name."""
    text = Path(__file__).with_name("templates").joinpath(f"{kind}.py").read_text(encoding="utf-8")
    # No class of this project begins with My, so a file called elastic.py does not define a second Elastic.
    of_class = "My" + "".join(part[:1].upper() + part[1:] for part in name.removeprefix("my_").split("_"))
    return text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", of_class)


def _find_installed(name: str) -> str | None:
    """Where Python finds a module of this name among its own and installed ones; None if there is none."""
    if name in sys.stdlib_module_names:
        return "the standard library"
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    origin = None if found is None else found.origin
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return origin if origin and any(Path(origin).is_relative_to(folder) for folder in installed) else None
