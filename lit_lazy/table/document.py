"""Documents as lists of plain-text blocks, rendered as plain text, Markdown, LaTeX or HTML."""

import html as html_text
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lit_lazy.support.errors import escape_controls

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


def to_text(blocks: Sequence[Block], width: int = 120) -> str:
    """Text without markup, for a terminal: paragraphs are wrapped at `width` characters, wider tables are split."""
    return "\n\n".join(_format_text(block, width) for block in _unfold(blocks, width)) + "\n"


def to_markdown(blocks: Sequence[Block], width: float = 120) -> str:
    """Markdown that is aligned in a terminal and valid on GitHub; tables wider than `width` characters are split."""
    return "\n\n".join(map(_format_markdown, _unfold(blocks, width))) + "\n"


def to_latex(blocks: Sequence[Block], width: int = 120) -> str:
    """LaTeX paragraphs and `tabular`s for \\input, with \\usepackage{booktabs}; split as in Markdown."""
    return "\n\n".join(map(_format_latex, _unfold(blocks, width))) + "\n"


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


def to_html(blocks: Sequence[Block]) -> str:
    """An ASCII `<section>` with its style."""
    return frame_html("\n".join(_format_html(block) for block in blocks))


def frame_html(body: str) -> str:
    """An ASCII `<section>` with the style of tables and some HTML."""
    text = f'<section class="ablation-table">\n<style>{_STYLE}</style>\n{body}\n</section>\n'
    return text.encode("ascii", "xmlcharrefreplace").decode()


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


_STYLE = """
.ablation-table { font: 14px/1.45 system-ui, sans-serif; color: inherit; }
.ablation-table .grid { overflow-x: auto; margin: 1em 0; }
.ablation-table details { margin: .8em 0; }
.ablation-table summary { font-weight: 600; cursor: pointer; }
.ablation-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ablation-table th, .ablation-table td { padding: .3em .7em; border-bottom: 1px solid rgba(128, 128, 128, .35); }
.ablation-table th { text-align: left; border-bottom-width: 2px; }
.ablation-table .number { text-align: right; }
.ablation-table .warning { padding: .5em .8em; border-left: 4px solid #d55e00; background: rgba(213, 94, 0, .15); }
@media screen and (max-width: 600px) {
  .ablation-table :is(table, tbody, tr) { display: block; white-space: normal; }
  .ablation-table thead { display: none; }
  .ablation-table tr { margin-bottom: 1em; border: 1px solid rgba(128, 128, 128, .35); border-radius: 6px; }
  .ablation-table td { display: flex; justify-content: space-between; gap: 1em; padding: .15em .7em; border: 0; }
  .ablation-table td + td { text-align: right; }
  .ablation-table td + td::before { content: attr(data-label); text-align: left; opacity: .75; }
  .ablation-table td:first-child { padding-block: .4em; font-weight: 600; }
}
"""
"""On narrow screens each row becomes a card with a line per column."""


def escape_html(text: str) -> str:
    """A text as HTML shows it."""
    return html_text.escape(_squeeze(text))


def _format_html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape_html(text)}</h{level}>"
        case Paragraph(text, warning):
            body = escape_html(text)
            return f'<p class="warning"><strong>Warning:</strong> {body}</p>' if warning else f"<p>{body}</p>"
        case BulletList(items):
            return "<ul>" + "".join(f"<li>{escape_html(item)}</li>" for item in items) + "</ul>"
        case Tabular(header, rows, words):
            kinds = ["" if i < words else ' class="number"' for i in range(len(header))]
            return format_html_table([[escape_html(cell) for cell in row] for row in rows], header, kinds)
        case Collapsible(title, blocks):
            body = "\n".join(map(_format_html, blocks))
            return f"<details><summary>{escape_html(title.text)}</summary>\n{body}\n</details>"


def format_html_table(rows: Sequence[Sequence[str]], header: Sequence[str], kinds: Sequence[str]) -> str:
    """A table of HTML cells, each labelled with its column's name for narrow screens. kinds: attributes of columns."""
    head = "".join(f"<th{kind}>{escape_html(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    opened = [f'<td{kind} data-label="{escape_html(name)}">' for kind, name in zip(kinds, header, strict=True)]
    lines = ("".join(f"{start}{cell}</td>" for start, cell in zip(opened, row, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="grid"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
