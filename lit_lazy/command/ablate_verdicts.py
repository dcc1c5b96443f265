"""`lit-lazy ablate verdicts`"""

import argparse
from pathlib import Path

from lit_lazy.command.options import Commands, add_command, folder, path


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "verdicts", ablate_verdicts, "print the verdicts of the questions that were run")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=folder,
        default=Path("runs"),
        help="folder that holds the questions' result folders, each with a table.json (default: runs)",
    )
    parser.add_argument(
        "--insert",
        metavar="README.md",
        type=path,
        action="append",
        default=[],
        help="also fill in this page: its tables, between <!-- findings -->, <!-- verdicts --> or <!-- reviewers --> "
        "and <!-- end -->, and its numbers, as in [0.1](FOLDER/table.md 'row: column'); repeatable",
    )


def ablate_verdicts(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.report.findings import collect_answers, fill_page
    from lit_lazy.report.verdicts import format_summary, read_questions
    from lit_lazy.support.disk import check_writable_file, write_text

    for file in options.insert:
        check_writable_file("--insert", file)
    if (options.folder / "table.json").exists():
        raise ValueError(f"{str(options.folder)!r}: is the folder of one table; give its parent folder")
    found = read_questions(options.folder)
    if not found:
        raise ValueError(
            f"{str(options.folder)!r}: holds no question's table.json; `lit-lazy ablate run q_text_2` makes one"
        )
    answers = collect_answers(found, options.folder)
    pages = {file: fill_page(_read(file), answers, options.folder, file.parent) for file in options.insert}
    for file, text in pages.items():
        write_text(file, text)
    print(format_summary(found))
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); name a file with a pair of markers"
        raise ValueError(f"--insert {str(file)!r}: {problem}") from None
