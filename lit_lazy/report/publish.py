"""Publish the table and report of an ablation in its folder and on its parent run."""

from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from lit_lazy import figures
from lit_lazy.grid.ablation import Ablation
from lit_lazy.grid.plan import build_table_from_mlflow, read_plan, save_views
from lit_lazy.grid.question import Question
from lit_lazy.report.page import REPORT, draw_table_figures, render_table_report, write_report
from lit_lazy.support.disk import write_text
from lit_lazy.support.stored_names import make_outcome_name
from lit_lazy.table.build import recompute_statistics
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.document import Paragraph, to_markdown
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.table.records import Table
from lit_lazy.table.render import save
from lit_lazy.table.stored import TABLE, read_table
from lit_lazy.table.verdicts import add_verdict
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.tracking.views import run_link


def publish(tracker: Tracker, parent_id: str, folder: Path, is_new: bool, console: Console) -> Table:
    """Write the table, and also the report if cells were executed (is_new) or it does not exist yet."""
    table, drawn = write_table(tracker, parent_id, folder)
    if is_new or not (folder / REPORT).exists():
        console.print("drawing the report", highlight=False)
        tracker.log_files(parent_id, write_report(tracker, parent_id, folder, table, drawn))
        _describe(tracker, parent_id, table, REPORT)
    return table


def write_table(tracker: Tracker, parent_id: str, folder: Path) -> tuple[Table, dict[str, Figure]]:
    """`save_table`, and log it on the parent run: its files, the verdict, the primary outcome of each row."""
    table, drawn, files = save_table(tracker, parent_id, folder)
    tracker.log_files(parent_id, files)
    if table.verdict:
        tracker.tag(parent_id, "verdict", table.verdict.sentence)
    _describe(tracker, parent_id, table, REPORT if (folder / REPORT).exists() else "table.html")
    tracker.log_after_end(parent_id, collect_outcomes(table))
    ended = all(row.status in ("complete", "failed") for row in table.rows)
    save_views(tracker, read_plan(tracker, parent_id), table.columns, ended)
    return table, drawn


def _describe(tracker: Tracker, parent_id: str, table: Table, page: str) -> None:
    """Describe the parent run and its experiment in MLflow: the finding, a link to a page of the run, the command."""
    findings = [to_markdown([Paragraph(text)]).strip() for text in describe_findings(table)]
    link = run_link("", tracker.experiment_id, parent_id, page).removeprefix("/")  # on MLflow's own page
    tracker.describe(parent_id, [*findings, f"[{page}]({link})", f"`{table.command}`"], "table.md")


def collect_outcomes(table: Table) -> dict[str, float]:
    """The mean of the primary outcome, or of the first main column, by `metric/row`, to four significant digits.

    MLflow shows all digits of a metric, and takes only some characters in its name.
    """
    if not table.main_columns:
        return {}
    key = table.main_columns[0].key
    found: dict[str, float] = {}
    for row in table.rows:
        if (mean := row.metrics[key].mean) is not None:
            name = make_outcome_name(key, row.variant)
            while name in found:  # rows may differ in other characters only
                name += "_"
            found[name] = float(f"{mean:.4g}")
    return found


def save_table(tracker: Tracker, parent_id: str, folder: Path) -> tuple[Table, dict[str, Figure], list[Path]]:
    """Build the table from MLflow, and write it and its figures into a folder; returns also the files."""
    table = build_table_from_mlflow(tracker, parent_id)
    files, drawn = save(table, folder / "table"), draw_table_figures(table)
    for name, figure in drawn.items():
        files += figures.save_figure(figure, folder / name)
    return table, drawn, files


def recompute_table(path: Path, ablation: Ablation, question: Question | None) -> Table:
    """Recompute the statistics of a table.json by what an ablation declares; rewrite it, and the table.md beside it.

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
    table = add_verdict(table, former.declaration)
    save(table, path.with_suffix(""), ("md", "json"))
    return table


def write_table_report(source: Path, file: Path) -> None:
    """Write the report of a table.json to a file, and the table's other formats and its figures beside it.

    Raises a one-line ValueError if the source is no table.json.
    """
    table = read_table(source)
    drawn = draw_table_figures(table)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render_table_report(table, drawn))
    save(table, file.parent / "table")
    for name, figure in drawn.items():
        figures.save_figure(figure, file.parent / name)


def _check_declaration(path: Path, declared: Declaration | None, question: Question | None) -> None:
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
