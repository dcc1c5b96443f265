"""The report of an ablation: table, figures and provenance in one HTML file, built from the grid's folder only.

The file needs no network and no scripts. It must be readable in a browser and in MLflow's artifact frame, where links
do not work.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from matplotlib.figure import Figure

from lit_lazy import figures
from lit_lazy.figures.ablation import Histories
from lit_lazy.grid.plan import CellRecord, GridFolder
from lit_lazy.measure.arrays import Diagnostics
from lit_lazy.report.captions import ABOUT_READING, CAPTIONS, ONE_SEED, READING
from lit_lazy.report.template import PAGE, STYLE, Section
from lit_lazy.support.disk import write_text
from lit_lazy.support.errors import did_you_mean
from lit_lazy.support.secrets import redact_url
from lit_lazy.table.columns import shorten_learned
from lit_lazy.table.document import escape_html, format_html_table
from lit_lazy.table.records import Table
from lit_lazy.table.render import render_html_parts
from lit_lazy.tracking.store import read_run_address
from lit_lazy.tracking.views import run_link
from lit_lazy.training.result import DIAGNOSTICS, METRICS
from lit_lazy.training.run_folder import read_lines

REPORT = "report.html"
SHOWN_VARIANTS = 2
"""Variants with figures by default, the baseline first: those of each take two seconds."""
EVERY = "all"
"""In place of variants: figures of every one."""
FEW = 3
"""Up to this number of variants, their figures are unfolded."""
CSS_DPI = 96
"""Pixels per inch of the page."""
WIDE = 800
"""Figures wider than this, in CSS pixels, span the page."""
FINDING = ("verdict", "effects")
"""Figures shown before the table; figures over all variants come after it."""
OVER_TRAINING = "_over_training"
"""End of the names of figures of the trainings of all variants."""
ALL = "all variants"
"""The subject of figures over all variants."""
WATCHED = ("val/", "watch/tau_layer_", "watch/learned/", "watch/bias/learned.", "watch/first_key_")
"""Prefixes of the metrics whose history is drawn."""


def write_report(grid: GridFolder, folder: Path, table: Table, of_table: Mapping[str, Figure]) -> None:
    """Write the report of a grid and its figures of trainings into a folder.

    table, of_table: the grid's, and `draw_table_figures` of it.
    """
    data = _load_data(grid, table)
    of_trainings = _draw_training_figures(data)
    for name, figure in of_trainings.items():
        figures.save_figure(figure, folder / name)
    # The page comes last: with it all is drawn, also after a kill.
    write_text(folder / REPORT, _render_report_page(data, of_table, of_trainings))


def render_report(grid: GridFolder, ui_url: str | None = None, drawn: Sequence[str] = ()) -> str:
    """The report of a grid: an ASCII page that is deterministic in its cells.

    ui_url: address of the MLflow UI, to whose experiment the page then links. drawn: variants with figures, or `all`;
    by default the baseline and the first other one. Raises ValueError if ui_url is not the address of a server, or if
    `drawn` names an unknown variant.
    """
    address = None if ui_url is None else _parse_ui_url(ui_url)
    data = _load_data(grid, grid.build_table(), address, drawn)
    return _render_report_page(data, draw_table_figures(data.table), _draw_training_figures(data))


def draw_table_figures(table: Table) -> dict[str, Figure]:
    """The figures that need only a table, by name: its verdict if any, differences, and loss against sparsity."""
    if not any(row.n for row in table.rows):
        return {}
    drawn = {
        "verdict": figures.verdict_figure(table),
        "effects": figures.effects_figure(table, table.compared) if table.compared else None,
        "loss_against_sparsity": figures.loss_against_sparsity(table),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def render_table_report(table: Table, drawn: Mapping[str, Figure]) -> str:
    """The report of a table without its runs. drawn: `draw_table_figures` of it."""
    return _render_page(table, drawn, {}, [])


def _render_report_page(data: "_ReportData", of_table: Mapping[str, Figure], of_trainings: Mapping[str, Figure]) -> str:
    of_runs = [
        Section("variants", "Figures of each variant", _render_variant_figures(data)),
        Section("run", "What was run", _render_run_facts(data)),
        Section("cells", "Cells", _render_cells(data)),
    ]
    return _render_page(data.table, of_table, of_trainings, of_runs)


def _render_page(
    table: Table, of_table: Mapping[str, Figure], of_trainings: Mapping[str, Figure], of_runs: Sequence[Section]
) -> str:
    opening, numbers = render_html_parts(table)
    finding = {name: of_table[name] for name in FINDING if name in of_table}
    others = {name: figure for name, figure in of_table.items() if name not in FINDING}
    overall = _render_figures(others | dict(of_trainings), ALL)
    title = "What the verdict rests on" if "verdict" in of_table else "What differs"
    sections = [
        *([Section("finding", title, _render_grid(_render_figures(finding, ALL)))] if finding else []),
        Section("table", f"Results: {table.ablation}", numbers, heading=False),
        *([Section("figures", "Figures over all variants", _render_grid(overall))] if overall else []),
        Section(
            "reading",
            "How to read this",
            f"<p>{ABOUT_READING}</p>{_render_definitions({term: [text] for term, text in READING.items()})}",
        ),
        *of_runs,
    ]
    page = PAGE.format(
        style=STYLE,
        title=escape_html(f"{table.ablation} on {table.base}"),
        summary=f"{len(table.rows)} variants, {_format_completeness(table)}",
        opening=opening,
        outline="".join(section.link for section in sections),
        sections="".join(section.html for section in sections),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


@dataclass(frozen=True)
class _ReportData:
    grid: GridFolder
    table: Table
    ui_url: str | None
    """Address of the MLflow UI; None for no links."""
    drawn: Sequence[str]
    """Variants with figures."""

    def complete_cells(self, variant: str) -> list[CellRecord]:
        """The finished cells of a variant by seed."""
        return [cell for cell in self.grid.cells if cell.variant == variant and cell.result is not None]

    def format_key(self, cell: CellRecord) -> str:
        """The key of a cell, with a link to its run in MLflow if the UI's address is known."""
        code = f"<code>{escape_html(cell.key)}</code>"
        address = None if self.ui_url is None else read_run_address(cell.folder)
        if address is None or self.ui_url is None:
            return code
        return f'<a href="{escape_html(run_link(self.ui_url, *address))}">{code}</a>'


def _load_data(grid: GridFolder, table: Table, ui_url: str | None = None, drawn: Sequence[str] = ()) -> _ReportData:
    variants = [row.variant for row in table.rows]
    if list(drawn) == [EVERY]:
        drawn = variants
    if unknown := set(drawn) - set(variants):
        name = min(unknown)
        hint = f"{did_you_mean(name, variants)}; there are {', '.join(variants)}"
        raise ValueError(f"--figures {name!r}: is no row of this table{hint}")
    baseline_first = sorted(variants, key=lambda name: name != table.baseline)
    return _ReportData(grid, table, ui_url, drawn or baseline_first[:SHOWN_VARIANTS])


def _parse_ui_url(ui_url: str) -> str:
    """The address of a server without a trailing slash."""
    try:
        parts = urlsplit(ui_url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or "@" in ui_url or "?" in ui_url or "#" in ui_url or not ui_url.isprintable() or " " in ui_url:
        raise ValueError(
            f"--ui-url {redact_url(ui_url)!r}: must be http://HOST:PORT or https://HOST, the address of the MLflow UI"
        )
    return ui_url.rstrip("/")


def _format_completeness(table: Table) -> str:
    return "{} of {} cells complete".format(*table.count_cells())


def _render_run_facts(data: _ReportData) -> str:
    plan, table = data.grid.plan, data.table
    complete = [cell.result for row in table.rows for cell in data.complete_cells(row.variant) if cell.result]
    facts = (f"{name} {f'{x:.5g}' if isinstance(x, float) else x}" for name, x in plan.facts.items())
    seeds = table.group_by_seeds()
    lines = {
        "Command": [f"<code>{escape_html(plan.command)}</code>"],
        "Ablation": [escape_html(plan.ablation)],
        "Experiment": [escape_html(plan.base)],
        "Seeds": [escape_html(f"{', '.join(map(str, group))}: {', '.join(names)}") for group, names in seeds.items()],
        "Cells": [_format_completeness(table)],
        "Baseline": [escape_html(table.baseline)],
        "Data": [escape_html(", ".join(facts))],
        "Made with": _count_cells(result.made_in for result in complete),
        "Commit": _count_cells(result.environment["git_sha"] for result in complete),
    }
    return _render_definitions({term: texts for term, texts in lines.items() if any(texts)})


def _count_cells(values: Iterable[str]) -> list[str]:
    return [escape_html(f"{value} ({n} cell{'s' if n > 1 else ''})") for value, n in sorted(Counter(values).items())]


def _render_definitions(lines: Mapping[str, Sequence[str]]) -> str:
    """A definition list of terms, each with its HTML texts."""
    items = (f"<dt>{term}</dt>" + "".join(f"<dd>{text}</dd>" for text in texts) for term, texts in lines.items())
    return f"<dl>{''.join(items)}</dl>"


def _draw_training_figures(data: _ReportData) -> dict[str, Figure]:
    """Figures of the trainings of all variants, by name; empty while no cell is complete."""
    histories = _read_histories(data)
    drawn = {"loss" + OVER_TRAINING: figures.loss_over_training(data.table, histories)}
    for learned in figures.list_learned(histories):
        drawn[shorten_learned(learned) + OVER_TRAINING] = figures.parameter_over_training(
            data.table, histories, learned
        )
    drawn["sink" + OVER_TRAINING] = figures.sink_over_training(data.table, histories)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _read_histories(data: _ReportData) -> Histories:
    """The watched metrics during training, by variant and complete seed."""

    def read_history(cell: CellRecord) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for line in read_lines(cell.folder / METRICS):
            for name in sorted(name for name in line.metrics if name.startswith(WATCHED)):
                found.setdefault(name, []).append((line.step, line.metrics[name]))
        return {name: sorted(points) for name, points in sorted(found.items())}

    return {row.variant: [read_history(cell) for cell in data.complete_cells(row.variant)] for row in data.table.rows}


def _render_variant_figures(data: _ReportData) -> str:
    """For each variant, the figures of its first complete seed with diagnostics."""
    chosen, without = _choose_runs(data)
    opened = " open" if len(data.drawn) <= FEW else ""
    parts = [f"<p>{ONE_SEED}</p>"] if chosen else []
    for (variant, seed), arrays in chosen.items():
        name = f"{variant}, seed {seed}"
        body = _render_grid(_render_figures(figures.draw_run_figures(arrays, name), name))
        summary = f"<summary>{escape_html(variant)} <small>seed {seed}</small></summary>"
        parts.append(f"<details{opened}>{summary}\n{body}</details>")
    if without:
        parts.append(f"<p>Without figures:</p><ul>{''.join(f'<li>{text}</li>' for text in without)}</ul>")
    if others := [escape_html(row.variant) for row in data.table.rows if row.variant not in data.drawn]:
        command = escape_html(f"lit-lazy report {data.grid.path.name} --figures {EVERY}")
        parts.append(f"<p><code>{command}</code>, or a list of rows, draws those of {', '.join(others)}.</p>")
    return "\n".join(parts)


def _choose_runs(data: _ReportData) -> tuple[dict[tuple[str, int], dict[str, np.ndarray]], list[str]]:
    """Diagnostics by variant and seed, and for what has no figures, the reason as HTML."""
    chosen, without = {}, []
    for row in data.table.rows:
        complete = data.complete_cells(row.variant)
        if not complete:
            without.append(f"{escape_html(row.variant)}: no cell is complete")
        if row.variant not in data.drawn:
            continue
        for cell in complete:
            if (stored := cell.folder / DIAGNOSTICS).exists():
                chosen[row.variant, cell.seed] = Diagnostics.load(io.BytesIO(stored.read_bytes())).arrays
                break
            name = escape_html(f"{row.variant}, seed {cell.seed}")
            without.append(f"{name}: {data.format_key(cell)} has no {DIAGNOSTICS}")
    return chosen, without


def _render_figures(drawn: Mapping[str, Figure], subject: str) -> str:
    return "".join(_render_image(name, figures.render_image(figure), subject) for name, figure in drawn.items())


def _render_grid(figures: str) -> str:
    return f'<div class="figures">\n{figures}</div>\n'


def _render_image(name: str, image: figures.Image, subject: str) -> str:
    learned = name.removesuffix(OVER_TRAINING)
    title, _, caption = CAPTIONS.get(name, CAPTIONS["tau_over_training"]).partition(". ")
    title = title if name in CAPTIONS else f"{learned} over training"
    width, height = (round(inches * CSS_DPI) for inches in image.size)
    wide = ' class="wide"' if width > WIDE else ""
    source = f"data:image/webp;base64,{base64.b64encode(image.data).decode()}"
    return (
        f'<figure{wide} style="--width:{width}px"><div class="scroll"><img width="{width}" height="{height}" '
        f'alt="{escape_html(f"{title}: {subject}")}" src="{source}"></div>'
        f"<figcaption><b>{title}.</b> {caption}</figcaption></figure>\n"
    )


def _render_cells(data: _ReportData) -> str:
    header = ("Variant", "Seed", "State", "Cell", "Commit")
    rows = [
        (
            escape_html(cell.variant),
            str(cell.seed),
            cell.status,
            data.format_key(cell),
            "" if cell.result is None else escape_html(cell.result.environment["git_sha"]),
        )
        for cell in data.grid.cells
    ]
    table = f'<div class="ablation-table">{format_html_table(rows, header, [""] * len(header))}</div>'
    return f"<details><summary>All {len(rows)}</summary>{table}</details>"
