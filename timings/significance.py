"""Choice of the test for a table's differences: candidates compared by simulation.

`python -m timings.significance --out docs/results/default-test.json` (five minutes on one core). Every candidate tests
the differences of R rows to the first row over n seeds, followed by Holm. One candidate is the test of
`lit_lazy.table.statistics`. Data are normal: each row has its own spread, and a share `correlation` of the variance
comes from the seed, alike for all rows or only for those of one rule. Arrays are [draws, rows, seeds], p values
[draws, rows - 1].
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, polygamma, stdtr

from lit_lazy.table.statistics import ALPHA
from timings.results import collect_provenance, format_row, publish

Array = NDArray[np.float64]

DRAWS = 20_000
"""Per setting. The Monte Carlo error of a rate of 0.05 is 0.0015."""
LIMIT = 0.055
EFFECT = 3.0
"""Effect of half of the rows for the power, in standard deviations of a row of typical spread."""
N_FOR_POWER = 5
ALIKE = ("equal", "e^0.5")
BY_RULE = ("2:1", "1:2", "15:1", "1:15")
REQUIRED = (*ALIKE, *BY_RULE)
"""Spreads for which a candidate must be within the limit."""


def p_values(statistic: Array, df: Array | float) -> Array:
    """p values of two-sided t tests."""
    return 2 * stdtr(df, -np.abs(statistic))


def differences(y: Array) -> Array:
    mean = y.mean(-1)
    return mean[:, 1:] - mean[:, :1]


def paired_t(y: Array) -> Array:
    """The t test of the differences per seed: `lit_lazy.table.statistics.compute_contrast`."""
    d = y[:, 1:] - y[:, :1]
    n = y.shape[-1]
    return p_values(d.mean(-1) / np.sqrt(d.var(-1, ddof=1) / n), n - 1)


def moderated_paired_t(y: Array) -> Array:
    """limma's moderated t test over the differences of a table."""
    d = y[:, 1:] - y[:, :1]
    n = y.shape[-1]
    variance, df = moderate_variances(d.var(-1, ddof=1), n - 1)
    return p_values(d.mean(-1) / np.sqrt(variance / n), df)


def welch(y: Array) -> Array:
    return _satterthwaite(y, y.var(-1, ddof=1), y.shape[-1] - 1.0)


def moderated_welch(y: Array) -> Array:
    """Welch's test with moderated row variances."""
    return _satterthwaite(y, *moderate_variances(y.var(-1, ddof=1), y.shape[-1] - 1))


def welch_common_seeds(y: Array) -> Array:
    """Welch's test without the variance that rows of a seed share, the test of the first round of questions."""
    rows, n = y.shape[1:]
    variance = y.var(-1, ddof=1)
    scores = (y - y.mean(-1, keepdims=True)) / np.sqrt(variance)[:, :, None]
    mean_correlation = (rows * scores.mean(1).var(-1, ddof=1) - 1) / (rows - 1)
    correlation = np.clip(1 - (1 - mean_correlation) * rows / (rows - 1), 0, 1 - 1e-6)[:, None]
    shared = correlation * np.minimum(variance[:, 1:], variance[:, :1])
    return _satterthwaite(y, variance, n - 1.0, shared)


def block_hc2(y: Array) -> Array:
    """Additive model of rows and seeds with HC2 errors and the degrees of freedom of Bell and McCaffrey (2002)."""
    return _block_model_p_values(y, 1)


def block_hc3(y: Array) -> Array:
    """The same with HC3 errors."""
    return _block_model_p_values(y, 2)


def moderated_block(y: Array) -> Array:
    """Additive model of rows and seeds with moderated variances of each row's residuals."""
    rows, n = y.shape[1:]
    df = (n - 1) * (1 - 1 / rows)
    return _satterthwaite(y, *moderate_variances((_residuals(y) ** 2).sum(-1) / df, df))


CANDIDATES: dict[str, Callable[[Array], Array]] = {
    "paired t": paired_t,
    "Welch-Satterthwaite": welch,
    "Welch-Satterthwaite, seeds in common": welch_common_seeds,
    "block model, HC2": block_hc2,
    "block model, HC3": block_hc3,
    "moderated t, paired": moderated_paired_t,
    "moderated t, rows": moderated_welch,
    "moderated t, block model": moderated_block,
}
CHOSEN = "paired t"
"""The test that tables use."""


def _satterthwaite(y: Array, variance: Array, df: Array | float, shared: Array | float = 0.0) -> Array:
    a, b = variance[:, 1:], variance[:, :1]
    df_a, df_b = (df[:, 1:], df[:, :1]) if isinstance(df, np.ndarray) else (df, df)
    of_both = (a + b) ** 2 / (a**2 / df_a + b**2 / df_b)
    return p_values(differences(y) / np.sqrt((a + b - 2 * shared) / y.shape[-1]), of_both)


def _residuals(y: Array) -> Array:
    return y - y.mean(-1, keepdims=True) - y.mean(1, keepdims=True) + y.mean((1, 2), keepdims=True)


def _block_model_p_values(y: Array, power: int) -> Array:
    rows, n = y.shape[1:]
    leverage = 1 / rows + 1 / n - 1 / (rows * n)
    squares = (_residuals(y) ** 2).sum(-1)
    variance = (squares[:, 1:] + squares[:, :1]) / n**2 / (1 - leverage) ** power
    df = 2 * (n - 1) * (1 - 1 / rows) ** 2 / ((1 - 1 / rows) ** 2 + 1 / rows**2)
    return p_values(differences(y) / np.sqrt(variance), df)


def moderate_variances(variance: Array, df: float) -> tuple[Array, Array]:
    """Variances of a table, each with `df` degrees of freedom, shrunk towards each other, and their new df.

    The prior, a scaled inverse chi^2, is fitted to the moments of the logarithms. The new df are at most those of all
    variances together. Smyth, G. K. (2004), Statistical Applications in Genetics and Molecular Biology 3, 3.
    """
    if variance.shape[-1] == 1:
        return variance, np.full(variance.shape, float(df))
    logs = np.log(variance) - digamma(df / 2) + np.log(df / 2)
    excess = logs.var(-1, ddof=1, keepdims=True) - polygamma(1, df / 2)
    finite = excess > 0
    prior_df = 2 * trigamma_inverse(np.where(finite, excess, 1.0))
    fitted = np.exp(logs.mean(-1, keepdims=True) + digamma(prior_df / 2) - np.log(prior_df / 2))
    prior = np.where(finite, fitted, variance.mean(-1, keepdims=True))
    weight = np.where(finite, prior_df / (prior_df + df), 1.0)
    after = np.minimum(np.where(finite, prior_df + df, np.inf), df * variance.shape[-1])
    return weight * prior + (1 - weight) * variance, np.broadcast_to(after, variance.shape)


def trigamma_inverse(value: Array) -> Array:
    """Newton's method on 1 / trigamma, which is convex (Smyth's appendix)."""
    x = 0.5 + 1 / value
    for _ in range(20):
        now = polygamma(1, x)
        x = x + now * (1 - now / value) / polygamma(2, x)
    return x


def reject_by_holm(p: Array) -> Array:
    """Mask of the hypotheses that Holm's method rejects at ALPHA."""
    order = np.argsort(p, -1)
    factors = np.arange(p.shape[-1], 0, -1)
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, -1) * factors < ALPHA, -1)
    rejected = np.zeros_like(passed)
    np.put_along_axis(rejected, order, passed, -1)
    return rejected


@dataclass(frozen=True)
class Setting:
    """Distribution of a table.

    spread: standard deviations of the rows. "equal"; "e^x": their logarithms are normal with standard deviation x;
    "loud row": that of the first compared row is e^1.5 times the others; "quiet baseline": that of the baseline is
    e^-1.5 times the others; "a:b": a in the baseline's rule and every second one, b in the others. seeds: a seed moves
    every row by the same amount ("additive"), or by the same number of the row's standard deviations ("scaled"), or
    does so independently for each rule ("by rule").
    """

    spread: str
    rows: int
    n: int
    seeds: str
    correlation: float

    @property
    def rules(self) -> NDArray[np.int_]:
        """The rule of each row: two rows each, the first and the last row of the same."""
        return (np.arange(self.rows) + 1) // 2 % (self.rows // 2)

    @property
    def scales(self) -> Array:
        """Standard deviations of the rows whose seeds are "by rule"."""
        own, other = map(float, self.spread.split(":"))
        return np.where(self.rules % 2, other, own)

    @property
    def effects(self) -> Array | float:
        """What the second half of the rows differs by where rows differ."""
        if self.seeds != "by rule":
            return EFFECT
        shared = self.correlation * (self.rules == 0)
        variances = self.scales**2 + self.scales[0] ** 2 - 2 * shared * self.scales * self.scales[0]
        return (EFFECT * np.sqrt(variances / 2))[-(self.rows // 2) :, None]


def make_settings() -> Iterator[Setting]:
    for spread, rows, n, correlation in itertools.product(BY_RULE, (4, 16), (3, 5, 8), (0.7, 0.99)):
        yield Setting(spread, rows, n, "by rule", correlation)
    tables = [*itertools.product(ALIKE, (4, 16)), *((spread, 2) for spread in ALIKE)]
    tables += itertools.product(("e^1.5", "loud row", "quiet baseline"), (4, 16))
    for (spread, rows), n in itertools.product(tables, (3, 5, 8)):
        yield Setting(spread, rows, n, "additive", 0.0)
        for seeds, correlation in itertools.product(("additive", "scaled"), (0.35, 0.7)):
            yield Setting(spread, rows, n, seeds, correlation)


def draw(setting: Setting, draws: int, random: np.random.Generator) -> Array:
    """Draw tables whose rows have the same mean."""
    own = np.sqrt(1 - setting.correlation) * random.standard_normal((draws, setting.rows, setting.n))
    if setting.seeds == "by rule":
        seed = random.standard_normal((draws, setting.rows // 2, setting.n))[:, setting.rules]
        return setting.scales[:, None] * (np.sqrt(setting.correlation) * seed + own)
    scale = np.zeros((draws, setting.rows, 1))
    if setting.spread.startswith("e^"):
        scale = float(setting.spread[2:]) * random.standard_normal(scale.shape)
    elif setting.spread == "loud row":
        scale[:, 1] = 1.5
    elif setting.spread == "quiet baseline":
        scale[:, 0] = -1.5
    seed = np.sqrt(setting.correlation) * random.standard_normal((draws, 1, setting.n))
    return np.exp(scale) * (seed + own) if setting.seeds == "scaled" else seed + np.exp(scale) * own


def measure_rates(setting: Setting, draws: int, random: np.random.Generator) -> dict[str, dict[str, float]]:
    """By candidate: error rate over the family of all differences, error rate of a single contrast, and power.

    The family-wise rate is the larger of two: with no row different, and with half of the rows different. Where rows
    are of rules, the single contrast is the worse of one across rules and one within; that within is also kept apart.
    """
    null = draw(setting, draws, random)
    apart = draw(setting, draws, random)
    differing = setting.rows // 2
    apart[:, -differing:] += setting.effects
    rates = {}
    for name, test in CANDIDATES.items():
        p, with_effects = test(null), reject_by_holm(test(apart))
        first, last = ((p[:, row] < ALPHA).mean().item() for row in (0, -1))
        rates[name] = {
            "family": max(reject_by_holm(p).any(-1).mean().item(), with_effects[:, :-differing].any(-1).mean().item()),
            "single": first,
            "power": with_effects[:, -differing:].mean().item(),
        }
        if setting.seeds == "by rule":
            within = {"within": last, "power within": with_effects[:, -1].mean().item()}
            rates[name] |= {"single": max(first, last), "across": first, **within}
    return rates


def is_in_scope(setting: Mapping[str, Any]) -> bool:
    return setting["spread"] in REQUIRED and setting["rows"] > 2


def simulate(draws: int, out: Path | None) -> dict[str, Any]:
    """Simulate every setting, print the table, and write `out` (.json) and the table (.md)."""
    command = shlex.join(["python3", "-m", "timings.significance", *sys.argv[1:]])
    provenance = collect_provenance(out) | {"command": command}
    random = np.random.default_rng(0)
    rows = [asdict(setting) | {"rates": measure_rates(setting, draws, random)} for setting in make_settings()]
    result = provenance | {
        "packages": {name: version(name) for name in ("numpy", "scipy")},
        "draws": draws,
        "limit": LIMIT,
        "chosen": CHOSEN,
        "settings": rows,
    }
    publish(result, format_markdown(result), out, print)
    return result


def worst_rate(rows: Sequence[Mapping[str, Any]], name: str, rate: str) -> float:
    return max(row["rates"][name][rate] for row in rows)


def mean_power(rows: Sequence[Mapping[str, Any]], name: str, rate: str = "power") -> float:
    return float(np.mean([row["rates"][name][rate] for row in rows]))


def find_eligible(result: Mapping[str, Any]) -> list[str]:
    """Candidates within the limit in all settings in scope, sorted by falling power at n = 5."""
    rows = [row for row in result["settings"] if is_in_scope(row)]
    eligible = [
        n for n in CANDIDATES if max(worst_rate(rows, n, "family"), worst_rate(rows, n, "single")) <= result["limit"]
    ]
    at_n = [row for row in rows if row["n"] == N_FOR_POWER]
    return sorted(eligible, key=lambda name: -mean_power(at_n, name))


def find_failing_single(result: Mapping[str, Any]) -> list[str]:
    """Candidates whose family-wise error is within the limit while that of a single contrast exceeds it."""
    rows = [row for row in result["settings"] if is_in_scope(row)]
    return [n for n in CANDIDATES if worst_rate(rows, n, "family") <= result["limit"] < worst_rate(rows, n, "single")]


def format_markdown(result: Mapping[str, Any]) -> str:
    rows = result["settings"]
    in_scope = [row for row in rows if is_in_scope(row)]
    beyond = [row for row in rows if row["rows"] > 2 and not is_in_scope(row)]
    two = [row for row in rows if row["rows"] == 2]
    by_rule = [row for row in rows if row["seeds"] == "by rule"]

    def format_errors(some: Sequence[Mapping[str, Any]], name: str) -> str:
        return f"{worst_rate(some, name, 'family'):.3f} / {worst_rate(some, name, 'single'):.3f}"

    def format_power(some: Sequence[Mapping[str, Any]], name: str, n: int) -> str:
        by_rows = ([row for row in some if row["n"] == n and row["rows"] == size] for size in (4, 16))
        return ", ".join(f"{mean_power(part, name):.2f}" for part in by_rows)

    def format_range(name: str, rate: str) -> str:
        values = [row["rates"][name][rate] for row in by_rule]
        return f"{min(values):.3f} to {max(values):.3f}"

    header = ["candidate", "false findings", "n = 3", "n = 5", "n = 8", "beyond", "n = 5, beyond", "two rows"]
    lines = [
        [name, format_errors(in_scope, name)]
        + [format_power(in_scope, name, n) for n in (3, 5, 8)]
        + [format_errors(beyond, name), format_power(beyond, name, 5), format_errors(two, name)]
        for name in CANDIDATES
    ]
    header_by_rule = ["candidate", "family", "across", "within", "power, n = 3", "n = 5", "n = 8"]
    lines_by_rule = [
        [name, f"{worst_rate(by_rule, name, 'family'):.3f}", format_range(name, "across"), format_range(name, "within")]
        + [
            ", ".join(
                f"{mean_power([row for row in by_rule if row['n'] == n], name, rate):.2f}"
                for rate in ("power", "power within")
            )
            for n in (3, 5, 8)
        ]
        for name in CANDIDATES
    ]
    environment, packages = result["environment"], result["packages"]
    return "\n".join(
        [
            "# Test for a table's differences",
            "",
            f"Each setting has {result['draws']} draws: at a rate of 0.05, the Monte Carlo error is "
            f"{np.sqrt(0.05 * 0.95 / result['draws']):.4f}. Tests at {ALPHA} are followed by Holm's method over the "
            "differences to a baseline row.",
            "",
            "- **False findings**: worst family-wise error of all differences / worst error of one contrast. "
            f"Both must be at most {result['limit']} in the required settings: 4 and 16 rows; n = 3, 5, 8; intra-seed "
            "correlation 0, 0.35 and 0.7; seed effects additive or scaled with a row's spread; spreads equal or "
            "differing by e^0.5; rows of rules (below).",
            "- **n = 3, 5, 8**: mean power in required settings with 4 rows, then 16. Half the rows differ from the "
            f"baseline by {EFFECT:g} standard deviations of a typical row.",
            "- **Beyond**: spreads differ by e^1.5, or one row has e^1.5 times the others' spread (the baseline: "
            "e^-1.5 times). **Two rows**: spreads are equal or differ by e^0.5.",
            "",
            *_format_table(header, lines),
            "",
            f"Candidates within the limit in all required settings, by power at n = {N_FOR_POWER}: "
            f"{'; '.join(find_eligible(result))}. Candidates beyond it only for one contrast: "
            f"{'; '.join(find_failing_single(result)) or 'none'}. Tables use {result['chosen']}. Reasons: "
            "[decisions.md](../decisions.md).",
            "",
            "## Rows of rules",
            "",
            "These settings resemble this project's tables. Each rule has two rows with correlation 0.7 or 0.99 over "
            "seeds; rows of different rules are uncorrelated. Alternate rules, including or excluding the baseline's, "
            "have 2 or 15 times the others' spread. Column `family`: greatest family-wise error. Columns `across` and "
            "`within`: range of one difference's error across rules, or within one. Power is the mean over all rows, "
            f"then within a rule, for a difference of {EFFECT / np.sqrt(2):.2f} of its standard deviations.",
            "",
            *_format_table(header_by_rule, lines_by_rule),
            "",
            f"The JSON file has all {len(rows)} settings. "
            f"`{result['command']}`, {result['date']}, commit {environment['git_sha']}, numpy {packages['numpy']}, "
            f"scipy {packages['scipy']}, Python {environment['python']}, {environment['machine']}, "
            f"{environment['cpu']}.",
            "",
        ]
    )


def _format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [format_row(cells) for cells in (header, ["---"] * len(header), *lines)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws per setting")
    parser.add_argument("--out", type=Path, help="a .json file; the table gets the same name with .md")
    options = parser.parse_args()
    simulate(options.draws, options.out)
