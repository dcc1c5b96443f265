"""Stand-ins for the committed tables of first stages, for tests of their readers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lit_lazy.grid import stages
from lit_lazy.grid.stages import at_rate
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.records import Column, Observation, RowInfo

NAME = "q_text_rates-stdlib_small"
RATES = (0.002, 0.005, 0.01)
BEST = {"softmax": 0.005, "softmax + bias": 0.002, "elastic": 0.01, "lazy": 0.005}
FRONTIER = "frontier_rates-frontier_100k", "frontier_rates-frontier_300k"
FRONTIER_RATES = (0.002, 0.004, 0.008, 0.016)
FRONTIER_BEST = BEST | {
    "softmax + bias": 0.008,
    "elastic": 0.004,
    "softmax": 0.008,
    "lazy": 0.016,
    "softmax + output gate": 0.004,
}
STAGES = {NAME: (RATES, BEST)} | dict.fromkeys(FRONTIER, (FRONTIER_RATES, FRONTIER_BEST))
"""Of the first stages of all questions: the rates, and the best of each row."""
LOSS = Column("loss/bits_per_byte", "loss")


def write_table(
    results: Path,
    failed: dict[str, int] | None = None,
    name: str = NAME,
    best: Mapping[str, float] = BEST,
    rates: Sequence[float] = RATES,
) -> Path:
    """Write a table.json to a results folder in which each row is best at `best`. failed: a failed seed per row."""
    infos, cells = [], []
    ablation, _, base = name.partition("-")
    for variant, lowest in best.items():
        for rate in rates:
            row = at_rate(variant, rate)
            infos.append(RowInfo(row, "ours", (10, 11), base))
            for seed in (10, 11):
                loss = 2.0 + 0.01 * seed + abs(rate - lowest)
                status = "failed" if (failed or {}).get(row) == seed else "complete"
                cells.append(Observation(row, seed, status, {LOSS.key: loss}))
    primary = (LOSS.key,)
    spec = TableSpec(ablation, base, infos[0].variant, infos, [LOSS], [], "command", primary=primary)
    table = build_table(spec, cells)
    path = results / name / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table.to_json()))
    return path


def write_all(results: Path, fail_best: bool = False) -> None:
    """Write the tables of all first stages of questions. fail_best: with a failed seed at each row's best rate."""
    for name, (rates, best) in STAGES.items():
        failed = {at_rate(row, rate): 10 for row, rate in best.items()} if fail_best else None
        write_table(results, failed, name, best, rates)


def use_stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let second stages read the stand-ins instead of the committed tables."""
    write_all(folder)
    monkeypatch.setattr(stages, "RESULTS", folder)
