"""`lit-lazy ablate verdicts`"""

import argparse
from pathlib import Path

from lit_lazy.command.options import Commands, command, folder, path


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = command(commands, "verdicts", ablate_verdicts, "say what the questions that were run have come to")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=folder,
        default=Path("runs"),
        help="folder whose folders hold the questions' table.json (default: runs)",
    )
    parser.add_argument("--out", metavar="PAGE.md", type=path, help="write them as a page, too")


def ablate_verdicts(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate verdicts`"""
    from lit_lazy.report.verdicts import answered, page, summary
    from lit_lazy.support.disk import writable_file, write_text

    if options.out is not None:
        writable_file("--out", options.out)
    if (options.folder / "table.json").exists():
        raise ValueError(f"{str(options.folder)!r}: is the folder of one table; give the one around it")
    found = answered(options.folder)
    if not found:
        raise ValueError(
            f"{str(options.folder)!r}: holds no question's table.json; `lit-lazy ablate run q_null` makes one"
        )
    if options.out is not None:
        text = page(found, options.out.parent)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, text)
    print(summary(found))
    return 0
