"""The page over all results of a runs folder, with links to their reports, and the page of a search."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from matplotlib.figure import Figure

from lit_lazy.figures.canvas import save_figures
from lit_lazy.figures.search import TITLES, Axis, history_figure, importance_figure, is_plotted, slices_figure
from lit_lazy.grid.runs_folder import TRAINING
from lit_lazy.grid.search.definition import Definition
from lit_lazy.grid.search.run import FEWEST_FOR_IMPORTANCE, GOOD_SHARE, SearchDriver
from lit_lazy.support.console import format_count
from lit_lazy.support.secrets import format_command_line
from lit_lazy.support.stored_records import NewerFormatError
from lit_lazy.table.build import parse_table
from lit_lazy.table.document_formats import (
    Block,
    BulletList,
    Heading,
    Paragraph,
    Tabular,
    render_template,
    to_html,
    to_markdown,
)
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.table.records import Point
from lit_lazy.table.render import NOT_DEFINED, write_texts
from lit_lazy.table.results_table import format_csv
from lit_lazy.training.run_folder import RunResult, locate_cell

INDEX = "index.html"
PAGES = {"report": "report.html", "table": "table.html", "values": "table.csv"}
"""Files that the page links to, by the link's text."""
HEADER = {"Name": "", "State": "", "Finding": "prose", "Cells": "number", "Last change": "", "Pages": ""}
"""Columns and their classes."""
KIND_TITLES = {
    "question": "Questions",
    "ablation": "Ablations",
    "search": "Searches",
    "training": "Trainings",
    "other": "Without a table",
}
SHOWN = 20
"""Maximum number of points in the table; the CSV and JSON files contain all."""
STATE_ORDER = ("complete", "pruned", "diverged", "failed", "running")


@dataclass(frozen=True)
class IndexEntry:
    """A folder on the page. `changed` is the time of its table, or of the folder, in seconds since the epoch."""

    folder: Path
    kind: str
    """A key of `KIND_TITLES`."""
    state: str
    finding: str
    cells: str
    changed: float


def list_entries(runs: Path) -> list[IndexEntry]:
    """The grids and trainings in a runs folder, the last changed one first."""
    folders = [folder for folder in runs.iterdir() if (folder / "table.json").is_file() or (folder / "cells").is_dir()]
    entries = [*map(_read_entry, folders), *map(_read_trainings, runs.glob(f"{TRAINING}*/"))]
    return sorted(entries, key=lambda entry: (-entry.changed, entry.folder.name))


def _read_trainings(folder: Path) -> IndexEntry:
    """The trainings of an experiment, with the losses of the one that finished last."""
    runs = sorted((run for run in folder.iterdir() if run.is_dir()), key=lambda run: run.stat().st_mtime)
    finished = [result for result in map(RunResult.peek, runs) if result is not None]
    state, finding = "complete" if runs and len(finished) == len(runs) else "unfinished", ""
    if finished:
        newest, which = finished[-1], "Validation" if len(finished) == 1 else "Newest run: validation"
        before = f"{newest.before} {newest.metrics['init/loss/val']:.4f}"
        finding = f"{which} loss {newest.metrics['loss/val']:.4f} nats, {before}."
    done = f"{len(finished)} of {len(runs)}"
    return IndexEntry(folder, "training", state, finding, done, folder.stat().st_mtime)


def _read_entry(folder: Path) -> IndexEntry:
    file = folder / "table.json"
    changed = (file if file.exists() else folder).stat().st_mtime
    is_search = folder.name.startswith("search-")
    if not file.exists():
        found = len(list(folder.glob("cells/*/result.json")))
        status = "runs" if is_search else f"ablate status {folder.name}"
        fix = f"`lit-lazy {status}` shows its cells"
        return IndexEntry(folder, "other", "unfinished", fix, f"{found} finished", changed)
    if is_search:
        return IndexEntry(folder, "search", "", "Its points are in its table, best first.", "", changed)
    try:
        table = parse_table(file.read_bytes(), "table.json")
    except (ValueError, NewerFormatError) as error:
        return IndexEntry(folder, "other", "damaged", str(error), "", changed)
    done, cells = table.count_cells()
    finding = " ".join(describe_findings(table))
    if table.declaration is None:
        state = "complete" if done == cells else "unfinished"
        return IndexEntry(folder, "ablation", state, finding, f"{done} of {cells}", changed)
    # A verdict's sentence contains the claim.
    state, text = (table.verdict.status, finding) if table.verdict else ("no verdict yet", table.declaration.claim)
    return IndexEntry(folder, "question", state, text, f"{done} of {cells}", changed)


def render_index(entries: Sequence[IndexEntry], runs: Path, place: Path) -> str:
    """The page, ASCII, without scripts and external files. place: the folder that it is written to."""
    sections, tables = {}, {}
    for kind, title in KIND_TITLES.items():
        rows = []
        for entry in (entry for entry in entries if entry.kind == kind):
            there = [(entry.folder / file, text) for text, file in PAGES.items() if (entry.folder / file).exists()]
            links = [_render_link(path, text, place) for path, text in there]
            name = entry.folder.name
            linked = _render_link(there[0][0], name, place) if there else name
            changed = f"{datetime.fromtimestamp(entry.changed):%Y-%m-%d %H:%M}"
            pages = Markup("<span>{}</span>").format(Markup(" ").join(links)) if links else ""
            rows.append((linked, entry.state, entry.finding, entry.cells, changed, pages))
        if rows:
            sections[kind], tables[kind] = title, rows
    return render_template(
        Path(__file__).with_name("index.html"),
        title=f"Results in {runs}",
        summary=f"{format_count(len(entries), 'result')} on {datetime.now():%Y-%m-%d %H:%M}",
        sections=sections,
        tables=tables,
        header=list(HEADER),
        kinds=list(HEADER.values()),
    )


def _render_link(path: Path, text: str, place: Path) -> Markup:
    target = quote(os.fsencode(os.path.relpath(path, place)))
    return Markup('<a href="{}">{}</a>').format(target, text)


@dataclass(frozen=True)
class SearchReport:
    """The points of a search, with everything that its report needs."""

    id: str
    definition: Definition
    points: Sequence[Point]
    importances: Mapping[str, float]
    """Importances by dotted path; empty with too few complete points."""
    commits: Sequence[str]
    command: str

    @property
    def ranking(self) -> list[Point]:
        """Complete points, best first, then the others by state, longest trained first."""

        def rank(point: Point) -> tuple[float, ...]:
            value = point.value if point.value is not None else -float(point.last_step)
            return STATE_ORDER.index(point.state), value, point.number

        return sorted(self.points, key=rank)

    def save(self, folder: Path) -> list[Path]:
        """Write table.md, .csv, .json, .html and the figures; returns the paths."""
        texts = {
            "table.md": self.markdown(),
            "table.csv": self.to_csv(),
            "table.json": json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n",
            "table.html": to_html(self.to_blocks()),
        }
        return [*write_texts(folder, texts), *save_figures(self.draw_figures(), folder)]

    def draw_figures(self) -> dict[str, Figure]:
        """The figures by file name: history and slices once a point has a value, importance once it is known."""
        search, drawn, title = self.definition, dict[str, Figure](), TITLES[self.definition.objective]
        if any(map(is_plotted, self.points)):
            axes = [Axis(path, search.names[path], x.low, x.high, x.log) for path, x in search.axes.items()]
            drawn["history"] = history_figure(self.id, title, self.points)
            drawn["slices"] = slices_figure(self.id, title, axes, self.points)
        if self.importances:
            named = {search.names[path]: share for path, share in self.importances.items()}
            drawn["importance"] = importance_figure(self.id, named, self._count("complete"))
        return drawn

    def _count(self, state: str) -> int:
        return sum(point.state == state for point in self.points)

    def markdown(self) -> str:
        """The table as Markdown."""
        return to_markdown(self.to_blocks())

    def to_json(self) -> dict[str, object]:
        """Strict JSON, points best first."""
        return {
            "search": self.id,
            "definition": asdict(self.definition),
            "points": [asdict(point) for point in self.ranking],
            "importances": dict(self.importances),
            "commits": list(self.commits),
            "command": self.command,
        }

    def to_csv(self) -> str:
        """One line per point, best first, with raw values; undefined values are empty."""
        search = self.definition
        header = ["point", *search.axes, search.objective, "steps", "last_validation", "state", "n", "run", "reason"]
        points = self.ranking
        return format_csv([header, *([*self._list_values(p, lambda x, _: x), p.run, p.reason] for p in points)])

    def _list_values(self, point: Point, show: Callable[[float | None, str], object]) -> list[object]:
        """The values of a point, its numbers as `show` makes them of number and format."""
        complete = point.state == "complete"
        params = [show(point.params.get(path), ".4g") for path in self.definition.axes]
        steps = self.definition.steps if complete else point.last_step
        last = show(point.reports.get(point.last_step), ".5f")
        return [point.number, *params, show(point.value, ".5f"), steps, last, point.state, int(complete)]

    def to_blocks(self) -> list[Block]:
        """The blocks of the report."""
        counts = {state: self._count(state) for state in STATE_ORDER}
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        names = self.definition.names
        axes = "; ".join(f"{names[path]}: {axis}" for path, axis in self.definition.axes.items())
        origin = f"Seed: {self.definition.base['seed']}. Commit: {' and '.join(self.commits) or 'unknown'}."
        header = ("Point", *names.values(), f"{TITLES[self.definition.objective]} ↓", "steps", "last", "state", "n")
        shown = [self._list_values(point, _format_number) for point in self.ranking[:SHOWN]]
        rows = tuple(tuple(map(str, values)) for values in shown)
        blocks = [
            Heading(self.id, 2),
            Paragraph(f"{states}. Axes: {axes}. {origin} Made by: {self.command}"),
            Tabular(header, rows, 1),
            Paragraph(
                "Each line is one training with one seed (n = 1), or one that did not finish (n = 0). Last: the "
                "objective at the last validation, after the given number of steps."
            ),
        ]
        if len(self.points) > SHOWN:
            blocks.append(Paragraph(f"The first {SHOWN} of {len(self.points)} points; table.csv has all."))
        return [*blocks, Heading("How to read this", 3), BulletList(tuple(self._make_notes()))]

    def _make_notes(self) -> list[str]:
        search = self.definition
        complete = self._count("complete")
        notes = [
            "One seed per point: differences smaller than the spread over seeds are not significant. Run the best few "
            "as rows of an ablation with several seeds before relying on their order.",
            "A pruned point has no final value. It was stopped because its best validation so far was worse than the "
            f"median of the complete points at the same step (from step {search.min_steps} of {search.steps} on, once "
            f"{search.startup} points are complete); this can discard slow starters. A diverged point lost its finite "
            "loss.",
            f"Sampled by TPE with seed {search.seed}, at random until {search.startup} points are finished. With one "
            "worker the same command samples the same points again; with several, the points depend on the order in "
            "which they finish.",
        ]
        if complete:
            biased = f"The best of {complete} noisy values is biased: "
            notes.insert(1, f"{biased}with another seed its point has, on average, a higher loss.")
        if self.importances:
            shares = ", ".join(f"{search.names[path]} {100 * share:.0f} %" for path, share in self.importances.items())
            notes.append(
                f"Importance (PED-ANOVA): {shares}: how much each axis separates the best {GOOD_SHARE:.0%} of the "
                f"{complete} complete points from the rest. Pruned points do not count; with fewer than about 20 "
                "complete points it is mostly chance."
            )
        else:
            notes.append(f"No importances: they need at least {FEWEST_FOR_IMPORTANCE} complete points.")
        failed = [point for point in self.points if point.state == "failed"]
        notes += [f"Point {p.number} failed ({p.reason}); the same command replaces it by a new point." for p in failed]
        return notes


def _format_number(value: float | None, spec: str) -> str:
    return NOT_DEFINED if value is None else format(value, spec)


def write_search_report(driver: SearchDriver) -> SearchReport:
    """Write the report of a search into its folder."""
    work, points = driver.work, driver.points()
    results = [RunResult.peek(locate_cell(work.folder, point.run)) for point in points]
    commits = sorted({result.environment["git_sha"] for result in results if result is not None})
    report = SearchReport(work.id, work.definition, points, driver.importances(), commits, format_command_line())
    report.save(work.folder)
    return report
