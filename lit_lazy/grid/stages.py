"""Second stages: ablations whose rows train at the best learning rates that another ablation, the first stage, found.

The rates stand in `ablations/rates.json`, by the first stage's folder and row; `lit-lazy ablate rates` writes them.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from lit_lazy.grid.ablation import FirstStageMissing, Row, require_known
from lit_lazy.grid.grid_table import VERSION
from lit_lazy.support.checked_fields import require
from lit_lazy.support.disk import write_text
from lit_lazy.support.error_messages import explain
from lit_lazy.support.names_to_paths import PROJECT
from lit_lazy.table.results_table import Table

RATES = "ablations/rates.json"
"""In the working directory or the project."""
AT = " at "


def at_rate(row: str, rate: float) -> str:
    """The name of a row at a learning rate, such as `softmax at 0.005`, from which the exact rate can be read."""
    short = f"{rate:g}"
    return f"{row}{AT}{short if float(short) == rate else repr(rate)}"


def find_best_rates(folder: str) -> dict[str, float]:
    """The best learning rate of each row in a first stage's folder, such as `rivals_rates-backcopy`.

    Raises `FirstStageMissing` if they are not known, ValueError if the file is damaged.
    """
    for root in (Path.cwd(), PROJECT):
        if folder in (rates := _read_rates(root / RATES)):
            return dict(rates[folder])
    first, _, base = folder.partition("-")
    command = f"lit-lazy ablate run {first} --base {base}"
    raise FirstStageMissing(f"needs the rates of {folder}; `{command}`, then `lit-lazy ablate rates runs/{folder}`")


def _read_rates(path: Path) -> Mapping[str, Mapping[str, float]]:
    if not path.exists():
        return {}
    with explain(f"{path}: is no table of rates", "put a copy back, or delete it", OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))


def save_best_rates(table: Table, folder: str) -> dict[str, tuple[float, str]]:
    """Add the best rates of a first stage to the file of rates in the working directory.

    Returns them, each with words if it is the lowest or the highest of several.
    """
    path, best, means = Path(RATES), choose_best_rates(table), _compute_means(table)
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps({**_read_rates(path), folder: best}, indent=1, sort_keys=True) + "\n")
    return {row: (rate, _describe_edge(rate, [*means[row]])) for row, rate in best.items()}


def _describe_edge(rate: float, rates: Sequence[float]) -> str:
    which = {min(rates): "lowest", max(rates): "highest"}.get(rate, "") if len(rates) > 1 else ""
    return which and f" (the {which} of {len(rates)}: a better one may lie beyond)"


def choose_best_rates(table: Table) -> dict[str, float]:
    """The learning rate with the best mean primary outcome for each row, among the rates in row names.

    Rates with a failed or undefined seed are skipped, and rows from before a change. Raises a one-line ValueError if a
    row is finished at no rate or with other seeds at some rates, if a cell still has no result, or if the primary
    outcome has no better direction.
    """
    means = _compute_means(table)
    best = min if table.columns_by_key[table.primary or ""].better == "lower" else max
    return {row: best(by_rate, key=lambda rate: by_rate[rate]) for row, by_rate in means.items()}


def _compute_means(table: Table) -> dict[str, dict[float, float]]:
    """For each row, the mean primary outcome by learning rate, all over the same seeds."""
    column = table.columns_by_key.get(table.primary or "")
    better = None if column is None else column.better
    require(
        better is not None, f"{table.ablation}: primary", table.primary, "has no direction; give its column better="
    )
    found: dict[str, dict[float, float]] = defaultdict(dict)
    seeds: dict[str, set[int]] = {}
    for row in table.rows:
        name, _, rate = row.variant.rpartition(AT)
        if VERSION in rate:
            continue
        fix = f"names no rate, such as {at_rate(row.variant, 0.01)}"
        require(bool(name) and _is_rate(rate), f"{table.ablation}: row", row.variant, fix)
        means, measured = found[name], table.measures.get(table.primary or "", {}).get(row.variant)
        if (
            row.status == "complete"
            and measured is not None
            and len(measured.values) == sum(map(len, row.cells.values()))
        ):
            same = seeds.setdefault(name, {*measured.values}) == {*measured.values}
            fix = f"has other seeds than {name!r} at another rate; train all of {name!r} with the same"
            require(same, f"{table.ablation}: row", row.variant, fix)
            means[float(rate)] = fmean(measured.values.values())
    if undecided := [name for name, means in found.items() if not means]:
        raise ValueError(f"{table.ablation}: {undecided[0]!r} is finished at no rate; finish `{table.command}`")
    unfinished = [row.variant for row in table.rows if row.cells.keys() & {"missing", "waiting", "running"}]
    fix = f"have seeds without a result, so another rate may be the best; finish `{table.command}`"
    require(not unfinished, f"{table.ablation}: rows", unfinished, fix)
    return found


def _is_rate(text: str) -> bool:
    with suppress(ValueError):
        return 0 < float(text) < math.inf
    return False


def at_best_rate(row: Row, of: str, folder: str) -> Row:
    """`row` with the best learning rate of the first stage's row `of` (`find_best_rates`), which its note names."""
    rates = find_best_rates(folder)
    require_known(f"{RATES}: {folder}: row", [of], rates)
    note = f"learning rate {rates[of]:g}, the best of {of} in {folder}"
    return replace(row, changes={**row.changes, "train.lr": rates[of]}, note="; ".join(filter(None, (row.note, note))))
