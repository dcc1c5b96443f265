"""Which test a table's differences should have: candidates compared by simulation.

`python -m timings.default_test --out docs/results/default-test.json` (three minutes on one core). Every
candidate tests the differences of R rows to the first one over n seeds, followed by Holm; what
`lit_lazy.table.statistics` does is one of them. Data are normal: a row has a spread of its own, and a part
`correlation` of the variance comes from the seed. Arrays are [draws, rows, seeds], p values [draws, rows - 1].
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
from timings.results import collect_provenance, publish

Array = NDArray[np.float64]

DRAWS = 20_000
"""Of a setting. The Monte Carlo error of a rate of 0.05 is 0.0015."""
LIMIT = 0.055
EFFECT = 3.0
"""Of half of the rows, where power is measured: in standard deviations of a row of typical spread."""
N_FOR_POWER = 5
ASKED = ("equal", "e^0.5")
"""Spreads for which a candidate has to keep to the limit."""


def p_values(statistic: Array, df: Array | float) -> Array:
    """Of two-sided t tests."""
    return 2 * stdtr(df, -np.abs(statistic))


def differences(y: Array) -> Array:
    mean = y.mean(-1)
    return mean[:, 1:] - mean[:, :1]


def paired_t(y: Array) -> Array:
    d = y[:, 1:] - y[:, :1]
    n = y.shape[-1]
    return p_values(d.mean(-1) / np.sqrt(d.var(-1, ddof=1) / n), n - 1)


def moderated_paired_t(y: Array) -> Array:
    """limma's moderated t over the differences of a table."""
    d = y[:, 1:] - y[:, :1]
    n = y.shape[-1]
    variance, df = moderate_variances(d.var(-1, ddof=1), n - 1)
    return p_values(d.mean(-1) / np.sqrt(variance / n), df)


def welch(y: Array) -> Array:
    return _satterthwaite(y, y.var(-1, ddof=1), y.shape[-1] - 1.0)


def moderated_welch(y: Array) -> Array:
    """Welch's, from moderated variances of the rows."""
    return _satterthwaite(y, *moderate_variances(y.var(-1, ddof=1), y.shape[-1] - 1))


def welch_common_seeds(y: Array) -> Array:
    """Welch's, less what rows of a seed have in common: `lit_lazy.table.statistics.contrast`."""
    rows, n = y.shape[1:]
    variance = y.var(-1, ddof=1)
    scores = (y - y.mean(-1, keepdims=True)) / np.sqrt(variance)[:, :, None]
    mean_correlation = (rows * scores.mean(1).var(-1, ddof=1) - 1) / (rows - 1)
    correlation = np.clip(1 - (1 - mean_correlation) * rows / (rows - 1), 0, 1 - 1e-6)[:, None]
    shared = correlation * np.minimum(variance[:, 1:], variance[:, :1])
    return _satterthwaite(y, variance, n - 1.0, shared)


def block_hc2(y: Array) -> Array:
    """Additive model of rows and seeds, HC2 errors, degrees of freedom of Bell and McCaffrey (2002)."""
    return _block_model_p_values(y, 1)


def block_hc3(y: Array) -> Array:
    """The same with HC3 errors."""
    return _block_model_p_values(y, 2)


def moderated_block(y: Array) -> Array:
    """Additive model of rows and seeds, moderated variances of each row's residuals."""
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
CHOSEN = "Welch-Satterthwaite, seeds in common"
"""What tables use."""


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
    """Variances of a table, each with `df` degrees of freedom, squeezed towards each other; and theirs after it.

    Their prior, a scaled inverse chi^2, is fitted to the moments of their logarithms; the degrees of freedom are at
    most those of all together. Smyth, G. K. (2004), Statistical Applications in Genetics and Molecular Biology 3, 3.
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
    """Which hypotheses Holm rejects."""
    order = np.argsort(p, -1)
    factors = np.arange(p.shape[-1], 0, -1)
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, -1) * factors < ALPHA, -1)
    rejected = np.zeros_like(passed)
    np.put_along_axis(rejected, order, passed, -1)
    return rejected


@dataclass(frozen=True)
class Setting:
    """What a table is like.

    spread: of the rows. equal; e^x, logarithms of the standard deviations are normal with standard deviation x; loud
    row, the first row that is compared has e^1.5 times the others'; quiet baseline, the baseline e^-1.5 times. seeds: a
    seed moves every row by the same ("additive"), or by as many of its standard deviations ("scaled").
    """

    spread: str
    rows: int
    n: int
    seeds: str
    correlation: float


def make_settings() -> Iterator[Setting]:
    tables = [*itertools.product(ASKED, (4, 16)), *((spread, 2) for spread in ASKED)]
    tables += itertools.product(("e^1.5", "loud row", "quiet baseline"), (4, 16))
    for (spread, rows), n in itertools.product(tables, (3, 5, 8)):
        yield Setting(spread, rows, n, "additive", 0.0)
        for seeds, correlation in itertools.product(("additive", "scaled"), (0.35, 0.7)):
            yield Setting(spread, rows, n, seeds, correlation)


def draw(setting: Setting, draws: int, random: np.random.Generator) -> Array:
    """Tables whose rows have the same mean."""
    scale = np.zeros((draws, setting.rows, 1))
    if setting.spread.startswith("e^"):
        scale = float(setting.spread[2:]) * random.standard_normal(scale.shape)
    elif setting.spread == "loud row":
        scale[:, 1] = 1.5
    elif setting.spread == "quiet baseline":
        scale[:, 0] = -1.5
    seed = np.sqrt(setting.correlation) * random.standard_normal((draws, 1, setting.n))
    own = np.sqrt(1 - setting.correlation) * random.standard_normal((draws, setting.rows, setting.n))
    return np.exp(scale) * (seed + own) if setting.seeds == "scaled" else seed + np.exp(scale) * own


def measure_rates(setting: Setting, draws: int, random: np.random.Generator) -> dict[str, dict[str, float]]:
    """By candidate: rates of wrong findings in a family of all differences and in one of a single contrast, and power.

    The family's is the larger of two: where no row differs, and where half of them do.
    """
    null = draw(setting, draws, random)
    apart = draw(setting, draws, random)
    differing = setting.rows // 2
    apart[:, -differing:] += EFFECT
    rates = {}
    for name, test in CANDIDATES.items():
        p, with_effects = test(null), reject_by_holm(test(apart))
        rates[name] = {
            "family": max(reject_by_holm(p).any(-1).mean().item(), with_effects[:, :-differing].any(-1).mean().item()),
            "single": (p[:, 0] < ALPHA).mean().item(),
            "power": with_effects[:, -differing:].mean().item(),
        }
    return rates


def is_in_scope(setting: Mapping[str, Any]) -> bool:
    return setting["spread"] in ASKED and setting["rows"] > 2


def simulate(draws: int, out: Path | None) -> dict[str, Any]:
    """Every setting; printed, and written to `out` (.json) with its table beside it (.md)."""
    words = shlex.join(["python3", "-m", "timings.default_test", *sys.argv[1:]])
    made = collect_provenance(out) | {"command": words}
    random = np.random.default_rng(0)
    rows = [asdict(setting) | {"rates": measure_rates(setting, draws, random)} for setting in make_settings()]
    result = made | {
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


def mean_power(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row["rates"][name]["power"] for row in rows]))


def find_eligible(result: Mapping[str, Any]) -> list[str]:
    """Candidates within the limit in all settings asked for, the most powerful at n = 5 first."""
    rows = [row for row in result["settings"] if is_in_scope(row)]
    kept = [
        n for n in CANDIDATES if max(worst_rate(rows, n, "family"), worst_rate(rows, n, "single")) <= result["limit"]
    ]
    at_n = [row for row in rows if row["n"] == N_FOR_POWER]
    return sorted(kept, key=lambda name: -mean_power(at_n, name))


def find_failing_single(result: Mapping[str, Any]) -> list[str]:
    """Candidates whose family-wise error is within the limit, and whose error of a single contrast is not."""
    rows = [row for row in result["settings"] if is_in_scope(row)]
    return [n for n in CANDIDATES if worst_rate(rows, n, "family") <= result["limit"] < worst_rate(rows, n, "single")]


def format_markdown(result: Mapping[str, Any]) -> str:
    rows = result["settings"]
    asked = [row for row in rows if is_in_scope(row)]
    beyond = [row for row in rows if row["rows"] > 2 and not is_in_scope(row)]
    two = [row for row in rows if row["rows"] == 2]

    def wrong(some: Sequence[Mapping[str, Any]], name: str) -> str:
        return f"{worst_rate(some, name, 'family'):.3f} / {worst_rate(some, name, 'single'):.3f}"

    def power(some: Sequence[Mapping[str, Any]], name: str, n: int, of: int) -> str:
        return f"{mean_power([row for row in some if row['n'] == n and row['rows'] == of], name):.2f}"

    header = ["candidate", "wrong findings", "n = 3", "n = 5", "n = 8", "beyond", "n = 5, beyond", "two rows"]
    lines = [
        [name, wrong(asked, name)]
        + [f"{power(asked, name, n, 4)}, {power(asked, name, n, 16)}" for n in (3, 5, 8)]
        + [wrong(beyond, name), f"{power(beyond, name, 5, 4)}, {power(beyond, name, 5, 16)}", wrong(two, name)]
        for name in CANDIDATES
    ]
    groups = list(dict.fromkeys((row["spread"], row["rows"], row["n"]) for row in rows))
    each = [
        [spread, str(of), str(n)]
        + [
            f"{worst_rate(some, name, 'family'):.3f} / {worst_rate(some, name, 'single'):.3f}, "
            f"{mean_power(some, name):.2f}"
            for name in CANDIDATES
        ]
        for spread, of, n in groups
        for some in [[r for r in rows if (r["spread"], r["rows"], r["n"]) == (spread, of, n)]]
    ]
    made, packages = result["environment"], result["packages"]
    return "\n".join(
        [
            "# Which test a table's differences have",
            "",
            f"Rates over {result['draws']} draws of a setting (Monte Carlo error of 0.05: "
            f"{np.sqrt(0.05 * 0.95 / result['draws']):.4f}), each test at {ALPHA} followed by Holm over the "
            "differences to a baseline row.",
            "",
            "- **Wrong findings**: the worst setting's family-wise error over all differences / the error of a single "
            f"contrast. Asked: at most {result['limit']} for 4 and 16 rows, n = 3, 5, 8, intra-seed correlation 0, "
            "0.35 and 0.7, additive or scaled with a row's spread, spreads equal or differing by e^0.5.",
            f"- **n = 3, 5, 8**: mean power in the same settings, at 4 and 16 rows, for {EFFECT:g} standard deviations "
            "of a typical row in half of the rows.",
            "- **Beyond**: spreads that differ by e^1.5, one row e^1.5 times as loud, a baseline e^1.5 times as quiet. "
            "**Two rows**: a table of two, spreads equal or differing by e^0.5.",
            "",
            *_format_table(header, lines),
            "",
            f"Within the limit where asked, the most powerful at n = {N_FOR_POWER} first: "
            f"{'; '.join(find_eligible(result))}. Within it but for a single contrast: "
            f"{'; '.join(find_failing_single(result)) or 'none'}. Tables use: {result['chosen']}. Reasons: "
            "[decisions.md](../decisions.md).",
            "",
            "## By spread, rows and seeds",
            "",
            "Wrong findings, worst over the kinds of seed effect / of a single contrast, and mean power.",
            "",
            *_format_table(["spread", "rows", "n", *CANDIDATES], each),
            "",
            f"`{result['command']}`, {result['date']}, commit {made['git_sha']}, numpy {packages['numpy']}, scipy "
            f"{packages['scipy']}, Python {made['python']}, {made['machine']}, {made['cpu']}.",
            "",
        ]
    )


def _format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each setting")
    parser.add_argument("--out", type=Path, help="a .json file; the table is written beside it (.md)")
    given = parser.parse_args()
    simulate(given.draws, given.out)
