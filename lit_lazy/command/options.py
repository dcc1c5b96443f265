"""The options of the command line: how they look, and how a wrong value is reported."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lit_lazy.support.errors import did_you_mean, sanitise
from lit_lazy.support.typecheck import MOST, MOST_THREADS

if TYPE_CHECKING:
    from lit_lazy.attention import Eviction
    from lit_lazy.training.execution import Execution

T = TypeVar("T")
Commands = argparse._SubParsersAction
"""Where a command adds its parser."""
Action = Callable[[argparse.Namespace, list[str]], int]
CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")
"""What argparse says of a wrong command or value, and those that there are; from 3.14 on it guesses itself."""
LEAST_SHARE = 0.0001
"""Of a GPU: Ray rounds to that."""
OVERRIDES = """\
Any field of the experiment can be overridden, for example
  --model.d_model=128 --train.steps=200 --model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2
`lit-lazy fields EXPERIMENT` lists them all with their meaning."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # of help, while it can be known that nobody reads it
        super().exit(status, message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Without this `export -- CHECKPOINT --` has an empty list for its folder: Python takes every `--` away.
        if action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "is missing behind '--'")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        if choice := CHOICE.search(message):
            message += did_you_mean(choice[1], re.findall(r"'(\S+?)'", choice[2]))
        self.exit(2, f"{self.prog}: {sanitise(message)}; see `{self.prog} --help`\n")


def add_command(
    commands: Commands, name: str, action: Action, text: str, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """A command's parser, without options yet. action: gets the parsed ones and the rest, gives an exit status."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=OVERRIDES if takes_overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=action, takes_overrides=takes_overrides, name=parser.prog)
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=thread_count, default=None, help="CPU threads (default: torch's own choice)")


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=folder, default=Path("runs"), help="folder of all results (default: runs)")


def add_base(parser: argparse.ArgumentParser, use: str = "to run on") -> None:
    parser.add_argument(
        "--base",
        metavar="EXPERIMENT",
        type=non_empty,
        help=f"experiment {use}: a name or a .py file (default: the ablation's own)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=positive_int,
        default=None,
        help="processes (default: one per GPU, else as many as cores and memory carry)",
    )
    parser.add_argument("--threads", type=thread_count, default=1, help="CPU threads of each worker (default 1)")


def add_init_from(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--init-from",
        metavar="CHECKPOINT",
        type=path,
        default=None,
        help="start with the weights of a final.ckpt, where name and shape are the same: another variant, data or "
        "schedule from a trained model",
    )


def append_init_from(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides, and that of `--init-from`, which is a field of the experiment."""
    return overrides if options.init_from is None else [*overrides, f"--init_from={options.init_from.resolve()}"]


def add_loggers(parser: argparse.ArgumentParser) -> None:
    """Where to log beside MLflow, as `loggers`."""
    parser.add_argument(
        "--logger",
        metavar="KIND",
        dest="loggers",
        action="append",
        choices=("csv", "tensorboard", "wandb"),
        default=[],
        help="log to csv, tensorboard or wandb too, in the run folder; may be given again (MLflow is always there)",
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    """How a training is executed; `execution_of` reads them."""
    group = parser.add_argument_group("execution", "of one training; results differ by rounding alone")
    group.add_argument(
        "--devices", metavar="N", type=positive_int, default=None, help="GPUs, or CPU processes, that share every batch"
    )
    group.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="whole models on all devices, or parameters and optimiser states spread over them (default ddp)",
    )
    group.add_argument(
        "--micro-batch",
        metavar="N",
        type=positive_int,
        default=None,
        help="sequences in a device's memory at a time; gradients are added up (default: its share of the batch)",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument(
        "--checkpoint-activations", action="store_true", help="recompute each block in the backward pass: less memory"
    )


def make_execution(options: argparse.Namespace) -> "Execution":
    """What the options, or torchrun, say. Raises ValueError where the machine has not the devices to train on."""
    from lit_lazy.training.devices import check_devices
    from lit_lazy.training.distributed.process_group import read_torchrun_size
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
        help="run cells in processes of this machine, or as tasks on a Ray cluster, each with --threads CPUs and "
        "--gpus GPUs, at most --workers at a time (default: as many as fit); ray needs pip install 'lit-lazy[ray]'",
    )
    parser.add_argument(
        "--gpus",
        metavar="SHARE",
        type=gpu_share,
        default=None,
        help="with --launcher ray: GPUs of each cell, 0, a fraction of one such as 0.5, or a whole number "
        "(default: one per device if the cluster has any, else 0)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        default=None,
        help="with --launcher ray: head of a running cluster that this machine is part of, or auto (default: "
        "$RAY_ADDRESS, else a Ray that is started for this command; its ports are open to the network, guarded by "
        "Ray's token)",
    )


def add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        metavar="URL",
        type=non_empty,
        default=os.environ.get("LIT_LAZY_STORAGE") or None,
        help="database of the queue, which all machines share: postgresql://USER:PASSWORD@HOST/DATABASE "
        "(default: $LIT_LAZY_STORAGE, else queue.db in the runs folder)",
    )


def add_eviction(parser: argparse.ArgumentParser) -> None:
    """The options of a cache that evicts; `eviction` makes one of them."""
    parser.add_argument(
        "--window",
        metavar="W",
        type=positive_int,
        default=None,
        help="evict from the cache what is neither among the W newest tokens nor among the first ones (StreamingLLM)",
    )
    parser.add_argument(
        "--first", metavar="K", type=non_negative_int, default=None, help="first tokens that --window keeps (default 4)"
    )


def make_eviction(options: argparse.Namespace) -> "Eviction | None":
    """What `--first` and `--window` say."""
    from lit_lazy.attention import Eviction

    if options.window is None:
        if options.first is not None:
            raise ValueError(f"--first {options.first}: nothing is evicted without --window; give both")
        return None
    return Eviction(4 if options.first is None else options.first, options.window)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE.json", type=json_file, help="write the figures there, and their tables beside it as .md"
    )


def path(text: str) -> Path:
    """An option that is a path, whatever is there."""
    try:
        text.encode()
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name too long, links in a circle
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}; name another") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: is no UTF-8 text without NUL; name another") from None
    return Path(text)


def json_file(text: str) -> Path:
    """An option that is a .json file to be written."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .json")
    return path(text)


def parse_int(text: str, least: int, most: int = MOST) -> int | None:
    """The whole number from `least` to `most` that a text is; None for any other text."""
    digits = text.strip()
    # Python refuses to read thousands of digits.
    return number if digits.isdecimal() and len(digits) < 20 and least <= (number := int(digits)) <= most else None


def positive_int(text: str) -> int:
    """An option that is a whole number of at least 1."""
    if (number := parse_int(text, least=1)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1, and below 2^63")
    return number


def non_negative_int(text: str) -> int:
    """An option that is a whole number of at least 0."""
    if (number := parse_int(text, least=0)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 0 to 2^63 - 1")
    return number


def thread_count(text: str) -> int:
    """An option that is a number of CPU threads."""
    if (number := parse_int(text, least=1, most=MOST_THREADS)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1, at most {MOST_THREADS}")
    return number


def port(text: str) -> int:
    """An option that is the number of a port."""
    if (number := parse_int(text, least=1, most=65535)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to 65535")
    return number


def non_empty(text: str) -> str:
    """An option that is a name."""
    if not text:
        raise argparse.ArgumentTypeError("'': must be a name; leave the option out for the default")
    return text


def gpu_share(text: str) -> float:
    """An option that is a share of GPUs as Ray knows them."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not (share == 0 or LEAST_SHARE <= share < 1 or (share >= 1 and share.is_integer())):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 0, a fraction of one GPU such as 0.5, or a whole number")
    return share


def name_list(text: str) -> list[str]:
    """An option that is a list of names separated by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be names separated by commas, for example lazy,softmax")
    return require_distinct(text, found)


def folder(text: str) -> Path:
    """An option that is a folder, there or to be made."""
    there = path(text)
    if not text or (os.path.lexists(there) and not there.is_dir()):
        is_what = "is a link to nothing, " if there.is_symlink() else "is a file, "
        raise argparse.ArgumentTypeError(f"{text!r}: {is_what if text else ''}must be a folder")
    return there


def int_list(text: str, least: int = 0) -> list[int]:
    """An option that is a list of whole numbers separated by commas."""
    numbers = [number for part in text.split(",") if (number := parse_int(part, least)) is not None]
    if len(numbers) < text.count(",") + 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be whole numbers separated by commas, each from {least} to 2^63 - 1, for example "
            f"{least},{least + 1},{least + 2}"
        )
    return require_distinct(text, numbers)


def require_distinct(text: str, values: list[T]) -> list[T]:
    """The values of an option, none of which may be there twice."""
    seen: set[T] = set()
    for value in values:
        if value in seen:
            raise argparse.ArgumentTypeError(f"{text!r}: has {value} twice; give it once")
        seen.add(value)
    return values


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The options that name a trained model."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path, help="the final.ckpt in the folder of a run")
    parser.add_argument(
        "--import",
        metavar="FILE",
        dest="imports",
        action="append",
        default=[],
        help="a .py file that defines a custom class of the model; may be given again",
    )


def import_classes(options: argparse.Namespace) -> None:
    """Run the files of `--import`."""
    from lit_lazy.config.files import find_python_file, load_module

    for name in options.imports:
        load_module(find_python_file("--import", name))


def print_metrics(metrics: Mapping[str, float]) -> None:
    """One a line."""
    for name, value in sorted(metrics.items()):
        print(f"{name:36} {value:.6g}")
