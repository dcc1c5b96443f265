"""Links and saved views on MLflow's server in a real browser."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import Browser
from mlflow.entities import Metric, Param, RunData, RunTag
from stores import make_runs

from lit_lazy.command.main import main
from lit_lazy.config.user_files import load_module
from lit_lazy.report import ablation_page
from lit_lazy.report.ablation_page import REPORT
from lit_lazy.tracking.serve import find_experiment_links, select_links
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import MetricRecord, Tracker
from lit_lazy.tracking.views import (
    AXES_VIEW,
    CELLS_VIEW,
    CHARTS_VIEW,
    LINKED_VIEWS,
    RUNS_VIEW,
    TABLE_VIEW,
    build_run_views,
    build_views,
    find_outlier_rows,
)

pytestmark = pytest.mark.xdist_group("browser")  # one grid and one server for all
screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
ROWS = ("softmax", "lazy", "lazy ALiBi")
VIEWS = (TABLE_VIEW, CELLS_VIEW, CHARTS_VIEW, AXES_VIEW)
HEADERS = "[...document.querySelectorAll('[data-testid=experiment-view-compare-runs-section-header]')]"
SECTIONS = f"{HEADERS}.map(header => header.innerText)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """Runs of three rows with two seeds, synthetic cells, and a run of an experiment without views."""
    runs = make_runs(tmp_path_factory.mktemp("dashboard"), empty_store)
    command = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", ",".join(ROWS), "--seeds", "0,1"]
    with pytest.MonkeyPatch.context() as patch:  # the report is only linked to
        patch.setattr(ablation_page, "write_report", lambda _grid, folder, *_: (folder / REPORT).touch())
        assert main([*command, "--runs", str(runs), "--workers", "2"]) == 0
    other = Tracker(default_uri(runs), "train-other")
    other.create_run("other", {"kind": "run"})
    tracker = Tracker(default_uri(runs), "made-up")
    for row, excess in EXCESSES.items():
        tags = {"kind": "cell", "variant": row, "seed": "0", "cell": row}
        run = tracker.create_run(f"{row} seed 0", tags)
        tracker.log_config(run, {"tau_init": "1.0"}, {})
        curve = [MetricRecord(step, step, {"val/excess": excess * times}) for step, times in ON_THE_WAY.items()]
        tracker.log(run, curve)
        metrics = {"loss/excess": excess, "loss/val": 2 + excess, "sink/rate": excess}
        tracker.update(run, "FINISHED", metrics=metrics, step=400)
    charted, metrics = tracker.mark_outliers(), ["loss/excess"]
    tracker.save_views("cell", lambda cells: build_views(["tau_init"], metrics, metrics, cells, charted))
    return runs


EXCESSES = {"softmax": 0.5, "off by one": 0.25, "a 'quoted' one": 0.125, "lazy": 0.0625, "dead": 400.0}
"""Excess losses of the synthetic cells, the last values of their curves."""
ON_THE_WAY = {100: 8.0, 200: 2.0, 300: 4.0, 400: 1.0}
"""Factors at these steps."""


@pytest.fixture(scope="module")
def links(runs: Path) -> Iterator[dict[str, str]]:
    """Links of the ablation in `lit-lazy dashboard`, by label."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "GITLAB_CI"):  # there MLflow reports nothing
            patch.delenv(name, raising=False)
        with screenshots.served_links(runs, "table2") as links:
            yield links


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), 6000, 4000, screenshots.FIRST_VISIT) as browser:
        yield browser


def opened(browser: Browser, link: str, shows: str) -> str:
    """The text of a page once an expression is true."""
    browser.open(link)
    browser.wait(shows)
    return browser.text()


def says(text: str) -> str:
    return f"document.body.innerText.includes({text!r})"


@pytest.mark.browser
class TestPages:
    def test_the_first_view_shows_a_line_per_variant_and_every_axis_as_a_column(self, links, browser) -> None:
        text = opened(browser, links["by variant"], says("Group: softmax"))
        assert "Group by: variant" in text
        for variant in ROWS:
            assert f"Group: {variant} 2" in text
            assert f"{variant} seed" not in text, "its cells are folded away"
        for column in ("normaliser", "tau_init", "threshold", "learn_tau", "bias", "loss/excess", "sparsity/zero"):
            assert f" {column} " in text, column
        assert "6 matching runs" in text

    def test_the_second_shows_every_cell_and_the_menu_leads_to_the_others(self, links, browser) -> None:
        text = opened(browser, links["all cells"], says("lazy seed 1"))
        assert all(f"{variant} seed {seed}" in text for variant in ROWS for seed in (0, 1))
        assert "Group: softmax" not in text
        assert " mass/trigger " in text
        browser.click("document.querySelector('[data-testid=saved-views-trigger]')")
        items = "[...document.querySelectorAll('[role=menuitem]')]"
        assert browser.wait(f"{items}.map(item => item.innerText)")[: len(VIEWS)] == list(VIEWS)
        browser.click(f"{items}.find(item => item.innerText == {TABLE_VIEW!r})")
        browser.wait(says("Group: softmax"))

    @pytest.mark.long
    def test_a_dead_row_flattens_nothing_and_is_named(self, runs, links, browser) -> None:
        ui_url = links["runs"].partition("/#")[0]
        made = find_experiment_links(default_uri(runs), ui_url)["made-up"]
        text = opened(browser, made["charts"], screenshots.DRAWN)
        assert "4 matching runs" in text
        assert "Results by variant, without dead" in text
        listed = browser.evaluate("[...document.querySelectorAll('.ag-row')].map(row => row.innerText).join('\\n')")
        assert {name.strip() for name in re.findall(r"Group: (.*)", listed)} == {
            row for row in EXCESSES if row != "dead"
        }
        card = f"{screenshots.CARDS}.find(card => card.innerText.startsWith('val/excess'))"
        chart = f"{card}.querySelector('.js-plotly-plot')"
        drawn = browser.wait(f"(c => c.data && c.data.filter(t => t.y.length == 4).map(t => t.y))({chart})")
        for excess in (excess for row, excess in EXCESSES.items() if row != "dead"):
            assert [excess * times for times in ON_THE_WAY.values()] in drawn, "as measured, not smoothed"
        assert browser.evaluate(f"{chart}.layout.yaxis.type") == "log"

    @pytest.mark.long
    def test_the_fourth_draws_a_line_per_cell_through_the_axes(self, links, browser, tmp_path) -> None:
        """It asks this machine alone, and its picture for the documentation can be taken."""
        opened(browser, links["parallel coordinates"], screenshots.DRAWN)
        titles = "[...chart.querySelectorAll('.dimension .label')].map(title => title.textContent)"
        named = f"[...document.querySelectorAll('.parcoords')].map(chart => {titles})"
        drawn = browser.wait(f"(found => found.length && found)({named})")
        assert drawn == [["normaliser", "bias", "loss/excess"]]
        assert browser.evaluate(SECTIONS)[0].startswith("Every cell")
        asked = [urlsplit(url) for url in browser.requests]
        assert {url.hostname for url in asked if url.scheme.startswith(("http", "ws"))} == {"127.0.0.1"}
        taken = screenshots.take({"parallel coordinates": links["parallel coordinates"]}, tmp_path)
        assert [file.name for file in taken] == ["parallel-coordinates.png"]
        assert taken[0].read_bytes().startswith(b"\x89PNG")
        assert 20_000 < taken[0].stat().st_size < 200_000

    def test_the_parent_shows_its_table(self, links, browser) -> None:
        text = opened(browser, links["its table"], screenshots.FRAMED)
        shown = ("table.html", "table.md", "table.csv", "table.tex", "table.json", "effects.png", "config.yaml")
        assert all(artifact in text for artifact in shown)
        assert "Model training" in text


class TestLinks:
    def test_those_of_the_named_ablation_are_printed_and_an_experiment_without_views_has_one(self, runs, links) -> None:
        views = [name for name in LINKED_VIEWS if name != "all runs"]
        assert list(links) == [*views, "its table", "its report", "runs"]
        other = find_experiment_links(default_uri(runs), "http://host")["train-other"]
        assert list(other) == ["runs"]
        assert other["runs"].endswith("/runs?workflowType=machine_learning")

    def test_a_name_is_an_experiment_s_or_all_that_an_ablation_or_a_search_has(self) -> None:
        names = ["a", "a-x", "a-y", "ab-x", "search-a-x", "search-b-x"]
        assert [*select_links({name: {} for name in names}, "a")] == ["a"]
        assert [*select_links({name: {} for name in names[1:]}, "a")] == ["a-x", "a-y", "search-a-x"]
        assert [*select_links({name: {} for name in names}, "b")] == ["search-b-x"]

    def test_an_unknown_name_is_told_in_a_line_and_nothing_is_served(self, runs, capsys) -> None:
        assert main(["dashboard", "table3", "--runs", str(runs)]) == 2
        out, error = capsys.readouterr()
        said = "lit-lazy: dashboard 'table3': MLflow has no experiment or ablation of this name; it has: "
        assert re.fullmatch(rf"{said}[^\n]*\n", error)
        assert "table2-backcopy_tiny" in error
        assert "train-other" in error
        assert not out


def cell(variant: str, axes: dict[str, str], *metrics: str, loss: float = 1.0) -> RunData:
    params = [Param(name, value) for name, value in axes.items()]
    return RunData([Metric(name, loss, 0, 0) for name in metrics], params, [RunTag("variant", variant)])


class TestViews:
    SOFTMAX = cell("softmax", {"bias": "NoBias"}, "loss/val", "sink/rate", "val/loss")
    LAZY = cell("lazy", {"bias": "Alibi", "tau_init": "1.0"}, "loss/val", "watch/tau_layer_0", "watch/tau_layer_11")
    LAZIER = cell("lazier", {"bias": "Alibi", "tau_init": "2.0"}, "loss/val", "watch/tau_layer_2", "val/excess")

    def draw(self, name: str, *cells: RunData) -> list[tuple[str, str]]:
        """Kind and subject of each chart of a view."""
        metrics = ["loss/excess", "loss/val"]
        charts = build_views(["bias", "tau_init"], metrics, metrics, [*cells])[name]["compareRunCharts"]
        for chart in charts:
            assert chart["type"] != "LINE" or chart["lineSmoothness"] == 0
            assert chart["type"] != "PARALLEL" or not cells or chart["selectedMetrics"] == ["loss/val"]
        subjects = [c.get("selectedParams") or c.get("metricKey") or c["xaxis"]["key"] for c in charts]
        return [(chart["type"], subject) for chart, subject in zip(charts, subjects, strict=True)]

    def test_only_what_cells_have_is_drawn(self) -> None:
        shares = [("BAR", "loss/val"), ("BAR", "sink/rate"), ("SCATTER", "sink/rate"), ("LINE", "val/loss")]
        assert self.draw(CHARTS_VIEW, self.SOFTMAX) == shares
        columns = build_views([], ["loss/excess", "loss/val"], [], [self.SOFTMAX])[CELLS_VIEW]["selectedColumns"]
        assert [column for column in columns if "metrics" in column] == ["metrics.`loss/val`"]
        taus = [name for _, name in self.draw(CHARTS_VIEW, self.LAZY, self.LAZIER) if "tau" in name]
        assert taus == ["watch/tau_layer_0", "watch/tau_layer_11"], "the first and the last layer's"
        ready = {name for _, name in self.draw(CHARTS_VIEW)}
        assert {"loss/excess", "loss/val", "sink/rate", "watch/first_key_share", "watch/tau_layer_0"} <= ready

    def test_a_cell_is_in_a_chart_of_the_axes_that_it_has(self) -> None:
        drawn = [axes for _, axes in self.draw(AXES_VIEW, self.SOFTMAX, self.LAZY, self.LAZIER)]
        assert drawn == [["bias"], ["tau_init"]]
        assert [axes for _, axes in self.draw(AXES_VIEW)] == [["bias", "tau_init"]]

    def test_a_row_far_above_is_drawn_in_no_chart_and_listed_all_the_same(self) -> None:
        losses = {"a": 1.0, "b": 1.01, "c": 1.02, "dead": 9.0}
        cells = [cell(name, {"tau_init": name}, "loss/val", loss=loss) for name, loss in losses.items()]
        assert find_outlier_rows(cells) == ["dead"]
        found = build_views(["tau_init"], ["loss/val"], ["loss/val"], cells, charted=True)
        charted = dict.fromkeys((CHARTS_VIEW, AXES_VIEW), "tags.kind = 'cell' AND tags.charted = 'yes'")
        every = dict.fromkeys((TABLE_VIEW, CELLS_VIEW), "tags.kind = 'cell'")
        assert {view: found[view]["searchFilter"] for view in found} == charted | every
        assert all(found[view]["compareRunSections"][0]["name"].endswith(", without dead") for view in charted)
        while_it_runs = build_views(["tau_init"], ["loss/val"], ["loss/val"], cells)[CHARTS_VIEW]
        assert while_it_runs["searchFilter"] == "tags.kind = 'cell'"
        assert while_it_runs["groupBy"]["groupByKeys"][0]["groupByData"] == "variant"

    def test_runs_of_an_experiment_have_columns_of_what_they_differ_in(self) -> None:
        runs = [cell("", {"a": "1", "b": str(i)}, "loss/val", "tau/mean") for i in range(2)]
        found = build_run_views(runs)
        assert list(found) == [CHARTS_VIEW, RUNS_VIEW]
        assert found[RUNS_VIEW]["selectedColumns"] == ["metrics.`loss/val`", "params.`b`", "tags.`seed`"]
        kinds = [(chart["type"], chart["metricKey"]) for chart in found[CHARTS_VIEW]["compareRunCharts"]]
        assert kinds[0] == ("LINE", "train/loss")
        assert kinds.count(("BAR", "loss/val")) == 1
        assert {view["searchFilter"] for view in found.values()} == {"tags.kind = 'run'"}

    def test_metrics_without_a_chart_stay_folded_below_by_their_groups(self) -> None:
        def sections(*cells: RunData, shown: bool) -> list[str]:
            view = build_views([], ["loss/val"], ["loss/val"], [*cells])[CHARTS_VIEW]
            return [section["name"] for section in view["compareRunSections"] if section["display"] == shown]

        drawn = ["Results by variant", "Loss against what attention does", "During training"]
        assert sections(self.SOFTMAX, self.LAZY, shown=True) == drawn
        other = cell("other", {}, "loss/val", "mass/all", "init/mass/all", "epoch")
        assert sections(other, shown=False) == ["Model metrics", "init/mass", "mass"]
