"""Command-line options shared by several commands, their types, and the errors of wrong values."""

import argparse
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lit_lazy.support.errors import did_you_mean, sanitise
from lit_lazy.support.named_files import Room, find, find_python_file, suggest_file
from lit_lazy.support.typecheck import MOST, MOST_THREADS

if TYPE_CHECKING:
    from lit_lazy.attention import Eviction
    from lit_lazy.training.execution import Execution

T = TypeVar("T")
Commands = argparse._SubParsersAction
"""The subparsers to which a command adds its parser."""
Action = Callable[[argparse.Namespace, list[str]], int]
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

    def error(self, message: str) -> NoReturn:
        if choice := CHOICE.search(message):
            message += did_you_mean(choice[1], re.findall(r"'(\S+?)'", choice[2]))
        self.exit(2, f"{self.prog}: {sanitise(message)}; see `{self.prog} --help`\n")


def add_command(
    commands: Commands, name: str, action: Action, text: str, takes_overrides: bool = False, resumes: bool = False
) -> argparse.ArgumentParser:
    """Add a command's parser, without options.

    action: takes the parsed and the remaining options and returns the exit status. resumes: whether an interrupted
    command continues where it was when it is given again.
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=OVERRIDES if takes_overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = parser._option_string_actions  # filled as options are added
    parser.set_defaults(
        command=action, takes_overrides=takes_overrides, resumes=resumes, name=parser.prog, option_names=names
    )
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    text = "CPU threads (default: torch's choice; 1 is faster for small models beside other work)"
    parser.add_argument("--threads", metavar="N", type=thread_count, help=text)


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", metavar="FOLDER", type=folder, default=Path("runs"), help="folder of all results (default: runs)"
    )


def keep_given_options(parser: argparse.ArgumentParser) -> None:
    """Drop a subcommand's defaults, which would replace the options that stand before the subcommand."""
    for action in parser._actions:
        if action.dest in ("runs", "storage"):
            action.default = argparse.SUPPRESS


def add_experiment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", metavar="EXPERIMENT", type=experiment_name, help="a name in experiments/ or a .py file"
    )


def add_base(parser: argparse.ArgumentParser, use: str = "to run on", kind: Callable[[str], str] | None = None) -> None:
    parser.add_argument(
        "--base",
        metavar="EXPERIMENT",
        type=kind or experiment_name,
        help=f"experiment {use}, a name or a .py file (default: the one that the ablation names)",
    )


def add_grid(parser: argparse.ArgumentParser, without: str = "") -> None:
    """Add the options that name a grid with results. without: what the command does without a name, if it may lack."""
    text = "a name in ablations/, a .py file, or NAME-EXPERIMENT"
    parser.add_argument("ablation", metavar="NAME", nargs="?" if without else None, help=text + without)
    add_base(parser, "it ran on", non_empty)  # whose file may be gone


def add_open(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        metavar="N",
        type=positive_int,
        help="worker processes (default: one per GPU; without GPUs, what cores and memory allow)",
    )
    parser.add_argument(
        "--threads", metavar="N", type=thread_count, default=1, help="CPU threads of each worker (default 1)"
    )


def add_init_from(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--init-from",
        metavar="CHECKPOINT",
        type=checkpoint,
        help="initialise from a final.ckpt every weight whose name and shape match, to continue with another variant, "
        "data or schedule",
    )


def append_init_from(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides, with `--init-from` as an override of the experiment's field."""
    return overrides if options.init_from is None else [*overrides, f"--init_from={options.init_from.resolve()}"]


def add_loggers(parser: argparse.ArgumentParser) -> None:
    """Add `--logger`, parsed to `loggers`."""
    parser.add_argument(
        "--logger",
        metavar="KIND",
        dest="loggers",
        action="append",
        choices=("csv", "tensorboard", "wandb"),
        default=[],
        help="log to csv, tensorboard or wandb as well as MLflow, in the run folder; repeatable",
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a training is executed; `make_execution` reads them."""
    group = parser.add_argument_group("execution", "of one training; results differ only by rounding")
    group.add_argument(
        "--devices",
        metavar="N",
        type=positive_int,
        help="GPUs, or CPU processes, that share every batch (default 1)",
    )
    group.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="ddp replicates the model on every device, fsdp shards parameters and optimiser states (default ddp)",
    )
    group.add_argument(
        "--micro-batch",
        metavar="N",
        type=positive_int,
        help="sequences per forward pass on a device, with gradient accumulation (default: its share of the batch)",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument(
        "--checkpoint-activations", action="store_true", help="recompute each block in the backward pass to save memory"
    )


def make_execution(options: argparse.Namespace) -> "Execution":
    """The execution that the options and torchrun define. Raises ValueError if the machine lacks the devices."""
    from lit_lazy.training.devices import check_devices, read_torchrun_size
    from lit_lazy.training.execution import Execution

    launched = read_torchrun_size()
    devices = options.devices or launched or 1
    if launched is None:
        if not options.dry_run:
            check_devices(devices)
    elif devices != launched:
        raise ValueError(f"--devices {devices}: torchrun started {launched} processes; leave --devices out")
    return Execution(devices, options.strategy, options.micro_batch, options.compile, options.checkpoint_activations)


def add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="local runs cells in processes of this machine (default); ray runs them as tasks on a Ray cluster, each "
        "with --threads CPUs and --gpus GPUs, at most --workers at a time (default: all that fit), and needs "
        "pip install 'lit-lazy[ray]'",
    )
    parser.add_argument(
        "--gpus",
        metavar="SHARE",
        type=gpu_share,
        help="with --launcher ray: GPUs of each cell, 0, a fraction of one such as 0.5, or a whole number "
        "(default: one per device, 0 if the cluster has none)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="with --launcher ray: head of a running cluster that includes this machine, or auto (default: "
        "$RAY_ADDRESS, else this command starts a Ray, whose ports are open to the network, guarded by Ray's token)",
    )


def add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        metavar="URL",
        type=non_empty,
        default=os.environ.get("LIT_LAZY_STORAGE") or None,
        help="database of the queue, shared by all machines: postgresql://USER:PASSWORD@HOST/DATABASE "
        "(default: $LIT_LAZY_STORAGE, else queue.db in the runs folder)",
    )


def add_eviction(parser: argparse.ArgumentParser) -> None:
    """Add the options of cache eviction; `make_eviction` reads them."""
    parser.add_argument(
        "--window",
        metavar="W",
        type=positive_int,
        help="keep only the first and the W newest tokens in the cache (StreamingLLM)",
    )
    parser.add_argument(
        "--first",
        metavar="K",
        type=non_negative_int,
        help="number of first tokens that --window keeps (default 4)",
    )


def make_eviction(options: argparse.Namespace) -> "Eviction | None":
    """The eviction that `--first` and `--window` define."""
    from lit_lazy.attention import Eviction

    if options.window is None:
        if options.first is not None:
            raise ValueError(f"--first {options.first}: nothing is evicted without --window; give both")
        return None
    return Eviction(4 if options.first is None else options.first, options.window)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE.json", type=json_file, help="write the results there, and as tables to a .md next to it"
    )


def experiment_name(text: str) -> str:
    """The name or path of an experiment's file, which exists."""
    return _require_found("experiments", text)


def ablation_name(text: str) -> str:
    """The name or path of an ablation's or a search's file, which exists."""
    return _require_found("ablations", text)


def _require_found(room: Room, text: str) -> str:
    try:
        find(room, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def path(text: str) -> Path:
    """Option type: a path, existing or not."""
    try:
        text.encode()
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, circular links
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}; name another") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: is no UTF-8 text without NUL; name another") from None
    return Path(text)


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
    raise argparse.ArgumentTypeError(f"checkpoint {text!r}: {problem}; {fix}")


def python_file(text: str) -> Path:
    """Option type: a .py file, which exists."""
    try:
        return find_python_file("file", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_file(text: str) -> Path:
    """Option type: a .json file to write."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .json")
    return path(text)


def parse_int(text: str, least: int, most: int = MOST) -> int | None:
    """The whole number from `least` to `most` in a text; None for any other text."""
    digits = text.strip()
    # Python refuses to parse thousands of digits.
    return number if digits.isdecimal() and len(digits) < 20 and least <= (number := int(digits)) <= most else None


def _describe_most(most: int) -> str:
    return "2^63 - 1" if most == MOST else str(most)


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Option type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if (number := parse_int(text, least, most)) is None:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {least} to {_describe_most(most)}")
        return number

    return parse


positive_int = whole_number(1)
non_negative_int = whole_number(0)
thread_count = whole_number(1, MOST_THREADS)


def non_empty(text: str) -> str:
    """Option type: a name."""
    if not text:
        raise argparse.ArgumentTypeError("'': must be a name; leave the option out for the default")
    return text


def positive_float(text: str) -> float:
    """Option type: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return number


def gpu_share(text: str) -> float:
    """Option type: the GPUs of a Ray task."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not (share == 0 or LEAST_SHARE <= share < 1 or (share >= 1 and share.is_integer())):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 0, a fraction of one GPU such as 0.5, or a whole number")
    return share


def name_list(text: str) -> list[str]:
    """Option type: names separated by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be names separated by commas, for example lazy,softmax")
    return require_distinct(text, found)


def folder(text: str) -> Path:
    """Option type: a folder, existing or to be created."""
    found = path(text)
    if not text or (os.path.lexists(found) and not found.is_dir()):
        kind = "is a broken link, " if found.is_symlink() else "is a file, "
        raise argparse.ArgumentTypeError(f"{text!r}: {kind if text else ''}must be a folder")
    return found


def int_list(text: str, least: int = 0, most: int = MOST) -> list[int]:
    """Option type: whole numbers from `least` to `most`, separated by commas."""
    numbers = [number for part in text.split(",") if (number := parse_int(part, least, most)) is not None]
    if len(numbers) < text.count(",") + 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be whole numbers separated by commas, each from {least} to {_describe_most(most)}, for "
            f"example {least},{least + 1},{least + 2}"
        )
    return require_distinct(text, numbers)


def duration(text: str) -> float:
    """Option type: the seconds of `90m` or `1.5h`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([mh])", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: must be minutes or hours above 0, such as 90m or 1.5h")
    return float(found[1]) * {"m": 60, "h": 3600}[found[2]]


def require_distinct(text: str, values: list[T]) -> list[T]:
    """The values of an option. Raises ArgumentTypeError if one is repeated."""
    seen: set[T] = set()
    for value in values:
        if value in seen:
            raise argparse.ArgumentTypeError(f"{text!r}: has {value} twice; give it once")
        seen.add(value)
    return values


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a trained model."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=checkpoint, help="the final.ckpt in a run folder")
    parser.add_argument(
        "--import",
        metavar="FILE",
        dest="imports",
        type=python_file,
        action="append",
        default=[],
        help="a .py file that defines a custom class of the model; repeatable",
    )


def import_classes(options: argparse.Namespace) -> None:
    """Import the files of `--import`."""
    from lit_lazy.config.user_files import load_module

    for file in options.imports:
        load_module(file)


def prepare_process(options: argparse.Namespace) -> None:
    """Apply `--import` and `--threads`."""
    import_classes(options)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print one metric per line."""
    for name, value in sorted(metrics.items()):
        print(f"{name:36} {value:.6g}")
