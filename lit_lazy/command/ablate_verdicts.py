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
    parser.add_argument("--out", metavar="PAGE.md", type=path, help="also write them to a Markdown page")
    parser.add_argument(
        "--readme",
        metavar="README.md",
        type=path,
        help="also list the latest verdicts in this file, between <!-- verdicts --> and <!-- end of verdicts -->",
    )


def ablate_verdicts(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.report.verdicts import format_page, format_summary, read_questions, replace_findings
    from lit_lazy.support.disk import check_writable_file, write_text

    if options.out is not None:
        check_writable_file("--out", options.out)
    if (options.folder / "table.json").exists():
        raise ValueError(f"{str(options.folder)!r}: is the folder of one table; give its parent folder")
    found = read_questions(options.folder)
    if not found:
        raise ValueError(
            f"{str(options.folder)!r}: holds no question's table.json; `lit-lazy ablate run q_null` makes one"
        )
    if options.readme is not None:
        try:
            former = options.readme.read_text(encoding="utf-8")
        except OSError as error:
            problem = f"cannot be read ({error.strerror}); name a file with both markers"
            raise ValueError(f"--readme {str(options.readme)!r}: {problem}") from None
        write_text(options.readme, replace_findings(former, found))
    if options.out is not None:
        text = format_page(found, options.out.parent)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, text)
    print(format_summary(found))
    return 0
