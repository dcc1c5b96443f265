"""The simulation of verdicts at looks: its draws, and errors of a short run."""

import numpy as np
import pytest
from scipy.stats import skew

from timings.looks import LOOKS, Scenario, draw, find_errors, make_scenarios, simulate, simulate_scenario


@pytest.mark.parametrize("skewness", [0.0, 1.0, -1.75])
def test_draws_have_the_moments_that_a_setting_names(skewness: float) -> None:
    scenario = Scenario("lower", (-1.0, 2.0), sd=0.5, skewness=skewness)
    x = np.stack([part[:, 0] for part in draw(scenario, 2_000, np.random.default_rng(0)).values()])
    assert x.shape == (2, 2_000, LOOKS[-1])
    assert x.mean(axis=(1, 2)) == pytest.approx([-1.0, 2.0], abs=0.01)
    assert x.std(axis=(1, 2)) == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1] == pytest.approx(0.5, abs=0.02)
    assert skew(x[0].ravel()) == pytest.approx(skewness, abs=0.1)


def test_a_statement_holds_in_its_share_of_seeds() -> None:
    drawn = draw(Scenario("mostly", (0.5, 0.9)), 2_000, np.random.default_rng(0))
    assert [part[:, 1].mean() for part in drawn.values()] == pytest.approx([0.5, 0.9], abs=0.01)


def test_errors_of_a_short_run_stay_within_the_limits() -> None:
    """500 draws of the edges: at most 0.03 for normal outcomes, and 0.02 for the Monte Carlo error (2.6 sd)."""
    edges = [s for s in make_scenarios() if s.wrong and not s.skewness and s.sd in (0.0, 1.25)]
    rows = [simulate_scenario(scenario, 500) for scenario in edges]
    assert len(rows) >= 14
    assert find_errors(rows, 0.0) <= 0.05
    assert all(row["supported"] + row["refuted"] <= 1 and row["seeds"] >= LOOKS[0] for row in rows)


def test_the_page_has_every_scenario_and_committed_question(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(10, None)
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
