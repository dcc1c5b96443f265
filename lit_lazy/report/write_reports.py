"""Write the table and report of an ablation."""

from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.figures import canvas
from lit_lazy.grid.grid_folder import GridFolder, read_grid
from lit_lazy.report.ablation_page import draw_table_figures, render_page, write_report
from lit_lazy.support.disk import write_text
from lit_lazy.table.build import TABLE, read_table, recompute_statistics
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Table
from lit_lazy.table.render import FILES, save

if TYPE_CHECKING:
    from lit_lazy.grid.ablation import Ablation
    from lit_lazy.grid.question import Question


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
