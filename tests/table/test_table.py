"""The table reports what was measured and what is missing, and nothing else, in every format.

`python tests/table/test_table.py` writes the pages in `pages/`, which show every kind of cell, line and finding.
"""

import csv
import functools
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from scipy import stats

from lit_lazy.support.console import PlainConsole
from lit_lazy.support.stored_records import NewerFormatError
from lit_lazy.table import render
from lit_lazy.table.build import TableSpec, build_table, parse_table, recompute_statistics
from lit_lazy.table.column_statistics import Measure
from lit_lazy.table.compare_tables import compare_tables, format_comparison
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Yardstick
from lit_lazy.table.results_table import Table, format_csv
from lit_lazy.table.statistics import Effect, compute_contrast, minimum_detectable_effect

PAGES = Path(__file__).parent / "pages"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
STORED = RESULTS / "q_window_2-stdlib_small" / "table.json"
SHA, WHOLE = "3f9c2ab", Path(render.DETAILS)

LOSS = Column("loss", "loss", "lower", unit="nats")
PLOTTED = replace(LOSS, plotted=True)
BOUNDED = replace(PLOTTED, bounds=(0.0,))
EXCESS = Column("loss/excess", "excess loss", "lower", 4, "nats", plotted=True)
SINK = Column("sink", "sink", "lower", plotted=True)
SPARSITY = Column("sparsity", "sparsity", None, digits=1, unit="%", scale=100)
PARAMETERS = Column("parameters", "parameters", None, digits=",.0f")
SHARE = Column("share", "share", digits=1, unit="%", scale=100, bounds=(0.0, 1.0))
YARDSTICK = Yardstick("loss/excess", 0.349, {"optimum": 0.0, "chance": 0.698})


def rows(*variants: str, seeds: Sequence[int] = (0, 1, 2)) -> list[RowInfo]:
    return [RowInfo(variant, "ours", tuple(seeds), "tiny") for variant in variants]


def observe(key: str = "loss", **values: Sequence[float | None]) -> list[Observation]:
    """Complete cells of rows with these values by seed."""
    return [
        Observation(name, seed, "complete", {key: value}, git_sha=SHA)
        for name, of in values.items()
        for seed, value in enumerate(of)
    ]


def table(asked: Sequence[RowInfo], cells: Sequence[Observation], *columns: Column, **more: Any) -> Table:
    baseline = more.pop("baseline", asked[0].variant)
    settings = {"contrasts": (), "command": "make table2", **more}
    return build_table(TableSpec("study-tiny", "tiny", baseline, asked, columns or (LOSS,), **settings), cells)


def of_values(*columns: Column, seeds: int = 3, **values: Sequence[float | None]) -> Table:
    """The first row is the baseline; the values are the first column's."""
    key = columns[0].key if columns else "loss"
    return table(rows(*values, seeds=range(seeds)), observe(key, **values), *columns)


def measure(found: Table, variant: str, key: str = "loss") -> Measure:
    return found.measures[key][variant]


def make_kinds() -> Table:
    """Every kind of cell, note and warning."""
    rate = Column("rate", "sink rate", "lower", 1, "%", scale=100, bounds=(0.0, 1.0), plotted=True)
    tau = Column("tau", "tau", None, 2, by_construction="rows start apart")
    loss = replace(PLOTTED, margin=0.5, note="of the loss")
    values = {
        "lazy": ((2.0, 2.1, 2.2), (0.0, 0.0, 0.0), (0.4, 0.5, 0.6)),
        "near": ((2.01, 2.09, 2.2), (0.2, 0.4, 0.9), (1.0, 0.99, 1.0)),
        "far": ((3.0, 3.1, 3.4), (0.0, 1.0, 1.0), (0.0, 0.001, 0.01)),
        "tied": ((2.0, 2.1, 2.2), (0.3, 0.5, 0.2), (0.5, None, math.nan)),
        "flat": ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), (0.5, 0.6, None)),
        "good": ((1.0, 1.101, 1.2), (0.1, 0.2, 0.3), (0.2, 0.1, 1.2)),
        "dead": ((9.0, 9.1, 9.3), (0.9, 0.8, 0.7), (0.9, 0.91, 0.93)),
    }
    cells = []
    for i, (name, (losses, rates, shares)) in enumerate(values.items()):
        for s in range(3):
            metrics = {"loss": losses[s], "rate": rates[s], "share": shares[s], "tau": i + 0.01 * s * (s + i)}
            sha, backend = (f"{SHA}-dirty", "triton") if name == "far" and s else (SHA, "chunked")
            about = {"environment": f"torch {2 + bool(s)}", "taken_from": "runs/a" * bool(s)}
            metrics |= {"parameters": 1000 + i}
            cells.append(Observation(name, s, "complete", metrics, {"backend": backend}, sha, **about))
    cells += [*observe(two=(1.0, 2.0), extra=(4.0,)), Observation("half", 0, "failed", {"loss": 31337.0}, reason="OOM")]
    cells += [Observation("busy", s, "running", {"loss": 31337.0}) for s in range(3)]
    cells.append(Observation("lazy", 7, "complete", {"loss": 31337.0}))
    infos = [*rows(*values), *rows("two", seeds=(0, 1)), *rows("half", "busy")]
    infos[1] = replace(infos[1], base="other", note="a note", source="paper")
    contrasts = [Contrast("mean", {"far": 0.5, "near": 0.5, "lazy": -1}), Contrast("far", {"far": 1, "lazy": -1})]
    columns = (rate, loss, tau, SHARE, PARAMETERS, Column("typo", "typo", "higher"))
    more: dict[str, Any] = {
        "labels": ("backend",),
        "alternatives": {"backend": ("triton", "chunked")},
        "files": {"a.py": "abc"},
    }
    more |= {"primary": ("absent", "loss"), "contrasts": contrasts, "warnings": ("Undertrained.",)}
    more["yardstick"] = Yardstick("loss", 5.0, {"optimum": 1.0, "chance": 9.5}, "--base larger shows more.")
    return replace(table(infos, cells, *columns, **more), seconds=3726.0)


def make_learned(yardstick: Yardstick | None = YARDSTICK, **more: Any) -> Table:
    """Of a baseline, a row that learned, and one that did not in 4 of 5 cells and has no sink."""
    losses = {"lazy": [0.01] * 5, "good": [0.02] * 5, "dead": [0.6, 0.7, 0.65, 0.3, 0.69]}
    sinks, noise = {"lazy": 0.4, "good": 0.2, "dead": 0.1}, np.random.default_rng(0).normal
    cells = [
        Observation(
            name, seed, "complete", {"loss/excess": loss + 1e-4 * noise(), "sink": sinks[name] + 1e-3 * noise()}
        )
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return table(rows(*losses, seeds=range(5)), cells, EXCESS, SINK, yardstick=yardstick, **more)


def make_wide() -> Table:
    """Seventeen rows, twelve columns, five seeds, in shuffled order."""
    rng = np.random.default_rng(0)
    names = [f"variant_{i:02d}" for i in range(17)]
    columns = [Column(f"m{i}", f"metric {i}", (None, "lower", "higher")[i % 3], digits=i % 4) for i in range(12)]
    values = 10 + rng.normal(size=(17, 5, 12)) + np.arange(17)[:, None, None] % 3
    cells = [
        Observation(name, seed, "complete", {f"m{j}": x for j, x in enumerate(of)}, {"backend": "cpu"}, SHA)
        for name, by_seed in zip(names, values.tolist(), strict=True)
        for seed, of in enumerate(by_seed)
    ]
    random.Random(1).shuffle(cells)
    contrast = Contrast("interaction", {names[0]: 1, names[1]: -1, names[2]: -1, names[8]: 1})
    return table(rows(*names, seeds=range(5)), cells, *columns, contrasts=[contrast], labels=("backend",))


def make_hostile() -> Table:
    """Names that are markup, or LaTeX's arguments."""
    name = "a|b_c 50% &lt; <b>x</b> {$#~^\\} *em* `code` [l](u)"
    infos = [RowInfo("[0.5em] lazy", "authors' code", (0, 1, 2), "tiny"), RowInfo(name, "ours", (0, 1, 2), "o|ther")]
    cells = observe(**{"[0.5em] lazy": (2.0, 2.1, 2.3)})
    cells.append(Observation(name, 0, "failed", reason="boom | <i>\nat line & 7%"))
    column = Column("loss", name, "lower", note="100% & _more_")
    return table(infos, cells, column, warnings=(name, "[a]"), command="a_b & c | d % e")


TABLES: dict[str, Callable[[], Table]] = {
    "kinds": make_kinds,
    "learned": make_learned,
    "wide": make_wide,
    "hostile": make_hostile,
    "unpaired": lambda: table(
        rows("a", "b"), observe(a=(1.0, 1.1, 1.3), b=(2.0, 2.1, 2.2)), PLOTTED, primary=("loss",), baseline=""
    ),
    "empty": lambda: table(rows("lazy", "b"), [], contrasts=[Contrast("c", {"lazy": 1, "b": -1})]),
    "single": lambda: of_values(PLOTTED, lazy=(1.0,), b=(2.0,), seeds=1),
}
FORMATS: dict[str, Callable[[Table], str]] = {
    "markdown": render.render_markdown,
    "brief": render.render_brief,
    "txt": lambda found: render.render_summary(found, WHOLE) + render.render_text(found, WHOLE),
    "tex": render.FILES["table.tex"],
    "html": lambda found: re.sub("<style>.*?</style>", "", "\n".join(render.render_html_parts(found)), flags=re.S),
}
anything = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)


def make_shares(**more: Any) -> Table:
    """Of one seed: that softmax has a sink and Lazy Attention none is seen at once, a lower loss may be the seed."""
    cells = [
        Observation(name, 0, "complete", {"loss/excess": loss, "share": share, "sink": share})
        for name, loss, share in (("lazy", 0.01, 0.0), ("softmax", 0.02, 0.4), ("twin", 0.03, 0.0), ("dead", 0.6, 0.9))
    ]
    infos, columns = rows("lazy", "softmax", "twin", "dead", seeds=(0,)), (EXCESS, replace(SHARE, plotted=True), SINK)
    return table(infos, cells, *columns, primary=("loss/excess",), yardstick=YARDSTICK, **more)


def make_findings() -> dict[str, Table]:
    """Tables whose findings, which `pages/findings.txt` shows, are of every kind."""
    far = {f"far {i}": (9.0 + i, 9.15 + i, 9.2 + i) for i in range(6)}
    near = {"near": (1.0, 1.101, 1.2), "wide": (0.5, 1.0, 1.6), "flat": (1.0, 1.0, 1.0), "good": (0.1, 0.25, 0.3)}
    beyond = {"base": (0.3, 0.4, 0.5), "a": (0.0, 0.0, 0.0), "b": (0.31, 0.39, 0.5), "c": (0.6, 0.6, 0.6)}
    above = {"a": (0.1, 0.2, 0.4), "b": (0.0, 0.3, 0.9)} | {f"far {i}": (0.5, 0.6, 0.7 + i) for i in range(6)}
    still, unlearned = (0.0, 0.0, 0.0), {f"dead {index}": [0.5, 0.5] for index in range(20)}
    strict = Yardstick("loss/excess", 0.001, {"optimum": 0.0}, "--base larger shows more.")
    return {
        "every group": of_values(replace(PLOTTED, margin=0.5), lazy=(1.0, 1.1, 1.2), **far, **near),
        "rows without a spread": of_values(BOUNDED, **beyond),
        "one seed": of_values(PLOTTED, lazy=(1.0,), b=(2.0,), seeds=1),
        "one row": of_values(PLOTTED, lazy=(1.0, 1.1, 1.2)),
        "a baseline without a spread, as lazy's sink": of_values(BOUNDED, lazy=still, **above),
        "no spread": of_values(BOUNDED, lazy=still, a=still),
        "rounding": of_values(BOUNDED, lazy=still, a=(1e-9, 2e-9, 3e-4)),
        "undefined values": of_values(BOUNDED, lazy=still, a=(1.0, math.nan, None), b=still),
        "fewer seeds than the baseline": of_values(BOUNDED, seeds=4, lazy=(*still, 0.0), a=(1.0, 2.0, 3.0, None)),
        "shares of one seed": make_shares(),
        "nothing is compared with what did not learn": make_shares(baseline="dead"),
        "a row that did not learn wins nothing": make_learned(),
        "a baseline that did not learn": make_learned(baseline="dead"),
        "without a yardstick": make_learned(None),
        "no row learned": make_learned(strict),
        "many did not learn": replace(of_values(EXCESS, lazy=[0.1, 0.1], **unlearned, seeds=2), yardstick=YARDSTICK),
    }


def make_pages() -> dict[str, str]:
    bounds = {
        "lazy": [0.9, 0.99, 1.0 + 1e-7],  # the rounding of a float32 sum is within the bound
        "tau below 0": [1.1, 1.2, 1.25],
        "own rule": [0.8, 0.9, 1.0115],
        "signed": [-0.02, 0.1, 0.05],
        "low": [0.0, 0.001, 0.01],
        "rounded to 0": (-0.2, 0.0, 0.2 + 4e-17),
    }
    return {
        **{f"{name}.{kind}": show(make()) for name, make in TABLES.items() for kind, show in FORMATS.items()},
        "bounds.txt": render.render_text(of_values(replace(SHARE, unit="", scale=1.0, digits=3), **bounds), WHOLE),
        "findings.txt": "\n".join(
            "\n".join([f"== {name}", *describe_findings(found), ""]) for name, found in make_findings().items()
        ),
    }


def test_pages_of_every_kind_of_cell_line_and_finding() -> None:
    for name, page in make_pages().items():
        assert page == (PAGES / name).read_text(), name
    assert {path.name for path in PAGES.iterdir()} == make_pages().keys()


# Numbers


def compute(row: Sequence[float], baseline: Sequence[float]) -> Effect:
    by_seed = {name: dict(enumerate(values)) for name, values in {"row": row, "baseline": baseline}.items()}
    return compute_contrast(by_seed, {"row": 1.0, "baseline": -1.0})


def test_the_numbers_are_those_of_the_statistics() -> None:
    a, b, c = [2.0, 2.1, 2.4], [1.7, 1.9, 2.0], [2.1, 2.3, 2.5]
    found = of_values(lazy=a, b=b, c=c, tied=a, short=(2.0, 2.2))
    assert (found.baseline, found.git_sha, found.rows[1].n, found.rows[1].status) == ("lazy", SHA, 3, "complete")
    got, expected = measure(found, "b"), compute(b, a)
    assert (got.mean, got.ci95) == pytest.approx((np.mean(b), stats.t.isf(0.025, 2) * stats.sem(b)))
    assert got.values == {0: 1.7, 1: 1.9, 2: 2.0}
    # Three rows of three seeds, one of them with the baseline's values, and one of too few.
    assert got.difference == replace(expected, p_adj=3 * expected.p, mde=minimum_detectable_effect(expected))
    assert measure(found, "c").difference.p_adj == pytest.approx(max(3 * expected.p, 2 * compute(c, a).p))
    tied, short = measure(found, "tied").difference, measure(found, "short").difference
    assert (tied.test, tied.mean, tied.p_adj) == ("tie", 0.0, None)
    assert (short.n, short.p, short.p_adj, short.mde) == (2, None, None, None)
    assert {*vars(measure(found, "lazy").difference).values()} == {None, 0}


def test_small_values_are_not_shown_as_zero() -> None:
    column = Column("x", "x")
    assert [column.format(v) for v in (0.0, 0.0004, -0.00002, 0.0006)] == ["0.000", "4e-04", "-2e-05", "0.001"]
    assert (PARAMETERS.format(-1234567.0, "+"), SPARSITY.format(0.5958)) == ("-1,234,567", "59.6")
    shown = [render.format_effect(Effect(1.0, None, 3, p_adj=p), LOSS) for p in (0.0009, 0.0012, 0.04996, 0.0502)]
    assert [text.partition(", ")[2] for text in shown] == ["p<0.001*", "p=0.001*", "p=0.0500*", "p=0.0502"]


# Rows that did not learn, rows that are one training, cells that nobody asked for, and mistakes


def test_which_rows_did_not_learn_is_determined_once_per_table() -> None:
    """Each value of a row asks: determined each time, 2,500 rows took minutes."""
    found = make_learned()
    with patch.object(Table, "find_failures", autospec=True, side_effect=Table.find_failures) as asked:
        for show in (*FORMATS.values(), Table.to_csv):
            show(found)
    assert asked.call_count == 1


def test_rows_that_are_one_training_are_named_as_such() -> None:
    """Whatever the reason, such as a setting that has no effect: a tie alone could be chance."""
    losses = {"lazy": (0.5, 0.25), "twin": (0.5, 0.25), "near": (0.5, 0.25 + 2**-54), "third": (None, 0.25)}
    found = of_values(EXCESS, **losses, absent=(), seeds=2)
    assert found.find_twins() == [["lazy", "twin", "third"]]
    assert "to the last bit, in every seed: lazy, twin, third. What" in render.render_markdown(found)
    assert not of_values(LOSS, lazy=(1.0,), b=(1.0,)).find_twins(), "of no loss of the task"


def test_the_order_of_the_observations_does_not_matter() -> None:
    cells = observe(lazy=(0.0, 0.2, 0.3), b=(0.1, 0.2, -0.7), extra=(1.0, 2.0))
    assert table(rows("lazy", "b"), cells[::-1]) == table(rows("lazy", "b"), cells)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table(rows("lazy", "b"), [], baseline="lasy"), "baseline: no row is called 'lasy'; the rows are lazy"),
        (lambda: table(rows("lazy"), observe(lazy=(1.0,)) * 2), "cell: 'lazy, seed 0' is given twice"),
        (lambda: Contrast("c", {"lazy": 1.0, "b": -0.5}), "weights={'lazy': 1.0, 'b': -0.5}: must add up"),
        (lambda: Column("x", "x", digits=".3q"), "column 'x': digits='.3q': must be 0 to 20 decimals"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# Formats


@anything
def test_json_is_strict_and_comes_back_whole(make: Callable[[], Table]) -> None:
    found = make()
    whole = json.dumps(found.to_json(), allow_nan=False)
    assert parse_table(whole, "it") == found
    assert recompute_statistics(found, found.columns, found.contrasts, [found.primary or ""]) == found
    former = json.loads(whole)  # as format 1, which had the statistics
    del former["format"]
    for row in former["rows"]:
        row |= {"n": 5, "metrics": {key: {"mean": 0.0, "values": values} for key, values in row["metrics"].items()}}
    assert parse_table(json.dumps(former), "it") == found


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠"])
def test_csv_holds_no_formula(sign: str) -> None:
    """Spreadsheets would execute it; numbers, also negative ones, are not text."""
    lines = list(csv.reader(io.StringIO(format_csv([[f"{sign}1+1", f"a{sign}b", -1.5, "", None]]), newline="")))
    assert lines == [[f"'{sign}1+1", f"a{sign}b", "-1.5", "", ""]]


@anything
def test_csv_is_tidy_and_exact(make: Callable[[], Table]) -> None:
    found = make()
    lines = {(line["variant"], line["metric"]): line for line in csv.DictReader(io.StringIO(found.to_csv()))}
    assert len(lines) == len(found.rows) * len(found.columns)
    for row in found.rows:
        for key, of in ((key, measures[row.variant]) for key, measures in found.measures.items()):
            own, difference = vars(of), vars(of.difference)
            expected = {name: own[name] for name in ("mean", "ci95", "n", "undefined", "p_same")}
            expected |= {name: difference[name] for name in ("test", "p", "p_adj", "mde")}
            expected |= {f"diff_{name}": difference[name] for name in ("ci95", "n", "se", "df", "low", "high")}
            shown = {name: lines[row.variant, key][name] for name in ("diff", *expected)}
            expected |= {"diff": difference["mean"]}
            assert shown == {name: "" if value is None else str(value) for name, value in expected.items()}
    assert "31337" not in found.to_csv() + json.dumps(found.to_json()), "was not measured"


def test_a_terminal_gets_the_first_rows_without_markup_and_where_the_others_are() -> None:
    hostile = render.render_text(make_hostile(), WHOLE, width=110)
    assert not re.search(r"^(#|\||>)|\\[|_]", hostile, re.M)
    assert max(map(len, hostile.splitlines())) <= 110
    found = of_values(EXCESS, **{name: [0.5] for name in ("lazy", *(f"row {i}" for i in range(2000)))}, seeds=2)
    text = render.render_text(found, WHOLE)
    assert "1,941 more rows are in details.md." in text
    assert "1,941 more lines are in details.md." in text, "cells without a result"
    assert "\nrow 58 " in text
    assert "\nrow 60 " not in text
    assert text.count("\n") < 250
    assert render.render_markdown(found).count("\n| row ") == 2 * 2000, "means and differences"
    assert "more rows" in render.render_summary(found, WHOLE)
    assert "more rows" not in render.render_text(make_learned(), WHOLE)


@pytest.mark.parametrize("name", render.FILES)
def test_a_damaged_or_lost_file_is_not_saved(name: str, tmp_path: Path) -> None:
    render.save(make_learned(), tmp_path)
    assert render.is_saved(make_learned(), tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert not render.is_saved(make_learned(), tmp_path)
    file.unlink()
    assert not render.is_saved(make_learned(), tmp_path)
    file.mkdir()
    assert not render.is_saved(make_learned(), tmp_path)


# Files of others

CONTROLS = "\x1b[31m\x07\x9b2J\u202e\x7f"


def test_others_texts_cannot_control_a_terminal() -> None:
    """Neither on one nor in a file that is shown there."""
    whole = json.loads(STORED.read_text())
    for name in ("ablation", "base", "command", "environment"):
        whole[name] = CONTROLS
    whole["warnings"] = whole["notes"] = [CONTROLS]
    for row in whole["rows"]:
        row |= {"git_shas": [CONTROLS], "labels": {CONTROLS: CONTROLS}, "note": CONTROLS, "source": CONTROLS}
        row |= {"reasons": {"0": CONTROLS}, "normaliser": CONTROLS, "position": CONTROLS}
    found = parse_table(json.dumps(whole), "it")
    shown = [render.FILES["table.html"](found), *(show(found) for show in FORMATS.values())]
    shown += [found.to_csv(), format_comparison(compare_tables(("a", "b"), (found, found), [], (None, None)))]
    PlainConsole(file=(printed := io.StringIO()), force_terminal=True, highlight=False).print(CONTROLS)
    for text in [*shown, printed.getvalue()]:
        assert "x1b" in text
        assert not set(CONTROLS) - set("[31m2J") & set(text)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to the values in dicts, and to the first ones in lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from list_paths(inner, (*path, name))


ODD = (1.7e308, math.nan, 10**400, -1, "\ud800", "\x1b[31m", None, {}, [[]])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_a_table_of_others_is_compared_or_refused(odd: Any) -> None:
    """Whichever of its values is odd."""
    whole = json.loads(STORED.read_text())
    text = json.dumps(whole | {name: whole[name][:2] for name in ("rows", "columns", "contrasts")})
    by_names = {tuple(step for step in path if isinstance(step, str)): path for path in list_paths(json.loads(text))}
    assert len(by_names) > 50
    for path in by_names.values():
        changed = json.loads(text)
        functools.reduce(lambda inner, step: inner[step], path[:-1], changed)[path[-1]] = odd
        try:
            found = parse_table(json.dumps(changed), "it")
            compared = compare_tables(("a", "b"), (found, found), [], (None, None))
        except (ValueError, NewerFormatError):
            continue
        assert "\x1b" not in format_comparison(compared), path


# Two tables side by side: the right test of each difference, and what else differs

STILL = Column("sink", "sink", bounds=(0.0, 1.0), plotted=True)
NAMES = ("runs/a", "runs/b")


def table_of(rows: dict[str, dict[int, float]], base: str = "tiny", **more: object) -> Table:
    """A table with these losses by row and seed."""
    infos = [RowInfo(name, "ours", tuple(values), base) for name, values in rows.items()]
    cells = [
        Observation(name, seed, "complete", {"loss": value, "sink": 0.5}, git_sha="3f9c2ab")
        for name, values in rows.items()
        for seed, value in values.items()
    ]
    spec = TableSpec("study", base, next(iter(rows)), infos, (LOSS, STILL), (), "make it", primary=("loss",))
    return replace(build_table(spec, cells), **more)


def compare(first: Table, second: Table, *columns: str):
    return compare_tables(NAMES, (first, second), columns, (None, None))


FIRST, SECOND = {0: 1.0, 1: 1.5, 2: 2.5, 3: 2.0}, {0: 0.75, 1: 1.5, 2: 1.75, 3: 1.75}


@pytest.mark.parametrize("base", ["tiny", "tiny-0a1b2c", "tiny-steps=9-normaliser.tau_init=0.5"])
def test_equal_seeds_of_one_experiment_are_pairs(base: str) -> None:
    """Also if one of the tables has further ones."""
    paired = stats.ttest_rel(list(SECOND.values()), list(FIRST.values())).confidence_interval()
    for second, said in ((SECOND, "n = 4"), (SECOND | {4: 8.0, 5: 9.0}, "n = 4 in both of 4 and 6")):
        found = compare(table_of({"lazy": FIRST}), table_of({"lazy": second}, base=base))
        (row,) = found.columns["loss"]
        assert row.paired
        assert row.effect.mean == -0.3125
        assert row.effect.ci95 == pytest.approx((paired.high - paired.low) / 2)
        assert f"paired, {said}" in format_comparison(found)


@pytest.mark.parametrize(("shift", "base"), [(0, "other"), (4, "tiny"), (3, "tiny")])
def test_other_seeds_or_experiments_are_compared_by_welch(shift: int, base: str) -> None:
    """One common seed makes no pairs."""
    values = {seed + shift: value for seed, value in SECOND.items()}
    found = compare(table_of({"lazy": FIRST}), table_of({"lazy": values}, base=base))
    (row,) = found.columns["loss"]
    welch = stats.ttest_ind(list(SECOND.values()), list(FIRST.values()), equal_var=False)
    interval = welch.confidence_interval()
    assert not row.paired
    assert row.effect.p == pytest.approx(welch.pvalue)
    assert row.effect.ci95 == pytest.approx((interval.high - interval.low) / 2)
    assert "Welch, n = 4 and 4" in format_comparison(found)


def test_rows_columns_and_facts() -> None:
    first = table_of({"lazy": FIRST, "softmax": FIRST, "gone": FIRST})
    second = table_of({"softmax": FIRST, "lazy": FIRST, "new": SECOND}, environment="torch 3", command="make more")
    settings = {name: {"train.steps": "6", "train.lr": "0.1"} for name in ("lazy", "softmax")}
    changed = {"lazy": settings["lazy"] | {"train.steps": "8"}, "softmax": {"train.steps": "8"}}
    found = compare_tables(NAMES, (first, second), (), (settings, changed))
    assert [row.variant for row in found.columns["loss"]] == ["lazy", "softmax"]  # the primary outcome alone, A's order
    assert all(row.effect.test == "tie" for row in found.columns["loss"])
    assert found.only == (["gone"], ["new"])
    facts = {"baseline": ("lazy", "softmax"), "made with": ("", "torch 3"), "command": ("make it", "make more")}
    assert found.facts == facts
    assert found.settings == {("train.steps", "6", "8"): ["lazy", "softmax"], ("train.lr", "0.1", "–"): ["softmax"]}
    text = format_comparison(found)
    assert "Only in A: gone" in text
    assert "train.steps  6    8  all rows" in text
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["settings"][1][3] == ["softmax"]
    assert list(compare(first, second, "sink", "loss").columns) == ["sink", "loss"]
    with pytest.raises(ValueError, match=r"--columns 'los': is not in both tables \(did you mean loss\?\); both"):
        compare(first, second, "los")
    with pytest.raises(ValueError, match=r"'runs/a', 'runs/b': share no row; runs/a has lazy; runs/b has softmax"):
        compare(table_of({"lazy": FIRST}), table_of({"softmax": FIRST}))


def test_what_has_no_spread_has_no_interval() -> None:
    found = compare(table_of({"lazy": FIRST}), table_of({"lazy": FIRST}, base="other"), "sink")
    assert "0.500 =  0.500 =  +0.000  Welch, n = 4 and 4; no interval, as one has no spread" in format_comparison(found)
    assert "Settings of the rows are unknown" in format_comparison(found)


if __name__ == "__main__":
    for page, content in make_pages().items():
        (PAGES / page).write_text(content)
