"""The report of an ablation: table, figures and provenance in one HTML file, built from the grid's folder only, and
written with the table and its figures.

The file needs no network and no scripts. It must be readable in a browser and in MLflow's artifact frame, where links
do not work.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from markupsafe import Markup
from matplotlib.figure import Figure

from lit_lazy.figures import ablation, canvas, diagnostics, effects
from lit_lazy.figures.ablation import Histories
from lit_lazy.grid.cell_record import CellRecord
from lit_lazy.grid.grid_folder import GridFolder, read_grid
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.support.disk import write_text
from lit_lazy.support.error_messages import did_you_mean
from lit_lazy.support.secrets import redact_url
from lit_lazy.table.build import TABLE, read_table, recompute_statistics
from lit_lazy.table.columns import shorten_learned
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.document_formats import render_template
from lit_lazy.table.render import FILES, render_html_parts, save
from lit_lazy.table.results_table import Table
from lit_lazy.tracking.store_address import read_run_address, run_link
from lit_lazy.training.run_folder import DIAGNOSTICS, METRICS, read_lines

if TYPE_CHECKING:
    from lit_lazy.grid.ablation import Ablation
    from lit_lazy.grid.question import Question

REPORT = "report.html"
SHOWN_VARIANTS = 2
"""Variants with figures by default, the baseline first: those of each take two seconds."""
EVERY = "all"
"""In place of variants: figures of every one."""
FINDING = ("verdict", "effects")
"""Figures shown before the table; figures over all variants come after it."""
OVER_TRAINING = "_over_training"
"""End of the names of figures of the trainings of all variants."""
WATCHED = ("val/", "watch/tau_layer_", "watch/learned/", "watch/bias/learned.", "watch/first_key_")
"""Prefixes of the metrics whose history is drawn."""


def write_report(grid: GridFolder, folder: Path, table: Table, of_table: Mapping[str, Figure]) -> None:
    """Write the report of a grid and its figures of trainings into a folder.

    table, of_table: the grid's, and `draw_table_figures` of it.
    """
    data = _load_data(grid, table)
    of_trainings = _draw_training_figures(data)
    canvas.save_figures(of_trainings, folder)
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
        "verdict": effects.verdict_figure(table),
        "effects": effects.effects_figure(table, table.compared) if table.compared else None,
        "loss_against_sparsity": ablation.loss_against_sparsity(table),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _render_report_page(data: "_ReportData", of_table: Mapping[str, Figure], of_trainings: Mapping[str, Figure]) -> str:
    (variants, without), cells = _draw_run_figures(data), data.grid.cells
    shas = [cell.result.environment["git_sha"] if cell.result else "" for cell in cells]
    of_runs = {
        "variants": variants,
        "opened": " open" if len(data.drawn) <= 3 else "",
        "without": without,
        "others": ", ".join(row.variant for row in data.table.rows if row.variant not in data.drawn),
        "draws_all": f"lit-lazy report {data.grid.path.name} --figures {EVERY}",
        "facts": _collect_run_facts(data),
        "cells": [(x.variant, x.seed, x.status, data.format_key(x), sha) for x, sha in zip(cells, shas, strict=True)],
    }
    return render_page(data.table, of_table, of_trainings, **of_runs)


def render_page(
    table: Table, of_table: Mapping[str, Figure], of_trainings: Mapping[str, Figure], **of_runs: Any
) -> str:
    """The report of a table, and of its runs if given. of_table: `draw_table_figures` of it."""
    opening, numbers = map(Markup, render_html_parts(table))
    done, cells = table.count_cells()
    finding = {name: of_table[name] for name in FINDING if name in of_table}
    overall = {name: figure for name, figure in of_table.items() if name not in FINDING} | dict(of_trainings)
    sections = {
        "finding": finding and ("What the verdict rests on" if "verdict" in of_table else "What differs"),
        "table": f"Results: {table.ablation}",
        "figures": overall and "Figures over all variants",
        "reading": "How to read this",
        "variants": of_runs and "Figures of each variant",
        "run": of_runs and "What was run",
        "cells": of_runs and "Cells",
    }
    return render_template(
        Path(__file__).with_name("report.html"),
        title=f"{table.ablation} on {table.base}",
        summary=f"{len(table.rows)} variants, {done} of {cells} cells complete",
        sections={name: title for name, title in sections.items() if title},
        opening=opening,
        numbers=numbers,
        finding=_render_images(finding),
        overall=_render_images(overall),
        **of_runs,
    )


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

    def format_key(self, cell: CellRecord) -> Markup:
        """The key of a cell as HTML, with a link to its run in MLflow if the UI's address is known."""
        code = Markup("<code>{}</code>").format(cell.key)
        run_id, experiment_id = read_run_address(cell.folder)
        if self.ui_url is None or not experiment_id:
            return code
        return Markup('<a href="{}">{}</a>').format(run_link(self.ui_url, experiment_id, run_id), code)


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


def _collect_run_facts(data: _ReportData) -> dict[str, list[str]]:
    """What was run, by term; terms without a text are not shown."""
    plan, table = data.grid.plan, data.table
    complete = [cell.result for row in table.rows for cell in data.complete_cells(row.variant) if cell.result]
    facts = (f"{name} {f'{x:.5g}' if isinstance(x, float) else x}" for name, x in plan.facts.items())
    seeds = table.group_by_seeds()
    lines = {
        "Command": [plan.command],
        "Ablation": [plan.ablation],
        "Experiment": [plan.base],
        "Seeds": [f"{', '.join(map(str, group))}: {', '.join(names)}" for group, names in seeds.items()],
        "Cells": ["{} of {} cells complete".format(*table.count_cells())],
        "Baseline": [table.baseline],
        "Data": [", ".join(facts)],
        "Made with": _count_cells(result.made_in for result in complete),
        "Commit": _count_cells(result.environment["git_sha"] for result in complete),
    }
    return {term: texts for term, texts in lines.items() if any(texts)}


def _count_cells(values: Iterable[str]) -> list[str]:
    return [f"{value} ({n} cell{'s' if n > 1 else ''})" for value, n in sorted(Counter(values).items())]


def _draw_training_figures(data: _ReportData) -> dict[str, Figure]:
    """Figures of the trainings of all variants, by name; empty while no cell is complete."""
    histories = _read_histories(data)
    drawn = {"loss" + OVER_TRAINING: ablation.loss_over_training(data.table, histories)}
    sink = {"sink" + OVER_TRAINING: ablation.sink_over_training(data.table, histories)}
    for learned in ablation.list_learned(histories):
        name = shorten_learned(learned) + OVER_TRAINING
        name = f"learned.{name}" if name in drawn | sink else name  # such as of SinkLogit
        drawn[name] = ablation.parameter_over_training(data.table, histories, learned)
    return {name: figure for name, figure in (drawn | sink).items() if figure is not None}


def _read_histories(data: _ReportData) -> Histories:
    """The watched metrics during training, by variant and complete seed."""

    def read_history(cell: CellRecord) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for line in read_lines(cell.folder / METRICS):
            for name in sorted(name for name in line.metrics if name.startswith(WATCHED)):
                found.setdefault(name, []).append((line.step, line.metrics[name]))
        return {name: sorted(points) for name, points in sorted(found.items())}

    return {row.variant: [read_history(cell) for cell in data.complete_cells(row.variant)] for row in data.table.rows}


def _draw_run_figures(data: _ReportData) -> tuple[list[tuple[str, int, list[dict[str, Any]]]], list[str]]:
    """Each drawn variant with its first seed that has diagnostics, and the figures; why others have none, as HTML."""
    drawn, without = [], []
    for row in data.table.rows:
        complete = data.complete_cells(row.variant)
        if not complete:
            without.append(f"{row.variant}: no cell is complete")
        if row.variant not in data.drawn:
            continue
        for cell in complete:
            name = f"{row.variant}, seed {cell.seed}"
            if (stored := cell.folder / DIAGNOSTICS).exists():
                arrays = Diagnostics.load(io.BytesIO(stored.read_bytes())).arrays
                drawn.append((row.variant, cell.seed, _render_images(diagnostics.draw_run_figures(arrays, name))))
                break
            without.append(Markup("{}: {} has no {}").format(name, data.format_key(cell), DIAGNOSTICS))
    return drawn, without


def _render_images(drawn: Mapping[str, Figure]) -> list[dict[str, Any]]:
    """The images of figures, with sizes in CSS pixels, of which an inch has 96; wide ones span the page."""
    images = []
    for name, figure in drawn.items():
        width, height = (round(inches * 96) for inches in figure.get_size_inches().tolist())
        data = Markup(base64.b64encode(canvas.render_image(figure)).decode())
        images.append({"name": name, "width": width, "height": height, "wide": width > 800, "data": data})
    return images


def draw_report(folder: Path, table: Table) -> None:
    """Draw the figures of a grid's table, and its report, into the grid's folder."""
    drawn = draw_table_figures(table)
    canvas.save_figures(drawn, folder)
    write_report(read_grid(folder), folder, table, drawn)


def save_table(grid: GridFolder, folder: Path) -> Table:
    """Build the table of a grid, and write it and its figures into a folder."""
    table = grid.build_table()
    save(table, folder)
    canvas.save_figures(draw_table_figures(table), folder)
    return table


def recompute_table(path: Path, ablation: "Ablation", question: "Question | None") -> Table:
    """Recompute the statistics of a table.json by what an ablation declares; rewrite it, and the files made of it.

    Raises a one-line ValueError if the file is not a table of this ablation, or if its declaration differs from the
    question's.
    """
    if path.is_dir():
        raise ValueError(f"--from {str(path)!r}: is a folder; give the table.json in it, --from {path / TABLE}")
    try:
        former = read_table(path)
    except ValueError as error:
        raise ValueError(f"--from {error}") from None
    if former.ablation != ablation.name:
        raise ValueError(f"--from {str(path)!r}: is a table of {former.ablation!r}, not of {ablation.name!r}")
    _check_declaration(path, former.declaration, question)
    table = recompute_statistics(former, ablation.columns, ablation.all_contrasts, ablation.primary)
    write_text(path, FILES[TABLE](table))
    save(table, path.parent, [name for name in FILES if path.name == TABLE and (path.parent / name).exists()])
    return table


def write_table_report(source: Path, file: Path) -> None:
    """Write the report of a table.json to a file, and the table's other formats and its figures beside it.

    Raises a one-line ValueError if the source is no table.json.
    """
    table = read_table(source)
    drawn = draw_table_figures(table)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render_page(table, drawn, {}))
    save(table, file.parent)
    canvas.save_figures(drawn, file.parent)


def _check_declaration(path: Path, declared: Declaration | None, question: "Question | None") -> None:
    """Raise ValueError if file and question differ in their declaration, which must precede the run."""
    if declared is None and question is None:
        return
    if declared is None or question is None:
        without, with_it = ("table", "question's file") if declared is None else ("question's file", "table")
        problem = f"the {without} declares nothing, the {with_it} does"
    elif differing := declared.differing_fields(question.partial_declaration):
        problem = f"the table and the question declare another {', '.join(differing)}"
    else:
        return
    raise ValueError(
        f"--from {str(path)!r}: {problem}; a verdict is on what was declared before its run, so restore that"
    )
