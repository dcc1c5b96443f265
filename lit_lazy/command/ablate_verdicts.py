"""`lit-lazy ablate verdicts`"""

import argparse
import os
from pathlib import Path
from urllib.parse import quote

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
        "--readme", metavar="README.md", type=path, help="also write them in short between the markers of this file"
    )


def ablate_verdicts(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.report.verdicts import format_page, format_summary, read_questions, update_readme
    from lit_lazy.support.disk import check_writable_file, write_text

    for option, file in (("--out", options.out), ("--readme", options.readme)):
        if file is not None:
            check_writable_file(option, file)
    if options.readme is not None and options.out is None:
        raise ValueError(f"--readme {str(options.readme)!r}: needs --out, the page that it links to")
    if options.readme is not None and not options.readme.exists():
        raise ValueError(f"--readme {str(options.readme)!r}: does not exist; name a file with a place for the verdicts")
    if (options.folder / "table.json").exists():
        raise ValueError(f"{str(options.folder)!r}: is the folder of one table; give its parent folder")
    found = read_questions(options.folder)
    if not found:
        raise ValueError(
            f"{str(options.folder)!r}: holds no question's table.json; `lit-lazy ablate run q_null` makes one"
        )
    texts = {}
    if options.out is not None:
        texts[options.out] = format_page(found, options.out.parent)
        if options.readme is not None:
            link = quote(os.path.relpath(options.out, options.readme.parent))
            texts[options.readme] = update_readme(options.readme.read_text(), found, link)
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    print(format_summary(found))
    return 0
