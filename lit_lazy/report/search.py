"""The report of a search: its points as a table, best first, with notes on how to read them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from lit_lazy.figures import save_figure
from lit_lazy.figures.search import TITLES, make_search_figures
from lit_lazy.grid.search.definition import Definition
from lit_lazy.grid.search.run import FEWEST_FOR_IMPORTANCE, GOOD_SHARE, SearchDriver
from lit_lazy.support.secrets import format_command_line
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, Tabular, to_html, to_markdown
from lit_lazy.table.records import Point, format_csv
from lit_lazy.table.render import NOT_DEFINED, write_texts
from lit_lazy.training.result import RunResult
from lit_lazy.training.run_folder import locate_cell

SHOWN = 20
"""Maximum number of points in the table; the CSV and JSON files contain all."""
STATE_ORDER = ("complete", "pruned", "diverged", "failed", "running", "waiting")


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
        paths = write_texts(folder, texts)
        for name, figure in self.draw_figures().items():
            paths += save_figure(figure, folder / name)
        return paths

    def draw_figures(self) -> dict[str, Figure]:
        """All non-empty figures by file name."""
        search = self.definition
        return make_search_figures(self.id, search.objective, search.axes, search.names, self.points, self.importances)

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
        axes = list(self.definition.axes)
        head = [self.definition.objective, "steps", "last_validation", "state", "n", "run", "reason"]
        lines: list[list[object]] = [["point", *axes, *head]]
        for point in self.ranking:
            params = [point.params.get(path) for path in axes]
            last, n = point.reports.get(point.last_step), int(point.state == "complete")
            lines.append([point.number, *params, point.value, self._count_steps(point), last, point.state, n])
            lines[-1] += [point.run, point.reason]
        return format_csv(lines)

    def to_blocks(self) -> list[Block]:
        """The blocks of the report."""
        counts = {state: sum(point.state == state for point in self.points) for state in STATE_ORDER}
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        names = self.definition.names
        axes = "; ".join(f"{names[path]}: {axis}" for path, axis in self.definition.axes.items())
        origin = f"Seed: {self.definition.base['seed']}. Commit: {' and '.join(self.commits) or 'unknown'}."
        header = ("Point", *names.values(), f"{TITLES[self.definition.objective]} ↓", "steps", "last", "state", "n")
        rows = [
            (
                str(point.number),
                *(f"{point.params[path]:.4g}" if path in point.params else NOT_DEFINED for path in names),
                NOT_DEFINED if point.value is None else f"{point.value:.5f}",
                str(self._count_steps(point)),
                f"{point.reports[point.last_step]:.5f}" if point.reports else NOT_DEFINED,
                point.state,
                str(int(point.state == "complete")),
            )
            for point in self.ranking[:SHOWN]
        ]
        blocks = [
            Heading(self.id, 2),
            Paragraph(f"{states}. Axes: {axes}. {origin} Made by: {self.command}"),
            Tabular(header, tuple(rows), 1),
            Paragraph(
                "Each line is one training with one seed (n = 1), or one that did not finish (n = 0). Last: the "
                "objective at the last validation, after the given number of steps."
            ),
        ]
        if len(self.points) > SHOWN:
            blocks.append(Paragraph(f"The first {SHOWN} of {len(self.points)} points; table.csv has all."))
        return [*blocks, Heading("How to read this", 3), BulletList(tuple(self._make_notes()))]

    def _count_steps(self, point: Point) -> int:
        return self.definition.steps if point.state == "complete" else point.last_step

    def _make_notes(self) -> list[str]:
        search = self.definition
        complete = sum(point.state == "complete" for point in self.points)
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


def write_search_report(driver: SearchDriver) -> SearchReport:
    """Write the report of a search into its folder."""
    work, points = driver.work, driver.points()
    results = [RunResult.peek(locate_cell(work.folder, point.run)) for point in points]
    commits = sorted({result.environment["git_sha"] for result in results if result is not None})
    report = SearchReport(work.id, work.definition, points, driver.importances(), commits, format_command_line())
    report.save(work.folder)
    return report
