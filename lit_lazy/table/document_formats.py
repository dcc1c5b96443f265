"""Documents as lists of plain-text blocks, rendered as plain text, Markdown, LaTeX or HTML."""

import html as html_text
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_lazy.support.error_messages import escape_controls

WIDTH = 120
"""Characters of a line of a written table."""
LONGEST_TEXT = 2000
"""Characters of a text in a block that `shorten_block` shortens."""


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 is the document's title."""

    text: str
    level: int


@dataclass(frozen=True)
class Paragraph:
    text: str
    warning: bool = False


@dataclass(frozen=True)
class BulletList:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Tabular:
    """A table; `header` and each row have the same length. The first `words` columns are text, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int

    def split(self, width: float) -> "list[Tabular]":
        """Split into tables of at most `width` characters (but at least two columns), each with the first column."""
        columns = list(zip(self.header, *self.rows, strict=True))
        sizes = [max(map(len, column)) + 3 for column in columns]
        parts: list[list[int]] = [[0]]
        for i in range(1, len(sizes)):
            if len(parts[-1]) > 1 and sum(sizes[j] for j in (*parts[-1], i)) + 1 > width:
                parts.append([0])
            parts[-1].append(i)
        lines = [[*zip(*(columns[i] for i in part), strict=True)] for part in parts]
        return [
            Tabular(header, tuple(rows), sum(i < self.words for i in part))
            for part, (header, *rows) in zip(parts, lines, strict=True)
        ]


@dataclass(frozen=True)
class Collapsible:
    """Blocks under a title, folded in HTML."""

    title: Heading
    blocks: "tuple[Block, ...]"


Unfolded = Heading | Paragraph | BulletList | Tabular
Block = Unfolded | Collapsible


def shorten_block(block: Block, most: int, whole: str) -> list[Block]:
    """A block with at most `most` rows or items and its longest texts cut, and what says how many are left out.

    whole: names the file with the rest.
    """
    match block:
        case Tabular(header, rows, words) if len(rows) > most:
            rest = f"{len(rows) - most:,} more rows are in {whole}."
            return [Tabular(header, rows[:most], words), Paragraph(rest)]
        case BulletList(items):
            shown = BulletList(tuple(_shorten_text(item, whole) for item in items[:most]))
            left = len(items) - most
            return [shown, Paragraph(f"{left:,} more lines are in {whole}.")] if left > 0 else [shown]
        case Paragraph(text, warning):
            return [Paragraph(_shorten_text(text, whole), warning)]
        case Collapsible(title, blocks):
            return [Collapsible(title, tuple(short for part in blocks for short in shorten_block(part, most, whole)))]
    return [block]


def _shorten_text(text: str, whole: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    kept = text[:LONGEST_TEXT].rpartition(" ")[0]
    return f"{kept} ... ({len(text) - len(kept):,} more characters are in {whole})"


def to_text(blocks: Sequence[Block], width: int) -> str:
    """Text without markup, for a terminal: paragraphs are wrapped at `width` characters, wider tables are split."""
    return "\n\n".join(_format_text(block, width) for block in _unfold(blocks, width)) + "\n"


def to_markdown(blocks: Sequence[Block], width: float = WIDTH) -> str:
    """Markdown that is aligned in a terminal and valid on GitHub; tables wider than `width` characters are split."""
    return "\n\n".join(map(_format_markdown, _unfold(blocks, width))) + "\n"


def to_latex(blocks: Sequence[Block]) -> str:
    """LaTeX paragraphs and `tabular`s for \\input, with \\usepackage{booktabs}; split as in Markdown."""
    return "\n\n".join(map(_format_latex, _unfold(blocks, WIDTH))) + "\n"


def _unfold(blocks: Sequence[Block], width: float) -> Iterator[Unfolded]:
    """The blocks, those of a fold after its title, and tables in parts of at most `width` characters."""
    for block in blocks:
        match block:
            case Collapsible(title, inner):
                yield from _unfold([title, *inner], width)
            case Tabular():
                yield from block.split(width)
            case _:
                yield block


def _squeeze(text: str) -> str:
    """The text on one line, without control characters."""
    return escape_controls(re.sub(r"\s+", " ", text))


def escape_markdown(text: str) -> str:
    """Escape only what would open markup, so that `p<0.001` and snake_case stay readable in the source."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", _squeeze(text))
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    text = re.sub(r"([\\|`\[\]])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    return re.sub(r"\*(?=\S)", r"\\*", text)


def _format_markdown(block: Unfolded) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + escape_markdown(text)
        case Paragraph(text, warning):
            return f"> **Warning:** {escape_markdown(text)}" if warning else escape_markdown(text)
        case BulletList(items):
            return "\n".join(f"- {escape_markdown(item)}" for item in items)
        case Tabular():
            header, *rows = _align(block, escape_markdown)
            sizes = enumerate(map(len, header))
            rule = ["-" * size if i < block.words else "-" * (size - 1) + ":" for i, size in sizes]
            return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _align(grid: Tabular, escape: Callable[[str], str]) -> list[tuple[str, ...]]:
    """The lines of a table, header first, with the cells of each column padded to one width of at least 3."""
    columns = []
    for i, column in enumerate(zip(grid.header, *grid.rows, strict=True)):
        title, *cells = map(escape, column)
        pad = str.ljust if i < grid.words else str.rjust
        if pad == str.rjust and any(cell.endswith("*") for cell in (title, *cells)):
            # Numbers without a trailing star are padded so that digits stay aligned.
            cells = [cell if cell.endswith("*") else f"{cell} " for cell in cells]
        size = max(3, *map(len, (title, *cells)))
        columns.append([pad(cell, size) for cell in (title, *cells)])
    return [*zip(*columns, strict=True)]


def _format_text(block: Unfolded, width: int) -> str:
    match block:
        case Heading(text, _):
            return _squeeze(text)
        case Paragraph(text, warning):
            return textwrap.fill(f"Warning: {_squeeze(text)}" if warning else _squeeze(text), width)
        case BulletList(items):
            fill = partial(textwrap.fill, width=width, initial_indent="- ", subsequent_indent="  ")
            return "\n".join(fill(_squeeze(item)) for item in items)
        case Tabular():
            return "\n".join("  ".join(cells).rstrip() for cells in _align(block, _squeeze))


_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "Δ": r"$\Delta$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "–": "--",
    "…": r"\dots{}", "θ": r"$\theta$", "τ": r"$\tau$", "*": r"$^{*}$",
})  # fmt: skip


def _escape_latex(text: str) -> str:
    escaped = re.sub(r"(?<!\w)-(?=\d)", "$-$", _squeeze(text).translate(_LATEX))
    return "{}" + escaped if escaped.startswith("[") else escaped  # else it is an argument of \\, \item or \midrule


def _format_latex(block: Unfolded) -> str:
    match block:
        case Heading(text, _):
            return rf"\paragraph*{{{_escape_latex(text)}}}"
        case Paragraph(text, warning):
            return rf"\textbf{{Warning: {_escape_latex(text)}}}\par" if warning else _escape_latex(text) + r"\par"
        case BulletList(items):
            body = "\n".join(rf"  \item {_escape_latex(item)}" for item in items)
            return f"\\begin{{itemize}}\n{body}\n\\end{{itemize}}"
        case Tabular(header, rows, words):
            top, *rest = ("  " + " & ".join(map(_escape_latex, cells)) + r" \\" for cells in (header, *rows))
            form = "l" * words + "r" * (len(header) - words)
            lines = [r"  \toprule", top, r"  \midrule", *rest, r"  \bottomrule"]
            return "\n".join([rf"\begin{{tabular}}{{{form}}}", *lines, r"\end{tabular}\par"])


def to_html(blocks: Sequence[Block]) -> str:
    """An ASCII `<section>` with its style."""
    return render_template(Path(__file__).with_name("document.html"), blocks=blocks)


def render_template(file: Path, **values: Any) -> str:
    """ASCII HTML of a Jinja template, in which every value is text unless it is Markup.

    It can use the templates beside it and those of this folder.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes time that other formats can save
    from markupsafe import Markup

    def escape(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(html_text.escape(_squeeze(str(value))))

    folders = FileSystemLoader([file.parent, Path(__file__).parent])
    layout = {"trim_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=folders, autoescape=True, finalize=escape, undefined=StrictUndefined, **layout)
    return environment.get_template(file.name).render(values).encode("ascii", "xmlcharrefreplace").decode()
