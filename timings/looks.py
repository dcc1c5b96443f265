"""Errors and power of verdicts at looks, by simulation.

Every scenario draws the contrasts of a claim over the seeds of all looks, and `lit_lazy.table.sequential_looks`
decides. Contrasts have correlation 0.5 over seeds, as differences to one common row have. Wrong support means that a
contrast is at or above 0 (`same`, `no_worse`: at or beyond the margin); wrong refutation that all contrasts hold by
the margin (`same`: by half of it). Between them neither is wrong.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_lazy.support.names_to_paths import PROJECT
from lit_lazy.table.build import read_table
from lit_lazy.table.declaration import BY_STATEMENT, Comparison, Declaration, Rule, Statement
from lit_lazy.table.sequential_looks import decide_draws
from timings.results import collect_provenance, format_provenance, format_row, publish

AT_ONCE, SAMPLE = 2_000, 20_000
RESULTS = PROJECT / "docs" / "results"

LOOKS = (10, 20, 40, 80)
CORRELATION = 0.5
LIMITS = {0.0: 0.03, 1.0: 0.06}
"""Largest rate of wrong support, and of wrong refutation, by the absolute skewness up to which it must hold."""


@dataclass(frozen=True)
class Scenario:
    """A claim of contrasts with these true values, in margins, and standard deviations, in margins.

    skewness: of each contrast. spreads: whether the deviations are 0.7 to 2 times `sd`. For statements `truths` are the
    shares of trainings in which they hold. wrong: the verdict that would be an error, if any.
    """

    rule: Rule
    truths: tuple[float, ...]
    sd: float = 0.0
    skewness: float = 0.0
    spreads: bool = False
    wrong: str = ""


def make_scenarios() -> Iterator[Scenario]:
    """Truths from far beyond the margin to the edges where an error is likeliest."""
    true, wrong = "refuted", "supported"
    for sd in (1.25, 2.5):
        for skewness in (0.0, 1.0, -1.0, -1.75):
            for spreads in (False, True) if skewness == 0 else (False,):
                form = {"sd": sd, "skewness": skewness, "spreads": spreads}
                yield Scenario("lower", (0.0,) * 4, wrong=wrong, **form)
                yield Scenario("lower", (0.0, -3.0, -3.0, -3.0), wrong=wrong, **form)
                yield Scenario("lower", (-1.0,) * 4, wrong=true, **form)
                yield Scenario("same", (1.0, 0.0, 0.0, 0.0), wrong=wrong, **form)
                yield Scenario("same", (0.5, 0.0, 0.0, 0.0), wrong=true, **form)
                yield Scenario("no_worse", (1.0, 0.0, 0.0, 0.0), wrong=wrong, **form)
                yield Scenario("no_worse", (0.0,) * 4, wrong=true, **form)
        for truth in (-1.5, -2.0, -3.0):
            yield Scenario("lower", (truth,) * 4, sd=sd)
        yield Scenario("same", (0.0,) * 4, sd=sd)
        yield Scenario("no_worse", (-1.0,) * 4, sd=sd)
    yield Scenario("mostly", (0.5, 1.0, 1.0, 1.0), wrong=wrong)
    yield Scenario("mostly", (0.75,) * 4, wrong=true)
    for share in (0.2, 0.6, 0.9, 0.98):
        yield Scenario("mostly", (share,) * 4)


def declare(rule: Rule, k: int) -> Declaration:
    """A question of k contrasts with margin 1."""
    statements = tuple(Statement(str(i), Comparison(f"row {i}", ">", 0.5)) for i in range(k))
    return Declaration(
        claim="", source="", primary="", rule=rule, margin=1.0, seeds=tuple(range(LOOKS[-1])),
        looks=LOOKS, statements=statements if rule in BY_STATEMENT else (),
        contrasts={str(i): {f"row {i}": 1.0, "old": -1.0} for i in range(k)},
    )  # fmt: skip


def draw(scenario: Scenario, draws: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the rule reads of each contrast, `[draws, parts, N]`."""
    shape = draws, len(scenario.truths), LOOKS[-1]
    shared = _draw_standard(scenario.skewness, (draws, 1, LOOKS[-1]), rng)
    x = np.sqrt(CORRELATION) * shared + np.sqrt(1 - CORRELATION) * _draw_standard(scenario.skewness, shape, rng)
    truths = np.array(scenario.truths)[:, None]
    if scenario.rule in BY_STATEMENT:
        order = np.arange(1, SAMPLE + 1)  # ranks of a large normal sample give its quantiles
        quantile = np.sort(np.random.default_rng(0).normal(size=SAMPLE))
        below = np.interp(x, quantile, order / (SAMPLE + 1)) < truths
        parts = np.stack([np.zeros(shape), below], axis=2)
    else:
        sd = scenario.sd * (np.geomspace(0.7, 2, len(scenario.truths))[:, None] if scenario.spreads else 1.0)
        parts = (truths + sd * x)[:, :, None]
    return {str(i): parts[:, i] for i in range(len(scenario.truths))}


def _draw_standard(skewness: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Mean 0, variance 1; skewed draws are of a gamma distribution, whose shape is (2 / skewness)^2.

    The sum of a shared and an own part is less skewed than its parts, by 2 * 0.5^1.5 = 0.707, which is made up for.
    """
    if not skewness:
        return rng.normal(size=shape)
    k = (2 * 2 * CORRELATION**1.5 / skewness) ** 2
    return np.sign(skewness) * (rng.gamma(k, size=shape) - k) / np.sqrt(k)


def simulate_scenario(scenario: Scenario, draws: int) -> dict[str, Any]:
    """Shares of supported and refuted claims, and the mean number of seeds, of a scenario."""
    rng, declared = np.random.default_rng(1), declare(scenario.rule, len(scenario.truths))
    parts = [decide_draws(declared, draw(scenario, min(AT_ONCE, draws - i), rng)) for i in range(0, draws, AT_ONCE)]
    return asdict(scenario) | summarise(*(np.concatenate(found) for found in zip(*parts, strict=True)))


def summarise(supported: np.ndarray, refuted: np.ndarray) -> dict[str, float]:
    seeds = np.where(supported + refuted > 0, supported + refuted, LOOKS[-1])
    return {
        "supported": float(np.mean(supported > 0)),
        "refuted": float(np.mean(refuted > 0)),
        "seeds": float(seeds.mean()),
    }


def simulate_observed(path: Path, draws: int) -> Iterator[dict[str, Any]]:
    """A committed question with differences as its rule's, resampled around the edges where an error is likeliest.

    Whole seeds are drawn with replacement, so that skewness, spreads and correlations are those observed.
    """
    table = read_table(path)
    declared = table.declaration
    if declared is None or declared.rule in (*BY_STATEMENT, "removed"):
        return
    n = declared.looks[0]
    values = {name: m.values for name, m in table.measures[declared.primary].items()}
    d = np.array(
        [
            [sum(w * values[row][seed] for row, w in weights.items()) for seed in declared.seeds[:n]]
            for weights in declared.contrasts.values()
        ]
    )
    residual = (d - d.mean(axis=1, keepdims=True)) * np.sqrt(n / (n - 1)) / declared.margin
    sign = -1.0 if declared.rule == "higher" else 1.0
    edges = {"lower": (0.0, -1.0), "higher": (0.0, -1.0), "same": (1.0, 0.5), "no_worse": (1.0, 0.0)}[declared.rule]
    for edge, wrong in zip(edges, ("supported", "refuted"), strict=True):
        rng = np.random.default_rng(1)
        drawn = residual[:, rng.integers(n, size=(draws, LOOKS[-1]))].transpose(1, 0, 2)
        parts = {str(i): sign * edge + drawn[:, i : i + 1] for i in range(len(d))}
        found = summarise(*decide_draws(declare(declared.rule, len(d)), parts))
        yield {"question": table.ablation, "rule": declared.rule, "edge": edge, "wrong": wrong} | found


def find_errors(rows: Sequence[Mapping[str, Any]], skewness: float) -> float:
    """The largest rate of a wrong verdict up to an absolute skewness."""
    return max(row[row["wrong"]] for row in rows if row["wrong"] and abs(row["skewness"]) <= skewness)


def format_markdown(result: Mapping[str, Any]) -> str:
    """The tables of a simulation, as a page."""
    rows = result["scenarios"]
    forms = {"0": (0, False), "0, spreads 0.7 to 2": (0, True), "1": (1, False), "-1": (-1, False),
             "-1.75": (-1.75, False)}  # fmt: skip
    errors_by_form = defaultdict[tuple[str, ...], dict[tuple[float, bool], str]](dict)
    for row in rows:
        if row["wrong"]:
            errors_by_form[_describe(row)][row["skewness"], row["spreads"]] = f"{row[row['wrong']]:.3f}"
    edges = [[*name, *(found.get(form, "–") for form in forms.values())] for name, found in errors_by_form.items()]
    power = [
        [*_describe(row), f"{row['supported']:.3f}", f"{row['refuted']:.3f}", f"{row['seeds']:.0f}"]
        for row in rows
        if not row["wrong"]
    ]
    observed = defaultdict[tuple[str, str], list[str]](list)
    for row in result["observed"]:
        observed[row["question"], row["rule"]].append(f"{row[row['wrong']]:.3f}")
    errors = "; ".join(
        f"{find_errors(rows, skewness):.3f} up to skewness {skewness:g} (limit {limit:g})"
        for skewness, limit in LIMITS.items()
    )
    worst = max(abs(row["skewness"]) for row in rows)
    errors += f"; {find_errors(rows, worst):.3f} up to skewness {worst:g}"
    parts = [
        "# Errors and power of verdicts at looks",
        f"Each claim has four contrasts with correlation {CORRELATION:g} over seeds. Looks are at n = "
        f"{', '.join(map(str, LOOKS))}. Each scenario has {result['draws']:,} draws. Contrasts and standard deviations "
        "are measured in margins; one number means four equal contrasts. In the rule `mostly`, contrasts are shares of "
        "trainings in which a statement holds. Support is wrong if any contrast is 0 (for `same` and `no_worse`: the "
        "margin). Refutation is wrong if all contrasts hold by the margin (for `same`: by half). Largest error: "
        f"{errors}. The JSON file has each scenario.",
        "## Errors, by skewness of the contrasts",
        "\n".join(_format_table([*_SCENARIO, *forms], edges)),
        "## Power, of normal contrasts",
        "\n".join(_format_table([*_SCENARIO, "supported", "refuted", "seeds"], power)),
        "## Errors, of outcomes as observed",
        "Whole seeds of committed questions are drawn with replacement. At the true values used, wrong support and "
        "wrong refutation are likeliest.",
        "\n".join(
            _format_table(
                ["question", "rule", "supported", "refuted"], [[*name, *found] for name, found in observed.items()]
            )
        ),
        format_provenance(result),
    ]
    return "\n\n".join(parts) + "\n"


_SCENARIO = ["rule", "true contrasts", "sd"]


def _describe(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Rule, true contrasts, a repeated one once, and standard deviation of a scenario."""
    truths = row["truths"] if len({*row["truths"]}) > 1 else row["truths"][:1]
    return row["rule"], ", ".join(f"{x:g}" for x in truths), f"{row['sd']:g}" if row["sd"] else "–"


def _format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [format_row(cells) for cells in (header, ["---"] * len(header), *lines)]


def simulate(draws: int, out: Path | None) -> dict[str, Any]:
    """Simulate all settings, print their page, and write both if `out` is given."""
    result = collect_provenance(out) | {
        "draws": draws,
        "scenarios": [simulate_scenario(scenario, draws) for scenario in make_scenarios()],
        "observed": [row for path in sorted(RESULTS.glob("*/table.json")) for row in simulate_observed(path, AT_ONCE)],
    }
    publish(result, format_markdown(result), out, print)
    return result
