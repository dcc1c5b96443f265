"""The simulations behind the default test and the verdicts at looks: draws, candidates, errors of short runs, pages."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from lit_lazy.table.statistics import compute_contrast, holm
from timings import looks, significance
from timings.looks import LOOKS, Scenario, find_errors, make_scenarios, simulate_scenario


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (significance.CHOSEN, lambda a, b: compute_contrast({"a": a, "b": b}, {"a": -1.0, "b": 1.0}).p),
        (significance.CHOSEN, lambda a, b: stats.ttest_rel([*b.values()], [*a.values()]).pvalue),
        ("Welch-Satterthwaite", lambda a, b: stats.ttest_ind([*b.values()], [*a.values()], equal_var=False).pvalue),
    ],
)
def test_candidates_are_what_they_say(name: str, expected: Callable[[dict, dict], float]) -> None:
    """p values of the second row's difference to the first in tables [rows, seeds]."""
    tables = significance.draw(significance.Setting("e^0.5", 5, 4, "additive", 0.5), 6, np.random.default_rng(1))
    p = significance.CANDIDATES[name](tables)
    assert p.shape == (6, 4)
    assert p[:, 0] == pytest.approx([expected(*(dict(enumerate(row)) for row in y[:2].tolist())) for y in tables])


def test_holm_is_the_tables() -> None:
    p = np.random.default_rng(3).uniform(size=(200, 5)) ** 3
    adjusted = [holm({str(i): v for i, v in enumerate(row)}) for row in p.tolist()]
    assert significance.reject_by_holm(p).tolist() == [[a[str(i)] < 0.05 for i in range(5)] for a in adjusted]


def test_tables_have_the_spread_and_the_correlation_of_their_setting() -> None:
    random = np.random.default_rng(4)
    additive = significance.draw(significance.Setting("loud row", 3, 3, "additive", 0.7), 40_000, random)
    assert additive.var((0, 2)) == pytest.approx([1, 0.7 + 0.3 * np.exp(3), 1], rel=0.04)
    assert np.cov(additive[:, 0, 0], additive[:, 1, 0])[0, 1] == pytest.approx(0.7, abs=0.05)
    rules = significance.draw(significance.Setting("2:15", 6, 3, "by rule", 0.7), 40_000, random)
    assert rules.std((0, 2)) == pytest.approx([2, 15, 15, 2, 2, 2], rel=0.02)
    alike = [[i == j or {i, j} in ({0, 5}, {1, 2}, {3, 4}) for i in range(6)] for j in range(6)]
    assert np.corrcoef(rules[:, :, 0].T) == pytest.approx(np.where(np.eye(6), 1, np.where(alike, 0.7, 0)), abs=0.02)


@pytest.mark.parametrize("skewness", [0.0, 1.0, -1.75])
def test_draws_at_looks_have_the_moments_that_a_setting_names(skewness: float) -> None:
    scenario = Scenario("lower", (-1.0, 2.0), sd=0.5, skewness=skewness)
    x = np.stack([part[:, 0] for part in looks.draw(scenario, 2_000, np.random.default_rng(0)).values()])
    assert x.shape == (2, 2_000, LOOKS[-1])
    assert x.mean(axis=(1, 2)) == pytest.approx([-1.0, 2.0], abs=0.01)
    assert x.std(axis=(1, 2)) == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1] == pytest.approx(0.5, abs=0.02)
    assert stats.skew(x[0].ravel()) == pytest.approx(skewness, abs=0.1)
    drawn = looks.draw(Scenario("mostly", (0.5, 0.9)), 2_000, np.random.default_rng(0))
    assert [part[:, 1].mean() for part in drawn.values()] == pytest.approx([0.5, 0.9], abs=0.01)


def test_errors_of_a_short_run_stay_within_the_limits() -> None:
    """500 draws of the edges: at most 0.03 for normal outcomes, and 0.02 for the Monte Carlo error (2.6 sd)."""
    edges = [s for s in make_scenarios() if s.wrong and not s.skewness and s.sd in (0.0, 1.25)]
    rows = [simulate_scenario(scenario, 500) for scenario in edges]
    assert len(rows) >= 14
    assert find_errors(rows, 0.0) <= 0.05
    assert all(row["supported"] + row["refuted"] <= 1 and row["seeds"] >= LOOKS[0] for row in rows)


def test_the_page_of_looks_has_every_scenario_and_committed_question(capsys: pytest.CaptureFixture[str]) -> None:
    result = looks.simulate(10, None)
    page = capsys.readouterr().out
    of_edges, of_power, of_questions = (
        [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][2:]
        for part in page.split("\n## ")[1:]
    )
    errors = [cell for line in of_edges for cell in line[3:] if cell != "–"]
    assert sorted(errors) == sorted(f"{row[row['wrong']]:.3f}" for row in result["scenarios"] if row["wrong"])
    assert len(of_power) == sum(not row["wrong"] for row in result["scenarios"])
    assert 2 * len(of_questions) == len(result["observed"])
    assert "Largest error: " in page
