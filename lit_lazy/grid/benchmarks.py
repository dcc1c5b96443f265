"""The field's benchmarks as columns of a table, for ablations that ask for `LmEval` among their evaluations."""

from lit_lazy.measure.lm_eval import COLUMNS, BenchmarkColumn
from lit_lazy.table.records import Column


def _make_column(of: BenchmarkColumn) -> Column:
    key, note = f"lm-eval/{of.task}/{of.metric}", f"{of.metric} of {of.task}, lm-evaluation-harness"
    if not of.is_accuracy:
        return Column(key, of.title, "lower", 2, note=note)
    return Column(key, of.title, "higher", 2, "%", scale=100, note=note, bounds=(0.0, 1.0))


BENCHMARK_COLUMNS = (
    *map(_make_column, COLUMNS),
    Column(
        "lm-eval/average", "average", "higher", 2, "%", scale=100, note="mean of the eight accuracies", plotted=True
    ),
)
