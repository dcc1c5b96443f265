"""Render a table as plain text, Markdown, LaTeX and HTML."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from lit_lazy.support.console import format_duration
from lit_lazy.support.disk import write_text
from lit_lazy.table.build import TABLE
from lit_lazy.table.column_statistics import Measure
from lit_lazy.table.columns import Column
from lit_lazy.table.document_formats import (
    Block,
    BulletList,
    Collapsible,
    Heading,
    Paragraph,
    Tabular,
    shorten_block,
    to_html,
    to_latex,
    to_markdown,
    to_text,
)
from lit_lazy.table.finding_text import (
    describe_findings,
    describe_unlearned,
    describe_yardstick,
    explain_untested,
    format_margin,
    format_unit,
    group_separated,
)
from lit_lazy.table.records import UNFINISHED, TableRow
from lit_lazy.table.results_table import Table
from lit_lazy.table.statistics import ALPHA, POWER, Effect, drop_rounding
from lit_lazy.table.verdict import (
    describe_bounds,
    describe_contrasts,
    describe_earlier,
    describe_looks,
    describe_missing,
)

NOT_DEFINED = "–"
MOST_COLUMNS = 6
"""Columns of numbers in `render_brief`, the difference to the baseline among them."""
DETAILS = "details.md"
"""Name of the file with the whole table as Markdown."""


def render_summary(table: Table, whole: Path, width: int = 120) -> str:
    """The finding, the warnings, the primary column with its differences and contrasts, and why cells failed.

    width, whole: as in `render_text`.
    """
    blocks = _build_opening(table)
    for column in table.main_columns[:1]:
        blocks.append(_build_means(table, [column], whole=False, compared=[*filter(table.is_compared, [column])]))
        if table.contrasts and table.declaration is None:  # a question's contrasts are part of its verdict
            blocks.append(_build_contrasts(table, [column]))
        effects = [measure.difference for measure in table.measures[column.key].values()]
        effects += table.effects[column.key].values()
        legend = "p is adjusted for the number of comparisons (Holm), the 95 % interval after ± is not. * p < 0.05."
        if any(effect.p_adj is not None for effect in effects):
            blocks.append(Paragraph(legend))
    if failed := _list_unfinished(table, ["failed"]):
        blocks.append(BulletList(failed))
    return _render_short(blocks, whole, width)


def render_text(table: Table, whole: Path, width: int = 120) -> str:
    """The first rows of a table as plain text for a terminal. Grids wider than `width` characters are split.

    whole: the file with all rows, which the text names where it leaves rows out.
    """
    return _render_short(_build_blocks(table), whole, width)


def _render_short(blocks: Sequence[Block], whole: Path, width: int) -> str:
    return to_text([short for block in blocks for short in shorten_block(block, 60, str(whole))], width)


def render_brief(table: Table) -> str:
    """The Markdown page that a person reads: findings, warnings, one table of the main columns, a line of caveats."""
    shown, compared = choose_columns(table)
    means = _build_means(table, shown, whole=False, compared=compared)
    caveats = ["One seed a row: no interval, no test."] if max(row.n for row in table.rows) == 1 else []
    if any(row.n > 1 for row in table.rows):
        tested = f"; * differs from {table.baseline} (p < {ALPHA} after Holm)" if compared else ""
        caveats = [f"Mean ± 95 % interval over seeds, = the same in every seed{tested}."]
    if column := table.columns_by_key.get(table.primary or ""):
        caveats.append(f"Primary outcome: {column.title}; the other columns are exploratory.")
    caveats.append(f"All columns, tests and notes: {DETAILS}; lit-lazy report --from FOLDER makes it.")
    opening = [_make_title(table), *build_finding(table), *_build_warnings(table)]
    blocks = [*opening, means, Paragraph(" ".join(caveats))]
    return to_markdown(blocks, math.inf)


def choose_columns(table: Table) -> tuple[Sequence[Column], Sequence[Column]]:
    """The columns of `render_brief`, and those of them that have a column of differences too."""
    shown = table.main_columns or table.columns
    compared = [*filter(table.is_compared, shown[:1])]
    return shown[: MOST_COLUMNS - len(compared)], compared


def render_markdown(table: Table) -> str:
    """All of a table as Markdown that is valid on GitHub and aligned in its source; split as in `render_text`."""
    return to_markdown(_build_blocks(table))


def render_html_parts(table: Table) -> tuple[str, str]:
    """The table as two sections: the finding, and the numbers with only the columns of `render_brief` unfolded."""
    shown, compared = choose_columns(table)
    means: list[Block] = [_build_means(table, table.columns)]
    if len(shown) < len(table.columns):
        folded = Collapsible(Heading(f"All {len(table.columns)} columns", 3), tuple(means))
        means = [_build_means(table, shown, whole=False, compared=compared), folded]
    title = Heading(f"Results: {table.ablation}", 2)
    return to_html(_build_opening(table)), to_html([title, *_build_numbers(table, means)])


def _build_blocks(table: Table) -> list[Block]:
    numbers = _build_numbers(table, [_build_means(table, table.columns)])
    return [_make_title(table), *_build_opening(table), *numbers]


def _make_title(table: Table) -> Heading:
    return Heading(f"{table.ablation} on {table.base}", 2)


def _build_opening(table: Table) -> list[Block]:
    """The finding, of a question with a verdict what was declared, and the warnings."""
    declared, found = table.declaration, build_finding(table)
    if declared is not None and table.verdict is not None:
        column = table.columns_by_key[declared.primary]
        where = f"in commit {declared.commit}" if declared.commit else "and not committed before its run"
        about = (
            f"Source of the claim: {declared.source}. Primary outcome: {column.title}; rule: "
            f"{', '.join([declared.rule, *describe_bounds(declared, column)])}; simultaneous 95 % intervals. "
            f"Declared {where} (digest {declared.digest}). All else in this table is exploratory."
        )
        found.append(Paragraph(about))
    return [*found, *_build_warnings(table)]


def _build_warnings(table: Table) -> list[Block]:
    same = [
        f"The same losses, to the last bit, in every seed: {', '.join(twins)}. What differs between them has no effect."
        for twins in table.find_twins()
    ]
    done, total = table.count_cells()
    counts = {status: sum(len(row.cells.get(status, [])) for row in table.rows) for status in UNFINISHED}
    rest = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    missing = [f"Not complete: {done} of {total} cells have a result ({rest})."] if done < total else []
    return [Paragraph(text, warning=True) for text in (*table.warnings, *same, *missing)]


def _build_numbers(table: Table, means: Sequence[Block]) -> list[Block]:
    """The yardstick, the means and their legend, the tests, the notes and the provenance."""
    blocks: list[Block] = [*map(Paragraph, describe_yardstick(table)), *means, Paragraph(_LEGEND)]
    for reason in dict.fromkeys(column.by_construction for column in table.columns if column.by_construction):
        titles = "; ".join(column.title for column in table.columns if column.by_construction == reason)
        blocks.append(Paragraph(f"Not tested, since rows differ there by construction ({reason}): {titles}."))
    primary = [column for column in table.columns if column.key == table.primary]
    others = [column for column in table.columns if column not in primary]
    if primary:
        blocks.append(Paragraph(f"Primary outcome: {primary[0].title}. All other columns are exploratory."))
        blocks += _build_test_blocks(table, primary, primary, 3)
    tests = _build_test_blocks(table, [column for column in others if column.better], others, 4 if primary else 3)
    if primary and tests:
        about = Paragraph("Not named beforehand: a star here raises a question, it does not answer one.")
        tests = [Collapsible(Heading("Exploratory", 3), (about, *tests))]
    blocks += tests
    if table.contrasts or any(map(table.is_compared, table.columns)):
        blocks += [Paragraph(_DIFFERENCE_LEGEND), Paragraph(_MDE_LEGEND)]
    for title, items in (("Cells without a result", _list_unfinished(table, UNFINISHED)), ("Notes", table.notes)):
        if items:
            blocks += [Heading(title, 3), BulletList(items)]
    provenance: list[Block] = [Paragraph(_describe_provenance(table))]
    shas = sorted({sha for row in table.rows for sha in row.git_shas})
    if len(shas) > 1 or any(sha.endswith("-dirty") for sha in shas):
        items = ["The cells come from different commits, so a difference may come from the code:"] * (len(shas) > 1)
        for sha in shas:
            where = ", ".join(row.variant for row in table.rows if sha in row.git_shas)
            items.append(f"{sha}: {where}" + " (with uncommitted changes)" * sha.endswith("-dirty"))
        provenance.append(BulletList(tuple(items)))
    return [*blocks, Collapsible(Heading("Provenance", 3), tuple(provenance))]


def build_finding(table: Table) -> list[Block]:
    """The finding; of a question its verdict with contrasts and looks, or what the verdict still needs."""
    declared, verdict = table.declaration, table.verdict
    if declared is None:
        return [*map(Paragraph, describe_findings(table))]
    dead = map(Paragraph, describe_unlearned(table))
    if verdict is None:
        return [*dead, Paragraph(f"Not decided yet: {declared.claim} {describe_missing(declared, table.outcomes)}")]
    column = table.columns_by_key[declared.primary]
    lines = [*describe_contrasts(declared, verdict, column), *describe_looks(declared, verdict)]
    earlier = [Paragraph(describe_earlier(declared))] if declared.after else []
    return [*dead, Paragraph(verdict.sentence), BulletList(tuple(lines)), *earlier]


def _build_test_blocks(table: Table, directed: Sequence[Column], columns: Sequence[Column], level: int) -> list[Block]:
    """Differences and contrasts of the directed columns, and what each of `columns` separates."""
    blocks: list[Block] = []
    rows = [row for row in table.rows if row.variant != table.baseline]
    if any(map(table.is_compared, directed)):
        cells = {row.variant: [_format_difference(table, row, c) for c in directed] for row in rows}
        blocks += [Heading(f"Differences to {table.baseline}", level), _build_effects("Variant", directed, cells)]
    if directed and table.contrasts:
        blocks += [Heading("Contrasts", level), _build_contrasts(table, directed)]
        if columns[0].key == (table.primary or columns[0].key):  # only in the first of the two sections
            sums = {row.name: " ".join(f"{w:+g} {name}" for name, w in row.weights.items()) for row in table.contrasts}
            blocks.append(BulletList(tuple(f"{name} = {terms}" for name, terms in sums.items())))
    if any(map(table.is_compared, columns)):
        blocks.append(Heading("What each column can separate at this scale", level))
        titles: dict[str, list[str]] = {}  # columns with the same description share a line
        for column in columns:
            titles.setdefault(_describe_column(table, column), []).append(column.title)
        blocks.append(BulletList(tuple(f"{'; '.join(names)}: {text}" for text, names in titles.items())))
    return blocks


_LEGEND = (
    "Mean ± half-width of the 95 % t interval over seeds, [low, high] if a bound of the metric cuts it; (n=…) where a "
    "metric is defined in fewer cells than the row has complete; = the same value in every seed, (least to greatest) "
    "of one that is always at a bound: no spread was measured; – not defined; * differs from the baseline (p < 0.05 "
    "after Holm over the rows of the metric). ↓ lower, ↑ higher is better."
)
_DIFFERENCE_LEGEND = (
    "Differences: row minus baseline, seed by seed; mean over the seeds of both, ± half-width of the unadjusted 95 % "
    "interval; paired t test; p after Holm, none below three seeds. tie: exactly 0 in every seed; = the same "
    "difference in every seed: exact for a deterministic quantity, untestable for a random one, so no p; (least to "
    "greatest) of a seed where a row's spread was not measured. – no seed with both values."
)
_MDE_LEGEND = (
    f"Detectable: the true difference that this test at level {ALPHA} finds with power {POWER}, given the spread seen "
    "here (noncentral t; median over the tested rows of that n). Holm's first step tests at "
    f"{ALPHA} divided by the number of rows compared. The same: two one-sided t tests find the difference within the "
    "margin (p < 0.05 after Holm)."
)


def _describe_provenance(table: Table) -> str:
    variants = table.group_by_seeds()
    common, *others = sorted(variants, key=lambda seeds: -len(variants[seeds]))
    seed_text = ", ".join(map(str, common))
    for seeds in others:
        seed_text += f"; {', '.join(map(str, seeds))} in {', '.join(variants[seeds])}"
    baseline = f" Baseline: {table.baseline}." if table.baseline else ""
    about = f"Base: {table.base}.{baseline} Seeds: {seed_text}. Commit: {table.git_sha or 'unknown'}."
    made_with = f" With {table.environment}." if table.environment else ""
    spent = ""
    if table.seconds is not None:
        spent = f" Trained and measured for {format_duration(table.seconds)}, all cells together."
    hashed = ", ".join(f"{name} (SHA-256 {digest})" for name, digest in table.files.items())
    files = f" In no commit: {hashed}." if hashed else ""
    return f"{about}{files}{made_with}{spent} Made by: {table.command}"


def _build_means(
    table: Table, columns: Sequence[Column], whole: bool = True, compared: Collection[Column] = ()
) -> Tabular:
    """The rows' means in these columns. whole: with source, base and labels. compared: those with differences, too."""
    rows = table.rows
    words = [("Variant", *(row.variant for row in rows))]
    if table.unlearned:
        words.append(("State", *(table.describe_state(row.variant) for row in rows)))
    if whole:
        words.append(("Source", *(row.source for row in rows)))
        if any(row.base != table.base for row in rows):
            words.append(("Base", *(row.base for row in rows)))
        words += [(label, *(row.labels[label] for row in rows)) for label in rows[0].labels]
    numbers = [("n", *(str(row.n) if row.n == len(row.seeds) else f"{row.n}/{len(row.seeds)}" for row in rows))]
    for column in columns:
        numbers.append((column.heading, *(_format_mean(table, row, column) for row in rows)))
        if column in compared:
            numbers.append((f"Δ to {table.baseline}", *(_format_difference(table, row, column) for row in rows)))
    header, *lines = zip(*words, *numbers, strict=True)
    return Tabular(header, tuple(lines), len(words))


def _build_contrasts(table: Table, columns: Sequence[Column]) -> Tabular:
    names = [contrast.name for contrast in table.contrasts]
    cells = {name: [format_effect(table.effects[c.key][name], c) for c in columns] for name in names}
    return _build_effects("Contrast", columns, cells)


def _build_effects(first: str, columns: Sequence[Column], cells: Mapping[str, Sequence[str]]) -> Tabular:
    header = (first, *(f"Δ {column.add_unit(column.title, column.difference_unit)}" for column in columns))
    return Tabular(header, tuple((name, *line) for name, line in cells.items()), 1)


def _format_mean(table: Table, row: TableRow, column: Column) -> str:
    m = table.measures[column.key][row.variant]
    if m.mean is None and not row.n:
        return row.status
    text = format_estimate(m, column)
    if m.mean is not None and m.n != row.n:
        text += f" (n={m.n})"
    return text + "*" * (m.difference.separated and not table.is_void(row.variant, column.key))


def format_estimate(m: Measure, column: Column) -> str:
    """The mean with its 95 % half-width, with `=` if all seeds agree, or with the range of values without a spread."""
    if m.mean is None:
        return NOT_DEFINED
    text = column.format(drop_rounding(m.mean, m.ci95 or 0.0))
    if m.ci95 == 0:
        return f"{text} ="
    if m.ci95 is not None:
        low, high = column.clip_interval(m.mean, m.ci95, m.values.values())
        cut = (low, high) != (m.mean - m.ci95, m.mean + m.ci95)  # at a bound of the metric
        return text + (f" [{column.format(low)}, {column.format(high)}]" if cut else f" ±{column.format(m.ci95)}")
    if m.n > 1:
        text += f" ({column.format(min(m.values.values()))} to {column.format(max(m.values.values()))})"
    return text


def _format_difference(table: Table, row: TableRow, column: Column) -> str:
    """The difference to the baseline; the row's status if it has no complete cell."""
    if row.variant == table.baseline:
        return "baseline"
    if not row.n:
        return row.status
    effect = table.measures[column.key][row.variant].difference
    return format_effect(effect, column, table.is_void(row.variant, column.key))


def format_effect(effect: Effect, column: Column, void: bool = False) -> str:
    """The effect with its p value; void: whether it says nothing, so that it gets no star."""
    if effect.mean is None:
        return NOT_DEFINED
    if effect.test == "tie":
        return "tie"
    text = column.format(drop_rounding(effect.mean, effect.ci95 or 0.0), "+")
    if effect.test == "saturated" and effect.low is not None and effect.high is not None:
        text += f" ({column.format(effect.low, '+')} to {column.format(effect.high, '+')})"
    if effect.ci95 is not None:
        text += " =" if effect.test == "constant" else f" ±{column.format(effect.ci95)}"
    if effect.p_adj is not None:
        digits = 4 if f"{effect.p_adj:.3f}" == f"{ALPHA:.3f}" else 3  # 0.050 could be either side
        p = "p<0.001" if effect.p_adj < 0.001 else f"p={effect.p_adj:.{digits}f}"
        text += f", {p}" + "*" * (effect.separated and not void)
    return text


def _describe_column(table: Table, column: Column) -> str:
    s = table.summaries[column.key]
    if column.by_construction:
        return f"no test, rows differ by construction ({column.by_construction})."
    if not s.tested:
        return f"{explain_untested(s)}."
    groups = group_separated(table, column)
    void = [name for name in table.unlearned if name in s.separates and table.is_void(name, column.key)]
    text = f"separates {len(s.separates)} of {s.compared} rows from {table.baseline} (Holm p < {ALPHA})"
    text += "".join(f"; {title}: {', '.join(names)}" for title, names in groups.items() if names)
    text += f"; did not learn the task: {', '.join(void)}" if void else ""
    if s.tested < s.compared:
        text += f"; {s.compared - s.tested} not tested, without a measured spread"
    if column.margin is not None:
        same = [name for name in s.same if not table.is_void(name, column.key)]
        text += f"; {format_margin(column)}: {', '.join(same) or 'none'}"
    unit = format_unit(column)
    for n, (mde, mde_holm) in s.detectable.items():
        text += f". Detectable at n = {n}: {column.format(mde)}{unit}; at Holm's first step: "
        text += f"{column.format(mde_holm)}{unit}"
    return text + "."


def _list_unfinished(table: Table, statuses: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{row.variant}, seed {seed}: {status}" + (f" ({reason})" if (reason := row.reasons.get(str(seed))) else "")
        for row in table.rows
        for status in statuses
        for seed in row.cells.get(status, [])
    )


FILES: Mapping[str, Callable[[Table], str]] = {
    "table.md": render_brief,
    DETAILS: render_markdown,
    "table.csv": Table.to_csv,
    "table.tex": lambda table: to_latex(_build_blocks(table)),
    TABLE: lambda table: json.dumps(table.to_json(), indent=1, allow_nan=False) + "\n",
    "table.html": lambda table: to_html(_build_blocks(table)),
}
"""What makes the text of each of a table's files, by name."""


def save(table: Table, folder: Path, names: Collection[str] = FILES.keys()) -> list[Path]:
    """Write a table's files into a folder, or only some of them; returns the paths."""
    return write_texts(folder, {name: FILES[name](table) for name in names})


def is_saved(table: Table, folder: Path) -> bool:
    """Whether all files that `save` writes are there and whole."""
    files = {folder / name: render(table) for name, render in FILES.items()}
    return all(file.is_file() and file.read_bytes() == text.encode() for file, text in files.items())


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each text into a folder, by name; returns the paths."""
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
