"""Command-line options shared by several commands, their types, and the errors of wrong values."""

import argparse
import os
import re
import sys
import typing
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_lazy.support.checked_fields import (
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Threads,
    describe_kind,
    parse,
)
from lit_lazy.support.environment_variables import read_torchrun_size
from lit_lazy.support.error_messages import did_you_mean, naming, sanitise
from lit_lazy.support.names_to_paths import find, find_python_file, suggest_file

if TYPE_CHECKING:
    from lit_lazy.attention import Eviction
    from lit_lazy.training.execution_settings import Execution

Commands = argparse._SubParsersAction
"""The subparsers to which a command adds its parser."""
Action = Callable[[argparse.Namespace, list[str]], int]
AddsOptions = Callable[[argparse.ArgumentParser], None]
DECLARED: dict[Action, Callable[[Commands], argparse.ArgumentParser]] = {}
"""What adds the command of an action, by the action; `main` says in which order."""
CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")
"""argparse's message for an unknown command or value, with the valid ones; Python 3.14 adds its own suggestion."""
LEAST_SHARE = 0.0001
"""Smallest fraction of a GPU; Ray rounds to it."""
OVERRIDES = """\
Any field of the experiment can be overridden, for example
  --model.d_model=128 --train.steps=200 --model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2
`lit-lazy fields EXPERIMENT` describes every field."""
CHANGES = """\
Fields of the trained model and of its data can be changed where its weights still fit, for example
  `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=0`
`lit-lazy fields EXPERIMENT` describes every field."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # a closed pipe must raise here, where `main` handles it
        super().exit(status, message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops every `--`: without this check, OUT of `export -- CHECKPOINT --` would be an empty list.
        if action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "is missing behind '--'")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of an option's type, whose ValueError says what is wrong; argparse would drop that."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def error(self, message: str) -> NoReturn:
        if choice := CHOICE.search(message):
            message += did_you_mean(choice[1], re.findall(r"'(\S+?)'", choice[2]))
        self.exit(2, f"{self.prog}: {sanitise(message)}; see `{self.prog} --help`\n")


def add_command(
    commands: Commands,
    name: str,
    action: Action,
    text: str,
    *given: "str | Declared | AddsOptions",
    takes_overrides: bool = False,
    resumes: bool = False,
    epilog: str = OVERRIDES,
) -> argparse.ArgumentParser:
    """Add a command's parser, with arguments as `add_options` takes them.

    action: takes the parsed and the remaining options and returns the exit status. resumes: whether an interrupted
    command continues where it was when it is given again. epilog: what is said of overrides.
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog if takes_overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = parser._option_string_actions  # filled as options are added
    parser.set_defaults(
        command=action, takes_overrides=takes_overrides, resumes=resumes, name=parser.prog, option_names=names
    )
    for part in given:
        if callable(part):
            part(parser)
        else:
            add_options(parser, part)
    return parser


def command(
    name: str, text: str, *given: "str | Declared | AddsOptions", **settings: Any
) -> Callable[[Action], Action]:
    """Above an action, declares its command as `add_command` takes it; `DECLARED` adds it to a parser."""

    def declare(action: Action) -> Action:
        DECLARED[action] = lambda commands: add_command(commands, name, action, text, *given, **settings)
        return action

    return declare


def of_kind(kind: Any) -> Callable[[str], Any]:
    """Option type of an annotation, which says what is wrong as it does for a field; of a list, separated by commas."""
    is_list = typing.get_origin(kind) is list
    return partial(_read_list, kind=typing.get_args(kind)[0]) if is_list else partial(_parse_option, kind=kind)


def _parse_option(text: str, kind: Any) -> Any:
    with naming(repr(text)):
        return parse(text, kind)


def experiment_name(text: str) -> str:
    """The name or path of an experiment's file, which exists."""
    find("experiments", text)
    return text


def ablation_name(text: str) -> str:
    """The name or path of an ablation's or a search's file, which exists."""
    find("ablations", text)
    return text


def path(text: str) -> Path:
    """Option type: a path, existing or not."""
    try:
        text.encode()
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, circular links
        raise ValueError(f"{text!r}: {error.strerror}; name another") from None
    except ValueError:
        raise ValueError(f"{text!r}: is no UTF-8 text without NUL; name another") from None
    return Path(text)


def folder(text: str) -> Path:
    """Option type: a folder, existing or to be created."""
    found = path(text)
    if not text or (os.path.lexists(found) and not found.is_dir()):
        kind = "is a broken link, " if found.is_symlink() else "is a file, "
        raise ValueError(f"{text!r}: {kind if text else ''}must be a folder")
    return found


def json_file(text: str) -> Path:
    """Option type: a .json file to write."""
    if not text.endswith(".json"):
        raise ValueError(f"{text!r}: must end in .json")
    return path(text)


def checkpoint(text: str) -> Path:
    """The path of a checkpoint, which exists. A file of another kind is refused here, before torch is imported."""
    found = path(text)
    if not os.path.exists(found):
        problem = "cannot be read (No such file or directory)"
    elif found.is_dir():
        problem = "cannot be read (Is a directory)"
    elif found.is_file() and os.access(found, os.R_OK) and not zipfile.is_zipfile(found):
        problem = "is no checkpoint, or damaged (no zip archive, as torch writes)"
    else:
        return found
    fix = suggest_file(text, "give a final.ckpt, which `lit-lazy train` writes to its run folder")
    raise ValueError(f"checkpoint {text!r}: {problem}; {fix}")


def _read_list(text: str, kind: Any) -> list[Any]:
    """Distinct values."""
    try:
        found = [parse(part.strip(), kind) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: must be values separated by commas, each {describe_kind(kind)}") from None
    if twice := [value for value, count in Counter(found).items() if count > 1]:
        raise ValueError(f"{text!r}: has {twice[0]} twice; give it once")
    return found


def gpu_share(text: str) -> float:
    """Option type: the GPUs of a Ray task."""
    share = _parse_option(text, NonNegativeFloat)
    if 0 < share < LEAST_SHARE or (share > 1 and not share.is_integer()):
        raise ValueError(f"{text!r}: must be 0, a fraction of one GPU such as 0.5, or a whole number")
    return share


def duration(text: str) -> float:
    """Option type: the seconds of `90m` or `1.5h`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([mh])", text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r}: must be minutes or hours above 0, such as 90m or 1.5h")
    return float(found[1]) * {"m": 60, "h": 3600}[found[2]]


KINDS: dict[str, Any] = {
    **dict.fromkeys(("A,B", "KEY,KEY", "piqa,boolq"), list[NonEmptyText]),
    "0,1": list[NonNegativeInt],
    **dict.fromkeys(("N", "W"), PositiveInt),
    "K": NonNegativeInt,
    "T": NonNegativeFloat,
    "NATS": PositiveFloat,
    "LIST": NonEmptyText,
    **dict.fromkeys(("FILE", "FILE.py", "README.md"), path),
    "FOLDER": folder,
    "FILE.json": json_file,
    "CHECKPOINT": checkpoint,
    "EXPERIMENT": experiment_name,
    "SHARE": gpu_share,
    "90m": duration,
}
"""Type of an option's value, or its annotation, by what its usage calls the value; text of what is not here."""
SHARED = {
    "experiment EXPERIMENT": "a name in experiments/ or a .py file",
    "ablation NAME": "a name in ablations/, a .py file, or NAME-EXPERIMENT",
    "checkpoint CHECKPOINT": "the final.ckpt in a run folder",
    "--base EXPERIMENT": "experiment to run on, a name or a .py file (default: the one that the ablation names)",
    "--import FILE ...": "a .py file that defines a custom class of the model; repeatable",
    "--init-from CHECKPOINT": "initialise from a final.ckpt every weight whose name and shape match, in parts of equal "
    "classes, to continue with another variant, data or schedule",
    "--threads N": "CPU threads (default: torch's choice; 1 is faster for small models beside other work)",
    "--runs FOLDER": "folder of all results (default: runs)",
    "--out FILE.json": "write the results there, and as tables to a .md next to it",
    "--open": "open the page in the browser",
    "--workers N": "worker processes (default: one per GPU; without GPUs, what cores and memory allow)",
    "--storage URL": "database of Optuna's study, shared by all machines: postgresql://USER:PASSWORD@HOST/DATABASE "
    "(default: $LIT_LAZY_STORAGE, else a file in the grid's folder)",
    "--logger KIND ...": "log to csv, tensorboard or wandb as well as MLflow, in the run folder; repeatable",
    "--launcher": "local runs cells in processes of this machine (default); ray runs them as tasks on a Ray cluster, "
    "each with --threads CPUs and --gpus GPUs, at most --workers at a time (default: all that fit), and needs pip "
    "install 'lit-lazy[ray]'",
    "--gpus SHARE": "with --launcher ray: GPUs of each cell, 0, a fraction of one such as 0.5, or a whole number "
    "(default: one per device, 0 if the cluster has none)",
    "--ray-address HOST:PORT": "with --launcher ray: head of a running cluster that includes this machine, or auto "
    "(default: $RAY_ADDRESS, else this command starts a Ray, whose ports are open to the network, guarded by Ray's "
    "token)",
    "--devices N": "GPUs, or CPU processes, that share every batch (default 1)",
    "--strategy": "ddp replicates the model on every device, fsdp shards parameters and optimiser states (default ddp)",
    "--micro-batch N": "sequences per forward pass on a device, with gradient accumulation (default: its share of the "
    "batch)",
    "--compile": "torch.compile the model",
    "--checkpoint-activations": "recompute each block in the backward pass to save memory",
    "--window W": "keep only the first and the W newest tokens in the cache (StreamingLLM)",
    "--first K": "number of first tokens that --window keeps (default 4)",
}
"""Usage and help of arguments of several commands."""
FURTHER: dict[str, dict[str, Any]] = {
    "--import": {"type": partial(find_python_file, "file"), "dest": "imports"},
    "--threads": {"type": Threads},
    "--runs": {"default": Path("runs")},
    "--storage": {"type": NonEmptyText, "default": os.environ.get("LIT_LAZY_STORAGE") or None},
    "--logger": {"choices": ("csv", "tensorboard", "wandb"), "dest": "loggers"},
    "--launcher": {"action": "store", "choices": ("local", "ray"), "default": "local"},
    "--strategy": {"action": "store", "choices": ("ddp", "fsdp"), "default": "ddp"},
}
"""What else `add_argument` is told of them."""


Declared = Mapping[str, str | tuple[str, Mapping[str, Any]]]
"""Help of arguments by usage, or it and what else `add_argument` is told."""


def add_options(parser: argparse._ActionsContainer, *given: str | Declared, **changes: Any) -> None:
    """Add arguments: shared ones by name, others as declared.

    A usage is `--fresh` of a switch, `--rows A,B` or, of an argument, `ablation NAME`; the value has a type of KINDS.
    One that ends in ` ...` is repeatable; it and lists are empty by default. changes: what differs in this command.
    """
    for part in given:
        if isinstance(part, str):
            (usage,) = (usage for usage in SHARED if usage.split()[0] == part)
            part = {usage: SHARED[usage]}
        for usage, about in part.items():
            name, *value = usage.split()
            text, further = (about, FURTHER.get(name, {})) if isinstance(about, str) else about
            told: dict[str, Any] = {"help": text, **further, **changes}
            if value:
                kind = told.get("type", KINDS.get(value[0]))
                told |= {"metavar": value[0], "type": of_kind(kind) if typing.get_origin(kind) else kind}
                if value[1:] or typing.get_origin(kind) is list:
                    told.setdefault("default", [])
            told.setdefault("action", "append" if value[1:] else "store" if value else "store_true")
            parser.add_argument(name, **told)


def add_grid(parser: argparse.ArgumentParser, **changes: Any) -> None:
    """Add the options that name a grid with results. changes: those of its name."""
    add_options(parser, "ablation", **changes)
    help = "experiment it ran on, a name or a .py file (default: the one that the ablation names)"
    add_options(parser, "--base", type=NonEmptyText, help=help)  # whose file may be gone
    add_options(parser, "--runs")


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a training is executed; `make_execution` reads them."""
    group = parser.add_argument_group("execution", "of one training; results differ only by rounding")
    add_options(group, "--devices", "--strategy", "--micro-batch", "--compile", "--checkpoint-activations")


def append_init_from(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides, with `--init-from` as an override of the experiment's field."""
    return overrides if options.init_from is None else [*overrides, f"--init_from={options.init_from.resolve()}"]


def make_execution(options: argparse.Namespace) -> "Execution":
    """The execution that the options and torchrun define. Raises ValueError if the machine lacks the devices."""
    from lit_lazy.training.execution_settings import Execution, check_devices

    launched = read_torchrun_size()
    devices = options.devices or launched or 1
    if launched is None:
        if not options.dry_run:
            check_devices(devices)
    elif devices != launched:
        raise ValueError(f"--devices {devices}: torchrun started {launched} processes; leave --devices out")
    return Execution(devices, options.strategy, options.micro_batch, options.compile, options.checkpoint_activations)


def make_eviction(options: argparse.Namespace) -> "Eviction | None":
    """The eviction that `--first` and `--window` define."""
    from lit_lazy.attention import Eviction

    if options.window is None:
        if options.first is not None:
            raise ValueError(f"--first {options.first}: nothing is evicted without --window; give both")
        return None
    return Eviction(4 if options.first is None else options.first, options.window)


def prepare_process(options: argparse.Namespace) -> None:
    """Apply `--import`, and `--threads` where a command has it."""
    from lit_lazy.config.user_files import load_module

    for file in options.imports:
        load_module(file)
    if threads := vars(options).get("threads"):
        import torch

        torch.set_num_threads(threads)


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print one metric per line."""
    for name, value in sorted(metrics.items()):
        print(f"{name:36} {value:.6g}")
