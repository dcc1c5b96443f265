"""The command `lit-lazy`.

Commands import heavy packages only when they run, so that help is instant.
"""

import argparse
import atexit
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

from lit_lazy import __version__
from lit_lazy.command import ablate_results, ablate_run
from lit_lazy.command.ablate_questions_search import add_questions_to, add_search_to
from lit_lazy.command.doctor_new_fields import doctor, fields, new
from lit_lazy.command.evaluate_diagnose_lm_eval import diagnose, evaluate_command, lm_eval
from lit_lazy.command.export_import import export, import_model
from lit_lazy.command.options import DECLARED, Commands, Parser, add_command, checkpoint, folder, json_file, path
from lit_lazy.command.runs_report_dashboard import add_runs_to, dashboard, mirror, report
from lit_lazy.command.tokenise_train_generate import generate, tokenise, train
from lit_lazy.config.overrides import check_field_names
from lit_lazy.support.disk import describe_failed_write
from lit_lazy.support.environment_variables import check_variables
from lit_lazy.support.error_messages import UnfinishedError, describe_exception, explain, sanitise
from lit_lazy.support.secrets import hide_passwords
from lit_lazy.support.streams import prepare_streams

SHELLS = ("bash", "zsh", "tcsh")
ROOMS = {"EXPERIMENT": "experiments", "NAME": "ablations"}
"""Metavar -> folder whose files it completes."""


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="lit-lazy", description="Reference laboratory for Lazy Attention.")
    parser.add_argument("--version", action="version", version=f"lit-lazy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    on_models = (tokenise, train, evaluate_command, diagnose, lm_eval, generate, export, import_model)
    for action in (*on_models, fields, new):
        DECLARED[action](commands)
    ablate = commands.add_parser("ablate", help="run ablations, questions and searches, and build their tables")
    ablate_commands = ablate.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add_to in (ablate_run.add_to, add_questions_to, add_search_to, ablate_results.add_to):
        add_to(ablate_commands)
    for action in (report, dashboard, mirror):
        DECLARED[action](commands)
    add_runs_to(commands)
    DECLARED[doctor](commands)
    _add_completion(commands, parser)
    return parser


def _add_completion(commands: Commands, root: argparse.ArgumentParser) -> None:
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

    from lit_lazy.support.names_to_paths import list_available

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


def main(argv: Sequence[str] | None = None, make_parser: Callable[[], Parser] = make_parser) -> int:
    """Run a command and return its exit status. Re-raises exceptions that are not the user's errors.

    0: done; 1: failed cells or unfinished work; 2: invalid input; 130: interrupted.
    """
    prepare_streams()
    atexit.register(_ignore_interrupts)
    hide_passwords()
    # In child processes, a queue.py in the current folder must not shadow the standard library's.
    os.environ["PYTHONSAFEPATH"] = "1"
    words = list(sys.argv[1:] if argv is None else argv)
    status, resumes = 2, False
    try:
        if empty := [word for word in words if word.startswith("--") and word.endswith("=--")]:
            # argparse would parse the value as a list.
            raise ValueError(f"{empty[0]}: has no value; give one as in {empty[0][:-3]}=VALUE")
        options, rest = make_parser().parse_known_args(words)
        resumes = options.resumes
        _check_rest(options, rest)
        _check_surroundings()
        # Batch systems end jobs by SIGTERM: handle it like Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        check_field_names(rest, options.option_names)
        return options.command(options, rest)
    except ValueError as error:
        message = str(error)
    except UnfinishedError as error:
        status, message = 1, str(error)
    except KeyboardInterrupt:
        without = " without --fresh" if "--fresh" in words else ""
        resumption = f"; the same command{without} resumes" if resumes else ""
        print(f"interrupted{resumption}", file=sys.stderr)
        return 130
    except Warning as warning:
        why = describe_exception(warning)
        message = f"PYTHONWARNINGS or -W makes a library's warning an error ({why}); leave it out"
    except Exception as error:
        status = 1
        if failed := describe_failed_write(error):
            message = f"{failed}, then run the same command again; nothing is lost"
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{str(error.filename2 or error.filename)!r}: cannot be used ({error.strerror})"
        else:
            raise
    print(f"lit-lazy: {sanitise(message)}", file=sys.stderr)
    return status


def _ignore_interrupts() -> None:
    """Let a command that is done end with its status: Python takes seconds to remove what torch and MLflow hold."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _check_rest(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise ValueError for arguments that are no options of a command without overrides."""
    if not rest or options.takes_overrides:
        return
    if rest[0].partition("=")[0] == "--runs" and hasattr(options, "folder"):
        raise ValueError(f"unknown argument '--runs'; give the folder alone: `{options.name} FOLDER`")
    is_setting = rest[0].startswith(("--model.", "--data.", "--train."))
    ways = "a model as it was trained; evaluate and diagnose measure a changed one, `train --init-from` trains it"
    why = f"; {options.name} takes {ways}" if is_setting and hasattr(options, "checkpoint") else ""
    raise ValueError(f"unknown argument {rest[0]!r}{why}; see `{options.name} --help`")


def _check_surroundings() -> None:
    """Raise ValueError for a folder or an environment variable that cannot be used, as libraries do on import."""
    with explain("the current folder cannot be used", "change to another", OSError):
        os.getcwd()
    with explain("TMPDIR cannot be used", "set it to a folder that can be written", FileNotFoundError):
        tempfile.gettempdir()
    check_variables()
