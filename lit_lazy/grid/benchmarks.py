"""Standard benchmarks as table columns, for ablations with `LmEval` among their evaluations."""

from lit_lazy.measure.lm_eval import COLUMNS, BenchmarkColumn
from lit_lazy.table.records import Column


def _make_column(column: BenchmarkColumn) -> Column:
    key = f"lm-eval/{column.task}/{column.metric}"
    note = f"{column.metric} of {column.task}, lm-evaluation-harness"
    if not column.is_accuracy:
        return Column(key, column.title, "lower", 2, note=note)
    return Column(key, column.title, "higher", 2, "%", scale=100, note=note, bounds=(0.0, 1.0))


BENCHMARK_COLUMNS = (
    *map(_make_column, COLUMNS),
    Column(
        "lm-eval/average", "average", "higher", 2, "%", scale=100, note="mean of the eight accuracies", plotted=True
    ),
)
