"""The page over all results of a runs folder, with links to their reports."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from lit_lazy.grid.runs_folder import TRAINING
from lit_lazy.support.console import format_count
from lit_lazy.support.stored_records import NewerFormatError
from lit_lazy.table.build import parse_table
from lit_lazy.table.document_blocks import render_template
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.training.run_folder import RunResult

INDEX = "index.html"
PAGES = {"report": "report.html", "table": "table.html", "values": "table.csv"}
"""Files that the page links to, by the link's text."""
HEADER = {"Name": "", "State": "", "Finding": "prose", "Cells": "number", "Last change": "", "Pages": ""}
"""Columns and their classes."""
TITLES = {
    "question": "Questions",
    "ablation": "Ablations",
    "search": "Searches",
    "training": "Trainings",
    "other": "Without a table",
}


@dataclass(frozen=True)
class IndexEntry:
    """A folder on the page. `changed` is the time of its table, or of the folder, in seconds since the epoch."""

    folder: Path
    kind: str
    """A key of `TITLES`."""
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
    if not file.exists():
        found = len(list(folder.glob("cells/*/result.json")))
        fix = f"`lit-lazy ablate status {folder.name}` shows its cells"
        return IndexEntry(folder, "other", "unfinished", fix, f"{found} finished", changed)
    if folder.name.startswith("search-"):
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
    for kind, title in TITLES.items():
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
