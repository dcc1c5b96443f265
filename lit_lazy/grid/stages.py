"""Second stages: questions and ablations that use results from the committed table of another ablation."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from lit_lazy.grid.ablation import Row
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.named_files import PROJECT
from lit_lazy.table.records import Table

RESULTS = PROJECT / "docs" / "results"
"""Folder of committed tables."""
AT = " at "


class FirstStageMissing(ValueError):
    """The table of the first stage does not exist yet."""


def at_rate(row: str, rate: float) -> str:
    """The name of a row at a learning rate, such as `softmax at 0.005`."""
    return f"{row}{AT}{rate:g}"


def find_best_rates(folder: str) -> dict[str, float]:
    """The learning rate with the lowest mean primary outcome for each row, among the rates in row names.

    folder: the first stage's results, such as `q_text_rates-stdlib_small`. Rates with a failed seed are skipped. Raises
    `FirstStageMissing` if there is no table, ValueError if a row is finished at no rate.
    """
    path = RESULTS / folder / "table.json"
    where = f"docs/results/{folder}/table.json"
    first, _, base = folder.partition("-")
    command = f"lit-lazy ablate run {first} --base {base}"
    try:
        table = _parse_table(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FirstStageMissing(f"needs {where}; run `{command}` and commit its table there") from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{where}: is no table.json ({describe_exception(error)}); take that of {first}") from None
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for row in table.rows:
        name, _, rate = row.variant.rpartition(AT)
        means, measured = found[name], row.metrics.get(table.primary or "")
        if row.status == "complete" and measured is not None and measured.mean is not None:
            means[float(rate)] = measured.mean
    if undecided := [name for name, means in found.items() if not means]:
        raise ValueError(f"{where}: {undecided[0]!r} is finished at no rate; finish `{command}`")
    return {name: min(means, key=lambda rate: means[rate]) for name, means in found.items()}


@lru_cache(maxsize=8)
def _parse_table(text: str) -> Table:
    """Cached: each row of a second stage reads its rate from the same table."""
    return Table.from_json(json.loads(text))


def at_best_rate(row: Row, of: str, folder: str) -> Row:
    """`row` with the best learning rate of the first stage's row `of` (`find_best_rates`), which its note names."""
    rates = find_best_rates(folder)
    if of not in rates:
        raise ValueError(f"docs/results/{folder}/table.json: has no {of!r}; it has {', '.join(rates)}")
    note = f"learning rate {rates[of]:g}, the best of {of} in {folder}"
    return replace(row, changes={**row.changes, "train.lr": rates[of]}, note="; ".join(filter(None, (row.note, note))))
