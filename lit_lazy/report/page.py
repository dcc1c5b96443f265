"""An ablation's report: table, figures and where they come from, in one HTML file made of what MLflow holds.

The file needs no network and no script. It has to read well in a browser and in the frame in which MLflow shows
artifacts, where links are dead.
"""

import base64
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from matplotlib.figure import Figure

from lit_lazy import figures
from lit_lazy.figures.ablation import Histories
from lit_lazy.figures.canvas import use_style
from lit_lazy.grid.plan import Plan, build_table_from_mlflow, read_plan
from lit_lazy.measure.diagnostics import Diagnostics
from lit_lazy.report.captions import ABOUT_READING, CAPTIONS, ONE_SEED, READING
from lit_lazy.report.style import PAGE, STYLE
from lit_lazy.support.disk import write_text
from lit_lazy.support.errors import did_you_mean
from lit_lazy.support.secrets import redact_url
from lit_lazy.table.document import format_html_row
from lit_lazy.table.records import Table
from lit_lazy.table.render import render_html_parts
from lit_lazy.tracking.tracker import TrackedRun, Tracker
from lit_lazy.tracking.views import run_link
from lit_lazy.training.result import DIAGNOSTICS

REPORT = "report.html"
MOST_VARIANTS = 30
"""More variants than this have no figures of their own: each takes a second and a tenth of a megabyte."""
FEW = 3
"""Up to so many variants show their figures unfolded."""
CSS_DPI, IMAGE_DPI = 96, 120
"""Pixels per inch of the page, and of the images: more, so that they are sharp on a fine screen."""
WIDE = 800
"""CSS pixels from which a figure takes a line of its own."""
FINDING = ("verdict", "effects")
"""Figures that stand before the table; the others of a table, and of all trainings, come behind it."""
ALL = "all variants"
"""What these are of."""
WATCHED = ("watch/tau_layer_", "watch/first_key_")
"""How the names of the metrics begin whose history is drawn."""


def write_report(tracker: Tracker, parent_id: str, folder: Path) -> list[Path]:
    """Write the report of an ablation's parent run, and its figures over all variants, into a folder; the paths."""
    material = _gather_material(tracker, parent_id)
    path, drawn = folder / REPORT, _draw_figures(material)
    write_text(path, _render_page(material, drawn))
    return [path, *(file for name, figure in drawn.items() for file in figures.save_figure(figure, folder / name))]


def render_report(tracker: Tracker, parent_id: str, ui_url: str | None = None, drawn: Sequence[str] = ()) -> str:
    """The report of an ablation's parent run, from MLflow alone: an ASCII page, the same text for the same runs.

    ui_url: address of MLflow's pages; with it each run's id links to its page there. drawn: the variants that have
    figures of their own; none for the first 30. Raises ValueError for a ui_url that is no server's address, and for
    a name in `drawn` that is no variant's.
    """
    material = _gather_material(tracker, parent_id, ui_url, drawn)
    return _render_page(material, _draw_figures(material))


def draw_table_figures(table: Table) -> dict[str, Figure]:
    """What is drawn of a table alone, by name: what its verdict rests on, if it has one; differences; and losses."""
    if not any(row.n for row in table.rows):
        return {}
    drawn = {
        "verdict": figures.verdict_figure(table),
        "effects": figures.effects_figure(table, table.compared) if table.compared else None,
        "loss_against_sparsity": figures.loss_against_sparsity(table),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def replace_table(report: Path, table: Table, drawn: Mapping[str, Figure]) -> str:
    """The text of a report with what another table says, and what is drawn of it, in the place of its own."""
    text = report.read_text()
    parts = [part.rstrip("\n") for part in render_html_parts(table)]
    news = [(_TABLE, parts)]
    for section in _make_finding_sections(drawn):
        news += [(_FINDING, [section.html]), (_OUTLINED, [section.outline_entry])]
    news += [
        (_make_figure_pattern(name), [_render_figure(name, figure, ALL)])
        for name, figure in drawn.items()
        if name not in FINDING
    ]
    for place, texts in news:
        if len(place.findall(text)) != len(texts):
            raise ValueError(
                f"{str(report)!r}: is no report of this version; move it away, `lit-lazy report` draws one"
            )
        text = place.sub(lambda _, texts=texts: texts.pop(0), text)
    return text


def _make_figure_pattern(name: str) -> re.Pattern[str]:
    """Where the report has a figure of all variants."""
    alt = re.escape(f'alt="{escape(CAPTIONS[name][0])}: {ALL}"')
    return re.compile(rf'<figure[^>]*><div class="scroll"><img [^>]*{alt}[^>]*>.*?</figure>\n', re.DOTALL)


_TABLE = re.compile(r'<section class="ablation-table">.*?</section>', re.DOTALL)
"""What `html_parts` gives."""
_FINDING = re.compile(r'<section id="finding">.*?</section>', re.DOTALL)
_OUTLINED = re.compile(r'<li><a href="#finding">.*?</li>')


def _gather_material(
    tracker: Tracker, parent_id: str, ui_url: str | None = None, drawn: Sequence[str] = ()
) -> "_Material":
    address, table = None if ui_url is None else _parse_ui_url(ui_url), build_table_from_mlflow(tracker, parent_id)
    variants = [row.variant for row in table.rows]
    if unknown := set(drawn) - set(variants):
        name = min(unknown)
        raise ValueError(
            f"--figures {name!r}: is no row of this table{did_you_mean(name, variants)}; there are "
            f"{', '.join(variants)}"
        )
    children = tracker.find_children(parent_id)
    return _Material(
        tracker, read_plan(tracker, parent_id), table, parent_id, children, address, drawn or variants[:MOST_VARIANTS]
    )


def _render_page(material: "_Material", drawn: Mapping[str, Figure]) -> str:
    plan, table = material.plan, material.table
    opening, numbers = render_html_parts(table)
    overall = {name: figure for name, figure in drawn.items() if name not in FINDING}
    sections = [
        *_make_finding_sections(drawn),
        _Section("table", f"Results: {table.ablation}", numbers),
        *([_Section("figures", "Figures over all variants", _render_figures(overall, ALL))] if overall else []),
        _Section("variants", "Figures of each variant", _render_variant_figures(material)),
        _Section("run", "What was run", _render_run_facts(material)),
        _Section(
            "reading",
            "How to read this",
            f"<p>{ABOUT_READING}</p>{_render_definitions(READING)}",
        ),
        _Section(
            "runs", "Runs", f"<details><summary>All {len(material.runs)}</summary>{_render_runs(material)}</details>"
        ),
    ]
    page = PAGE.format(
        style=STYLE,
        title=escape(f"{plan.ablation} on {plan.base}"),
        summary=f"{len(table.rows)} variants, {_format_completeness(table)}",
        opening=opening,
        outline="".join(section.outline_entry for section in sections),
        sections="\n".join(section.html for section in sections),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _make_finding_sections(drawn: Mapping[str, Figure]) -> list["_Section"]:
    """The figures that stand before the table."""
    first = {name: drawn[name] for name in FINDING if name in drawn}
    title = "What the verdict rests on" if "verdict" in first else "What differs"
    return [_Section("finding", title, _render_figures(first, ALL))] if first else []


@dataclass(frozen=True)
class _Section:
    id: str
    title: str
    body: str

    @property
    def outline_entry(self) -> str:
        """Its line in the page's contents."""
        return f'<li><a href="#{self.id}">{escape(self.title)}</a></li>'

    @property
    def html(self) -> str:
        # The table comes with its own heading.
        heading = "" if self.body.startswith("<section") else f"<h2>{escape(self.title)}</h2>\n"
        return f'<section id="{self.id}">\n{heading}{self.body}\n</section>'


@dataclass(frozen=True)
class _Material:
    tracker: Tracker
    plan: Plan
    table: Table
    parent_id: str
    runs: Sequence[TrackedRun]
    """Every child, oldest first."""
    ui_url: str | None
    """Of MLflow's pages, where runs are to be linked to them."""
    drawn: Sequence[str]
    """Variants that have figures of their own."""

    def complete_runs(self, variant: str) -> list[TrackedRun]:
        """The complete runs of a variant, one per seed of the table, by seed."""
        runs = {int(run.tags["seed"]): run for run in reversed(self.runs) if _is_complete(run, variant)}
        seeds = next(row.seeds for row in self.table.rows if row.variant == variant)
        return [runs[seed] for seed in seeds if seed in runs]

    def format_run_id(self, run_id: str) -> str:
        """A run's id, with a link where there is somewhere to link to."""
        shown = f"<code>{escape(run_id)}</code>"
        if self.ui_url is None:
            return shown
        return f'<a href="{escape(run_link(self.ui_url, self.tracker.experiment_id, run_id))}">{shown}</a>'


def _is_complete(run: TrackedRun, variant: str) -> bool:
    return run.state == "complete" and run.tags["variant"] == variant


def _parse_ui_url(ui_url: str) -> str:
    """A server's address without a slash at its end."""
    try:
        parts = urlsplit(ui_url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or "@" in ui_url or "?" in ui_url or "#" in ui_url or not ui_url.isprintable() or " " in ui_url:
        raise ValueError(
            f"--ui-url {redact_url(ui_url)!r}: must be http://HOST:PORT or https://HOST, where MLflow's pages are"
        )
    return ui_url.rstrip("/")


def _format_completeness(table: Table) -> str:
    done, total = sum(row.n for row in table.rows), sum(len(row.seeds) for row in table.rows)
    return f"{done} of {total} cells complete"


def _render_run_facts(material: _Material) -> str:
    plan, table = material.plan, material.table
    complete = [run for row in table.rows for run in material.complete_runs(row.variant)]
    seeds: dict[tuple[int, ...], list[str]] = {}
    for row in table.rows:
        seeds.setdefault(tuple(row.seeds), []).append(row.variant)
    lines = {
        "Command": [f"<code>{escape(plan.command)}</code>"],
        "Ablation": [escape(plan.ablation)],
        "Experiment": [escape(plan.base)],
        "Seeds": [escape(f"{', '.join(map(str, some))}: {', '.join(names)}") for some, names in seeds.items()],
        "Cells": [_format_completeness(table)],
        "Baseline": [escape(table.baseline)],
        "Data": [escape(", ".join(f"{name} {_format_number(value)}" for name, value in plan.facts.items()))],
        "Made with": _count_cells(run.tags.get("environment", "unknown") for run in complete),
        "Commit": _count_cells(run.tags.get("git_sha", "unknown") for run in complete),
        "Parent run": [material.format_run_id(material.parent_id)],
    }
    return _render_definitions({term: texts for term, texts in lines.items() if any(texts)})


def _format_number(value: str | int | float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _count_cells(values: Iterable[str]) -> list[str]:
    return [escape(f"{value} ({n} cell{'s' if n > 1 else ''})") for value, n in sorted(Counter(values).items())]


def _render_definitions(lines: Mapping[str, Sequence[str]]) -> str:
    """A list of terms, each with its texts, which are HTML."""
    items = (f"<dt>{term}</dt>" + "".join(f"<dd>{text}</dd>" for text in texts) for term, texts in lines.items())
    return f"<dl>{''.join(items)}</dl>"


def _draw_figures(material: _Material) -> dict[str, Figure]:
    """Figures of the table and of all variants' trainings, by name; none while no cell is complete."""
    table, histories = material.table, _read_histories(material)
    over_training = {
        "tau_over_training": figures.tau_over_training(table, histories),
        "sink_over_training": figures.sink_over_training(table, histories),
    }
    return draw_table_figures(table) | {name: figure for name, figure in over_training.items() if figure is not None}


def _read_histories(material: _Material) -> Histories:
    """What was watched during training, by variant, of each complete seed."""

    def history(run: TrackedRun) -> dict[str, list[tuple[int, float]]]:
        return material.tracker.read_history(
            run.run_id, sorted(name for name in run.metrics if name.startswith(WATCHED))
        )

    return {row.variant: [history(run) for run in material.complete_runs(row.variant)] for row in material.table.rows}


def _render_variant_figures(material: _Material) -> str:
    """Of each variant the figures of its first complete seed that has diagnostics."""
    parts, without = [], []
    opened = " open" if len(material.drawn) <= FEW else ""
    for row in material.table.rows:
        complete = material.complete_runs(row.variant)
        if not complete:
            without.append(f"{escape(row.variant)}: no cell is complete")
        if row.variant not in material.drawn:
            without.append(f"{escape(row.variant)}: <code>lit-lazy report --figures</code> draws what it is given")
            continue
        for run in complete:
            kept = material.tracker.read_bytes(run.run_id, DIAGNOSTICS)
            name = f"{row.variant}, seed {run.tags['seed']}"
            if kept is None:
                without.append(f"{escape(name)}: {material.format_run_id(run.run_id)} holds no {DIAGNOSTICS}")
                continue
            arrays = Diagnostics.load(io.BytesIO(kept)).arrays
            body = _render_figures(figures.draw_run_figures(arrays, name), name)
            summary = f"<summary>{escape(row.variant)} <small>seed {run.tags['seed']}</small></summary>"
            parts.append(f"<details{opened}>{summary}\n{body}</details>")
            break
    if parts:
        parts.insert(0, f"<p>{ONE_SEED}</p>")
    if without:
        parts.append(f"<p>Without figures:</p><ul>{''.join(f'<li>{text}</li>' for text in without)}</ul>")
    return "\n".join(parts)


def _render_figures(drawn: Mapping[str, Figure], subject: str) -> str:
    figures = "".join(_render_figure(name, figure, subject) for name, figure in drawn.items())
    return f'<div class="figures">\n{figures}</div>\n'


@use_style()
def _render_figure(name: str, figure: Figure, subject: str) -> str:
    title, look = CAPTIONS[name]
    data = io.BytesIO()
    # Lossless, and smaller than a PNG or an SVG with its text as outlines.
    figure.savefig(data, format="webp", dpi=IMAGE_DPI, pil_kwargs={"lossless": True})
    width, height = (round(inches * CSS_DPI) for inches in figure.get_size_inches())
    wide = ' class="wide"' if width > WIDE else ""
    source = f"data:image/webp;base64,{base64.b64encode(data.getvalue()).decode()}"
    return (
        f'<figure{wide} style="--width:{width}px"><div class="scroll"><img width="{width}" height="{height}" '
        f'alt="{escape(f"{title}: {subject}")}" src="{source}"></div>'
        f"<figcaption><b>{title}.</b> {look}</figcaption></figure>\n"
    )


def _render_runs(material: _Material) -> str:
    header = ("Variant", "Seed", "State", "Run", "Commit")
    head = "".join(f"<th>{name}</th>" for name in header)
    order = {row.variant: number for number, row in enumerate(material.table.rows)}
    runs = sorted(material.runs, key=lambda run: (order.get(run.tags["variant"], len(order)), int(run.tags["seed"])))
    lines = []
    for run in runs:
        cells = (
            escape(run.tags["variant"]),
            escape(run.tags["seed"]),
            run.state,
            material.format_run_id(run.run_id),
            escape(run.tags.get("git_sha", "")),
        )
        lines.append(format_html_row(cells, header, [""] * len(header)) + "\n")
    if not lines:
        return "<p>MLflow holds no run of a cell.</p>"
    return (
        f'<div class="ablation-table"><div class="grid"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(lines)}</tbody>\n</table></div></div>"
    )
