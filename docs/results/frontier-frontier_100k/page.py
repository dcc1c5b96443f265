"""Writes README.md and ladder.png beside it from the packed cells; run without arguments.

Every number of the page is computed from the cells by the project's own statistics.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from lit_lazy.figures.canvas import FIRST, NEUTRAL, SECOND, WIDTH, draw_legend_below, new_figure, save_figure, use_style
from lit_lazy.grid.reused_results import read_pack
from lit_lazy.table.statistics import FEWEST_SEEDS, Effect, Estimate, compute_contrast, estimate
from lit_lazy.training.run_folder import RunResult

HERE = Path(__file__).parent
CELLS = HERE / "cells.jsonl.xz"
RATES = HERE / "rates.jsonl.xz"
"""Cells of frontier_rates_full, whose rows are named by rule and rate."""
ROW = re.compile(r"(?P<rule>.+) (?P<size>\d+[km])(?: x(?P<ratio>\d+))?")
USUAL = 20
"""Tokens per parameter of a row that names none."""
LOSS, SINK, ZEROS, FAR = "loss/val", "sink/rate", "sparsity/over_null", "length_4x/loss"
SOFTMAX, BIASED, LAZY = "softmax", "softmax + bias", "lazy"
SINKS = (SOFTMAX, LAZY)
COLOURS = {
    SOFTMAX: SECOND,
    BIASED: "#E69F00",
    "softmax + output gate": NEUTRAL,
    "elastic": "#56B4E9",
    LAZY: FIRST,
}
"""By rule, in the order of the legend."""
OPENING = """\
# Compute-optimal language models

These language models learned Python source code from scratch, on {usual} tokens for each parameter of their blocks
([method](../../method.md), "A ladder"). Each rule has its best learning rate at each size.
"""
CLOSING = """\
## Limits

The text is source code, not prose. Tried: one recipe, a vocabulary of 4,096, at most {largest} parameters.
At 1m there are five seeds of three rules, for no question: over softmax, Lazy Attention gained less than at 300k (the
intervals do not overlap).
Learning rates were chosen with one seed and a quarter of the tokens ([100k](../frontier_rates-frontier_100k/table.md),
[300k](../frontier_rates-frontier_300k/table.md), [1m](../frontier_rates-frontier_1m/table.md)). With all tokens at
300k, twice the rate changes the loss by {doubled}
([rates.jsonl.xz](rates.jsonl.xz)).
So the rate of softmax + bias was too low. At twice the rate,
[Lazy Attention still gains](../q_frontier_length_2-frontier_100k/table.md) at four times the length.
The {count} cells took at most {hours:.0f} hours of one CPU core, at commits
{commits}. [page.py](page.py) writes this page and its figure from [cells.jsonl.xz](cells.jsonl.xz).
"""


@dataclass(frozen=True, order=True)
class Place:
    """Where on the ladder a row stands."""

    parameters: int
    ratio: int
    """Tokens per parameter."""
    size: str


@dataclass(frozen=True)
class Ladder:
    """The finished cells: metrics by place, rule and seed."""

    cells: Mapping[Place, Mapping[str, Mapping[int, RunResult]]]

    @classmethod
    def read(cls, path: Path) -> "Ladder":
        pack = read_pack(path)
        cells: defaultdict[Place, defaultdict[str, dict[int, RunResult]]] = defaultdict(lambda: defaultdict(dict))
        for row, result in ((cell.row, cell.result) for cell in pack.values()):
            named = ROW.fullmatch(row)
            assert named is not None, row
            model = result.config["model"]
            parameters = model["n_layers"] * model["d_model"] * (4 * model["d_model"] + 3 * model["d_ff"])
            place = Place(parameters, int(named["ratio"] or USUAL), named["size"])
            cells[place][named["rule"]][result.config["seed"]] = result
        return cls({place: cells[place] for place in sorted(cells)})

    @property
    def results(self) -> list[RunResult]:
        return [result for rules in self.cells.values() for seeds in rules.values() for result in seeds.values()]

    @property
    def usual(self) -> list[Place]:
        """The places at USUAL tokens a parameter, the smallest model first."""
        return [place for place in self.cells if place.ratio == USUAL]

    def collect(self, place: Place, rule: str, metric: str) -> dict[int, float | None]:
        """The values of a metric by seed."""
        return {seed: result.metrics.get(metric) for seed, result in self.cells[place].get(rule, {}).items()}

    def estimate(self, place: Place, rule: str, metric: str) -> Estimate:
        return estimate(self.collect(place, rule, metric))

    def compare(self, place: Place, rule: str, baseline: str, metric: str) -> Effect:
        """A rule minus another one, paired by seed."""
        rows = {name: self.collect(place, name, metric) for name in (rule, baseline)}
        return compute_contrast(rows, {rule: 1, baseline: -1})


def compare_rates(ladder: Ladder) -> str:
    """What twice the rate changes the loss of each rule by, in the mean of its seeds."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    usual = next(rules for place, rules in ladder.cells.items() if place.size == "300k")
    for cell in read_pack(RATES).values():
        rule, config = cell.row.partition(" at ")[0], cell.result.config
        same = usual[rule].get(config["seed"])
        if same is not None and config["train"]["lr"] == 2 * same.config["train"]["lr"]:
            found[rule].append(cell.result.metrics[LOSS] - same.metrics[LOSS])
    return ", ".join(f"{fmean(x):+.3f} nats under {rule} (n = {len(x)})" for rule, x in found.items())


def get_half_width(found: Effect | Estimate) -> float | None:
    """Of the 95 % interval, from three seeds on: that of two says nothing."""
    return found.ci95 if found.n >= FEWEST_SEEDS else None


def format_interval(found: Effect | Estimate, digits: int, scale: float = 1.0, sign: str = "") -> str:
    """A mean with the half-width of its interval; "" without a value."""
    if found.mean is None:
        return ""
    width = get_half_width(found)
    return f"{found.mean * scale:{sign}.{digits}f}" + (f" ±{width * scale:.{digits}f}" if width else "")


def describe(ladder: Ladder) -> list[str]:
    """A sentence on each claim, and one on other numbers of tokens."""

    def compare(place: Place, baseline: str, metric: str) -> str:
        return format_interval(ladder.compare(place, LAZY, baseline, metric), 3, sign="+")

    def measure(place: Place, rule: str, metric: str) -> str:
        return format_interval(ladder.estimate(place, rule, metric), 1, 100)

    sizes = ladder.usual
    return [
        "**Loss**, Lazy Attention's minus softmax's: "
        + join((compare(place, SOFTMAX, LOSS), f"nats a token at {place.size}") for place in sizes),
        "**Sink**, share of heads and sequences with one: "
        + join((measure(place, rule, SINK), f"% under {rule} at {place.size}") for place in sizes for rule in SINKS),
        "**Sparsity**, Lazy Attention's zeros minus those that Gaussian scores give: "
        + join((measure(place, LAZY, ZEROS), f"points at {place.size}") for place in sizes),
        "**Length**, Lazy Attention's loss minus that of softmax + bias, at four times the training length: "
        + join((compare(place, BIASED, FAR), f"nats at {place.size}") for place in sizes),
        "**Tokens**, Lazy Attention's loss minus softmax's, with other numbers of tokens a parameter: "
        + join(
            (compare(place, SOFTMAX, LOSS), f"nats with {place.ratio} at {place.size}")
            for place in ladder.cells
            if place.ratio != USUAL
        ),
    ]


def join(parts: Iterable[tuple[str, str]]) -> str:
    """The values that are known, each with its unit and place, as the end of a sentence."""
    return ", ".join(f"{value} {unit}" for value, unit in parts if value) + "."


def format_table(ladder: Ladder) -> list[str]:
    """A line of Markdown for each row of the ladder."""
    head = (
        "size",
        "tokens a parameter",
        "rule",
        "seeds",
        "loss",
        "other packages",
        "sink %",
        "zeros over null",
        "loss at 4x",
    )
    lines = [head, ("--:",) * 2 + (":--",) + ("--:",) * (len(head) - 3)]
    for place, rules in ladder.cells.items():
        for rule in (rule for rule in COLOURS if rule in rules):
            numbers = [
                ladder.estimate(place, rule, metric)
                for metric in (LOSS, f"validated_packages/{LOSS}", SINK, ZEROS, FAR)
            ]
            texts = [
                format_interval(found, digits, scale)
                for found, digits, scale in zip(numbers, (3, 3, 1, 1, 3), (1, 1, 100, 100, 1), strict=True)
            ]
            lines.append((place.size, str(place.ratio), rule, str(len(rules[rule])), *texts))
    return [f"| {' | '.join(line)} |" for line in lines]


def format_page(ladder: Ladder) -> str:
    results = ladder.results
    seconds = sum(result.timings[name] for result in results for name in ("train_seconds", "evaluate_seconds"))
    commits = ", ".join(sorted({result.environment["git_sha"][:8] for result in results}))
    counts = {"count": len(results), "hours": seconds / 3600, "commits": commits}
    closing = CLOSING.format(largest=ladder.usual[-1].size, doubled=compare_rates(ladder), **counts)
    parts = [
        OPENING.format(usual=USUAL),
        "![One panel a claim, against size](ladder.png)\n",
        "\n".join(f"- {sentence}" for sentence in describe(ladder)) + "\n",
        "± is the half-width of a 95 % interval over at least three seeds; differences are paired by seed.\n",
        "\n".join(format_table(ladder)) + "\n",
        closing,
    ]
    return "\n".join(parts)


@use_style()
def draw(ladder: Ladder) -> Figure:
    """One panel a claim, over the size at USUAL tokens a parameter."""
    figure = new_figure(
        WIDTH, 4.6, f"Models trained on {USUAL} tokens a parameter: differences in nats, 95 % intervals"
    )
    panels = figure.subplots(2, 2)
    others = [rule for rule in COLOURS if rule != SOFTMAX]
    draw_panel(panels[0, 0], ladder, {rule: (rule, SOFTMAX) for rule in others}, LOSS, "loss - softmax's")
    draw_panel(panels[0, 1], ladder, {rule: (rule, None) for rule in COLOURS}, SINK, "with a sink (%)", 100)
    sparse = {rule: (rule, None) for rule in ("elastic", LAZY)}
    draw_panel(panels[1, 0], ladder, sparse, ZEROS, "zeros over the null (points)", 100)
    far = {rule: (rule, BIASED) for rule in COLOURS if rule != BIASED}
    draw_panel(panels[1, 1], ladder, far, FAR, "loss at 4x - biased softmax's")
    draw_legend_below(figure, [Line2D([], [], color=c, marker="o", label=rule) for rule, c in COLOURS.items()], 5)
    return figure


def draw_panel(
    axes: Axes,
    ladder: Ladder,
    pairs: Mapping[str, tuple[str, str | None]],
    metric: str,
    label: str,
    scale: float = 1.0,
) -> None:
    """A metric over the size. pairs: for each rule, itself and the rule that it is compared with, if any."""
    for index, (rule, (own, baseline)) in enumerate(pairs.items()):
        found = [
            (
                place,
                ladder.estimate(place, own, metric)
                if baseline is None
                else ladder.compare(place, own, baseline, metric),
            )
            for place in ladder.usual
        ]
        known = [(place, one) for place, one in found if one.mean is not None]
        shift = 1 + 0.03 * (index - len(pairs) / 2)
        axes.errorbar(
            [place.parameters * shift for place, _ in known],
            [(one.mean or 0.0) * scale for _, one in known],
            [(get_half_width(one) or 0.0) * scale for _, one in known],
            color=COLOURS[rule],
            marker="o",
            capsize=2,
        )
    axes.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    sizes = [place.parameters for place in ladder.usual]
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:.1g}M"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    axes.set_xlabel("parameters")
    axes.set_ylabel(label)


def main() -> None:
    ladder = Ladder.read(CELLS)
    (HERE / "README.md").write_text(format_page(ladder), encoding="utf-8")
    _, svg = save_figure(draw(ladder), HERE / "ladder")
    svg.unlink()


if __name__ == "__main__":
    main()
