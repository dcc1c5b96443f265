"""A table as Markdown, LaTeX and HTML: one list of plain-text blocks, escaped and laid out by each renderer."""

import html as html_text
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_lazy.grid.statistics import ALPHA, FEWEST_PAIRS, POWER

if TYPE_CHECKING:
    from lit_lazy.grid.table import Column, Row, Table

NOT_DEFINED = "–"
UNFINISHED = ("failed", "missing", "waiting", "running")
"""States of a cell that has no result, the gravest first."""


def markdown(table: "Table", width: int) -> str:
    """See `Table.markdown`."""
    return blocks_markdown(_blocks(table), width)


def latex(table: "Table", width: int) -> str:
    """See `Table.latex`."""
    return "\n\n".join(_latex(block, width) for block in _blocks(table)) + "\n"


def html(table: "Table") -> str:
    """See `Table.html`."""
    return blocks_html(_blocks(table))


def blocks_markdown(blocks: Sequence["Block"], width: int = 120) -> str:
    """Aligned in a terminal, valid on GitHub; a grid wider than `width` goes on in a further one."""
    return "\n\n".join(_markdown(block, width) for block in blocks) + "\n"


def blocks_html(blocks: Sequence["Block"]) -> str:
    """One ASCII `<section>` that carries its style."""
    body = "\n".join(_html(block) for block in blocks)
    text = f'<section class="ablation-table">\n<style>{_STYLE}</style>\n{body}\n</section>\n'
    return text.encode("ascii", "xmlcharrefreplace").decode()


@dataclass(frozen=True)
class Heading:
    """A title; level 2 is the page's."""

    text: str
    level: int


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class List:
    """Points of a list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """`rows` and `header` have equal lengths; the first `words` columns are words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int

    def split(self, width: int) -> "list[Grid]":
        """Grids of at most `width` characters each (if two columns fit), every one led by the first column."""
        sizes = [max(len(line[i]) for line in (self.header, *self.rows)) + 3 for i in range(len(self.header))]
        parts: list[list[int]] = [[0]]
        for i in range(1, len(sizes)):
            if len(parts[-1]) > 1 and sum(sizes[j] for j in parts[-1]) + sizes[i] + 1 > width:
                parts.append([0])
            parts[-1].append(i)
        return [
            Grid(
                tuple(self.header[i] for i in part),
                tuple(tuple(row[i] for i in part) for row in self.rows),
                sum(i < self.words for i in part),
            )
            for part in parts
        ]


Block = Heading | Text | List | Grid


def _blocks(table: "Table") -> list[Block]:
    directed = [column for column in table.columns if column.better]
    blocks: list[Block] = [Heading(table.ablation, 2)]
    blocks += [Text(text, warning=True) for text in (*table.warnings, *_incomplete(table))]
    blocks += [Text(_provenance(table)), _means(table), Text(_LEGEND)]
    if directed and len(table.rows) > 1:
        others = [row for row in table.rows if row.variant != table.baseline]
        cells = [(row.variant, *(_difference(row, column) for column in directed)) for row in others]
        blocks += [Heading(f"Differences to {table.baseline}", 3), _effects("Variant", directed, cells)]
        blocks.append(Text(_DIFFERENCE_LEGEND))
    if directed and table.contrasts:
        cells = [
            (row.name, *(_effect(m.mean, m.ci95, m.test, m.p_adj, c) for c in directed for m in [row.metrics[c.key]]))
            for row in table.contrasts
        ]
        blocks += [Heading("Contrasts", 3), _effects("Contrast", directed, cells)]
        blocks.append(List(tuple(f"{row.name} = {_weights(row.weights)}" for row in table.contrasts)))
    blocks += [
        Heading("What each column can separate at this scale", 3),
        List(tuple(_verdict(table, column) for column in table.columns)),
        Text(_MDE_LEGEND),
    ]
    for title, items in (
        ("Cells without a result", _unfinished(table)),
        ("Commits", _commits(table)),
        ("Notes", list(table.notes)),
    ):
        if items:
            blocks += [Heading(title, 3), List(tuple(items))]
    return blocks


_LEGEND = (
    "Mean ± half-width of the 95 % t interval over seeds, which knows nothing of a metric's bounds; (n=…) where a "
    "metric is defined in fewer cells than the row has complete; = the same value in every seed, so no spread was "
    "measured; – not defined; * differs from the baseline (paired t over common seeds, p < 0.05 after Holm over the "
    "rows of the metric). ↓ lower, ↑ higher is better."
)
_DIFFERENCE_LEGEND = (
    "Row minus baseline, paired over common seeds, ± half-width of the unadjusted 95 % t interval; p after Holm, none "
    "below three pairs. tie: exactly 0 in every seed; = the same difference in every seed: exact for a deterministic "
    "quantity, untestable for a random one, so no p. – no common seed in which both are defined."
)
_MDE_LEGEND = (
    f"Detectable: the true difference that a paired two-sided t test at level {ALPHA} finds with power {POWER}, given "
    "the spread of the differences seen here (noncentral t; median over the tested rows). Holm's first step tests at "
    f"{ALPHA} divided by the number of rows compared."
)


def _incomplete(table: "Table") -> list[str]:
    total = sum(len(row.seeds) for row in table.rows)
    done = sum(row.n for row in table.rows)
    if done == total:
        return []
    counts = {status: sum(len(row.cells.get(status, [])) for row in table.rows) for status in UNFINISHED}
    rest = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return [f"Not complete: {done} of {total} cells have a result ({rest})."]


def _provenance(table: "Table") -> str:
    variants: dict[tuple[int, ...], list[str]] = {}
    for row in table.rows:
        variants.setdefault(tuple(row.seeds), []).append(row.variant)
    common, *others = sorted(variants, key=lambda seeds: -len(variants[seeds]))
    seed_text = ", ".join(map(str, common))
    for seeds in others:
        seed_text += f"; {', '.join(map(str, seeds))} in {', '.join(variants[seeds])}"
    about = f"Base: {table.base}. Baseline: {table.baseline}. Seeds: {seed_text}. Commit: {table.git_sha or 'unknown'}."
    made_with = f" With {table.environment}." if table.environment else ""
    return f"{about}{made_with} Made by: {table.command}"


def _means(table: "Table") -> Grid:
    labels = list(table.rows[0].labels)
    bases = ["Base"] if any(row.base != table.base for row in table.rows) else []
    rows = [
        (
            row.variant,
            row.source,
            *(row.base for _ in bases),
            *(row.labels[label] for label in labels),
            str(row.n) if row.n == len(row.seeds) else f"{row.n}/{len(row.seeds)}",
            *(_mean(row, column) for column in table.columns),
        )
        for row in table.rows
    ]
    header = ("Variant", "Source", *bases, *labels, "n", *(column.heading for column in table.columns))
    return Grid(header, tuple(rows), 2 + len(bases) + len(labels))


def _mean(row: "Row", column: "Column") -> str:
    m = row.metrics[column.key]
    if m.mean is None:
        return NOT_DEFINED if row.n else row.status
    text = column.format(m.mean)
    if m.ci95 is not None:
        text += f" ±{column.format(m.ci95)}" if m.ci95 else " ="
    if m.n != row.n:
        text += f" (n={m.n})"
    return text + "*" * m.separated


def _effects(first: str, columns: Sequence["Column"], cells: Sequence[tuple[str, ...]]) -> Grid:
    return Grid((first, *(column.difference_heading for column in columns)), tuple(cells), 1)


def _difference(row: "Row", column: "Column") -> str:
    m = row.metrics[column.key]
    return _effect(m.diff, m.diff_ci95, m.test, m.p_adj, column) if row.n else row.status


def _effect(mean: float | None, ci95: float | None, test: str | None, p_adj: float | None, column: "Column") -> str:
    if mean is None:
        return NOT_DEFINED
    if test == "tie":
        return "tie"
    text = column.format(mean, "+")
    if ci95 is not None:
        text += " =" if test == "constant" else f" ±{column.format(ci95)}"
    if p_adj is not None:
        text += f", {_p(p_adj)}" + "*" * (p_adj < ALPHA)
    return text


def _p(p: float) -> str:
    """Three decimals; a fourth where three would hide on which side of 0.05 it lies."""
    if p < 0.001:
        return "p<0.001"
    return f"p={p:.4f}" if f"{p:.3f}" == f"{ALPHA:.3f}" else f"p={p:.3f}"


def _weights(weights: Mapping[str, float]) -> str:
    return " ".join(f"{weight:+g} {variant}" for variant, weight in weights.items())


def _verdict(table: "Table", column: "Column") -> str:
    s = table.summaries[column.key]
    head = f"{column.title}: "
    if not s.pairs:
        return head + "nothing to compare, no row shares a seed with the baseline in which both are defined."
    if not s.compared:
        return head + f"no test, at most {max(s.pairs)} common seed(s) with the baseline; three are needed."
    if not s.tested:
        return head + "no test, every difference over three or more seeds is the same in each."
    text = f"{head}separates {len(s.separates)} of {s.compared} rows from {table.baseline} (Holm p < {ALPHA})"
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    above = [name for name in s.separates if (measures[name].diff or 0.0) > 0]
    below = [name for name in s.separates if name not in above]
    words = {"lower": ("worse", "better"), "higher": ("better", "worse"), None: ("higher", "lower")}[column.better]
    groups = [f"{word}: {', '.join(names)}" for word, names in zip(words, (above, below), strict=True) if names]
    text += "".join(f"; {group}" for group in groups)
    if s.tested < s.compared:
        text += f"; {s.compared - s.tested} the same in every seed"
    unit = f" {column.difference_unit}" if column.unit else ""
    pairs = [str(n) for n in s.pairs if n >= FEWEST_PAIRS]
    if s.mde is not None and s.mde_holm is not None:
        text += f". Detectable at n = {pairs[0]}: {column.format(s.mde)}{unit}; at Holm's first step: "
        text += f"{column.format(s.mde_holm)}{unit}."
    return text


def _unfinished(table: "Table") -> list[str]:
    items = []
    for row in table.rows:
        for status in UNFINISHED:
            for seed in row.cells.get(status, []):
                reason = row.reasons.get(str(seed))
                items.append(f"{row.variant}, seed {seed}: {status}" + (f" ({reason})" if reason else ""))
    return items


def _commits(table: "Table") -> list[str]:
    shas = sorted({sha for row in table.rows for sha in row.git_shas})
    dirty = [sha for sha in shas if sha.endswith("-dirty")]
    if len(shas) < 2 and not dirty:
        return []
    items = []
    if len(shas) > 1:
        items.append("The cells come from different commits, so a difference may come from the code:")
    for sha in shas:
        where = ", ".join(row.variant for row in table.rows if sha in row.git_shas)
        items.append(f"{sha}: {where}" + (" (with uncommitted changes)" if sha in dirty else ""))
    return items


# Markdown


def _markdown_escape(text: str) -> str:
    """Escapes only what would open markup, so that `p<0.001` and snake_case stay readable in a terminal."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    text = re.sub(r"([\\|`\[\]])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    return re.sub(r"\*(?=\S)", r"\\*", text)


def _markdown(block: Block, width: int) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + _markdown_escape(text)
        case Text(text, warning):
            return f"> **Warning:** {_markdown_escape(text)}" if warning else _markdown_escape(text)
        case List(items):
            return "\n".join(f"- {_markdown_escape(item)}" for item in items)
        case Grid():
            return "\n\n".join(_markdown_grid(part) for part in block.split(width))


def _markdown_grid(grid: Grid) -> str:
    lines = [[_markdown_escape(cell) for cell in line] for line in (grid.header, *grid.rows)]
    for i in range(grid.words, len(grid.header)):
        # A marker at the end of some numbers must not push their digits out of line.
        if any(line[i].endswith("*") for line in lines):
            for line in lines[1:]:
                line[i] += "" if line[i].endswith("*") else " "
    sizes = [max(3, *(len(line[i]) for line in lines)) for i in range(len(grid.header))]

    def join(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(s) if i < grid.words else c.rjust(s) for i, (c, s) in enumerate(zip(cells, sizes, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * s if i < grid.words else "-" * (s - 1) + ":" for i, s in enumerate(sizes)]
    return "\n".join([join(lines[0]), join(rule), *(join(line) for line in lines[1:])])


# LaTeX

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "Δ": r"$\Delta$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "–": "--",
    "…": r"\dots{}", "θ": r"$\theta$", "τ": r"$\tau$", "*": r"$^{*}$",
}  # fmt: skip


def _latex_escape(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)


def _latex(block: Block, width: int) -> str:
    match block:
        case Heading(text, _):
            return rf"\paragraph*{{{_latex_escape(text)}}}"
        case Text(text, warning):
            return rf"\textbf{{Warning: {_latex_escape(text)}}}\par" if warning else _latex_escape(text) + r"\par"
        case List(items):
            body = "\n".join(rf"  \item {_latex_escape(item)}" for item in items)
            return f"\\begin{{itemize}}\n{body}\n\\end{{itemize}}"
        case Grid():
            return "\n\n".join(_latex_grid(part) for part in block.split(width))


def _latex_grid(grid: Grid) -> str:
    def join(cells: Sequence[str]) -> str:
        return "  " + " & ".join(map(_latex_escape, cells)) + r" \\"

    form = "l" * grid.words + "r" * (len(grid.header) - grid.words)
    lines = [rf"\begin{{tabular}}{{{form}}}", r"  \toprule", join(grid.header), r"  \midrule"]
    lines += [*map(join, grid.rows), r"  \bottomrule", r"\end{tabular}\par"]
    return "\n".join(lines)


# HTML

_STYLE = """
.ablation-table { font: 14px/1.45 system-ui, sans-serif; color: inherit; }
.ablation-table .grid { overflow-x: auto; margin: 1em 0; }
.ablation-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ablation-table th, .ablation-table td { padding: .3em .7em; border-bottom: 1px solid rgba(128, 128, 128, .35); }
.ablation-table th { text-align: left; border-bottom-width: 2px; }
.ablation-table .number { text-align: right; }
.ablation-table .warning { padding: .5em .8em; border-left: 4px solid #d55e00; background: rgba(213, 94, 0, .15); }
"""


def _html_escape(text: str) -> str:
    return html_text.escape(re.sub(r"\s+", " ", text))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_html_escape(text)}</h{level}>"
        case Text(text, warning):
            body = _html_escape(text)
            return f'<p class="warning"><strong>Warning:</strong> {body}</p>' if warning else f"<p>{body}</p>"
        case List(items):
            return "<ul>" + "".join(f"<li>{_html_escape(item)}</li>" for item in items) + "</ul>"
        case Grid():
            return _html_grid(block)


def _html_grid(grid: Grid) -> str:
    def join(cells: Sequence[str], tag: str) -> str:
        kinds = ("" if i < grid.words else ' class="number"' for i in range(len(cells)))
        inner = "".join(f"<{tag}{k}>{_html_escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "\n".join(join(row, "td") for row in grid.rows)
    head = join(grid.header, "th")
    return f'<div class="grid"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
