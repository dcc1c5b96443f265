"""MLflow's real server and a real browser: the printed links show what they promise, the saved views draw."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import CHROMIUM, Browser

from lit_lazy.command.main import main
from lit_lazy.config.files import load_module
from lit_lazy.tracking.serve import chosen
from lit_lazy.tracking.tracker import ExperimentLinks, Tracker, default_uri, experiment_links
from lit_lazy.tracking.views import AXES_VIEW, CELLS_VIEW, CHARTS_VIEW, LINKED_VIEWS, TABLE_VIEW, CellRun, views

pytestmark = pytest.mark.xdist_group("browser")  # one grid and one server for all
screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
ABLATION = "table2-backcopy_tiny"
ROWS = ("softmax", "lazy", "lazy ALiBi")
VIEWS = (TABLE_VIEW, CELLS_VIEW, CHARTS_VIEW, AXES_VIEW)
WHERE_MLFLOW_REPORTS_NOTHING = ("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "GITLAB_CI")
"""Variables of tests and of their machines."""
TITLES = f"{screenshots.CARDS}.map(card => card.innerText.split('\\n')[0])"
HEADERS = "[...document.querySelectorAll('[data-testid=experiment-view-compare-runs-section-header]')]"
SECTIONS = f"{HEADERS}.map(header => header.innerText)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The runs of three rows with two seeds, and a run of another experiment, which has no views."""
    runs = tmp_path_factory.mktemp("dashboard") / "runs"
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    command = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", ",".join(ROWS), "--seeds", "0,1"]
    assert main([*command, "--runs", str(runs), "--workers", "2"]) == 0
    other = Tracker(default_uri(runs), runs, "train-other")
    other.start_run("other", {"kind": "run"}, {}, {})
    return runs


@pytest.fixture(scope="module")
def links(runs: Path) -> Iterator[dict[str, str]]:
    """What `lit-lazy dashboard` prints of the ablation, by the name of the link."""
    with pytest.MonkeyPatch.context() as patch:
        for name in WHERE_MLFLOW_REPORTS_NOTHING:
            patch.delenv(name, raising=False)
        with screenshots.served_links(runs, "table2") as links:
            yield links


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_BROWSER"), "chromium is missing, and must not be here"
        pytest.skip("needs chromium on the PATH")
    with Browser(tmp_path_factory.mktemp("profile"), 6000, 4000, screenshots.FIRST_VISIT) as browser:
        yield browser


def opened(browser: Browser, link: str, shows: str) -> str:
    """The text of a page once an expression holds there."""
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
        for column in ("normaliser", "tau_init", "threshold", "learn_tau", "bias", "loss/excess", "mass/trigger"):
            assert f" {column} " in text, column
        assert "6 matching runs" in text

    def test_the_second_shows_every_cell_and_the_menu_leads_to_the_others(self, links, browser) -> None:
        text = opened(browser, links["all cells"], says("lazy seed 1"))
        for variant in ROWS:
            for seed in (0, 1):
                assert f"{variant} seed {seed}" in text
        assert "Group: softmax" not in text
        browser.click("document.querySelector('[data-testid=saved-views-trigger]')")
        items = "[...document.querySelectorAll('[role=menuitem]')]"
        assert browser.wait(f"{items}.map(item => item.innerText)")[: len(VIEWS)] == list(VIEWS)
        browser.click(f"{items}.find(item => item.innerText == {TABLE_VIEW!r})")
        browser.wait(says("Group: softmax"))

    def test_the_third_draws_results_trade_offs_and_curves_by_variant(self, links, browser) -> None:
        bars = {"loss/excess", "sink/first_key_weight_non_trigger", "sparsity/zero", "collapse/effective_rank"}
        scatters = {f"{name} vs. loss/excess" for name in ("sink/rate", "sparsity/zero", "collapse/effective_rank")}
        curves = {"val/excess", "watch/first_key_share", "watch/sparsity", "watch/tau_layer_0"}
        titles = sorted(bars | scatters | curves)
        opened(browser, links["charts"], f"{screenshots.DRAWN} && {titles}.every(title => {TITLES}.includes(title))")
        names = [section.partition("(")[0].strip() for section in browser.evaluate(SECTIONS)]
        assert names[:3] == ["Results by variant", "Loss against what attention does", "During training"]
        assert "(0)" not in " ".join(browser.evaluate(SECTIONS)), "an empty section"
        # Softmax has no threshold, and so no sparsity: the others have.
        for title, n in {"loss/excess": 3, "sparsity/zero": 2}.items():
            chart = f"{screenshots.CARDS}.find(card => card.innerText.startsWith({title!r}))"
            assert browser.evaluate(f"{chart}.querySelectorAll('.point').length") == n, title

    def test_the_fourth_draws_a_line_per_cell_through_the_axes(self, links, browser) -> None:
        opened(browser, links["parallel coordinates"], screenshots.DRAWN)
        titles = "[...chart.querySelectorAll('.dimension .label')].map(title => title.textContent)"
        drawn = browser.evaluate(f"[...document.querySelectorAll('.parcoords')].map(chart => {titles})")
        assert drawn == [["normaliser", "bias", "loss/excess"]]
        assert browser.evaluate(SECTIONS)[0].startswith("Every cell")

    def test_the_parent_shows_its_table(self, links, browser) -> None:
        text = opened(browser, links["its table"], screenshots.FRAMED)
        for artifact in (
            "table.html",
            "table.md",
            "table.csv",
            "table.tex",
            "table.json",
            "effects.png",
            "config.yaml",
        ):
            assert artifact in text
        assert "Model training" in text

    def test_the_pages_ask_this_machine_alone(self, links, browser) -> None:
        opened(browser, links["charts"], screenshots.DRAWN)
        asked = [urlsplit(url) for url in browser.requests]
        assert {url.hostname for url in asked if url.scheme.startswith(("http", "ws"))} == {"127.0.0.1"}

    @pytest.mark.long
    @pytest.mark.usefixtures("browser")
    def test_the_pictures_of_the_documentation_can_be_taken(self, links, tmp_path) -> None:
        taken = screenshots.take({"parallel coordinates": links["parallel coordinates"]}, tmp_path)
        assert [file.name for file in taken] == ["parallel-coordinates.png"]
        assert taken[0].read_bytes().startswith(b"\x89PNG")
        assert 20_000 < taken[0].stat().st_size < 200_000


class TestLinks:
    def test_only_those_of_the_named_ablation_are_printed(self, links) -> None:
        assert list(links)[:6] == [*LINKED_VIEWS, "runs", "its table"]

    def test_an_experiment_without_views_has_a_plain_link(self, runs) -> None:
        (other,) = [e for e in experiment_links(default_uri(runs), "http://host") if e.name == "train-other"]
        assert list(other.pages) == ["runs"]
        assert other.pages["runs"].endswith("/runs?workflowType=machine_learning")

    def test_a_name_is_an_experiment_s_or_all_that_an_ablation_or_a_search_has(self) -> None:
        names = ["a", "a-x", "a-y", "ab-x", "search-a-x", "search-b-x"]
        links = [ExperimentLinks(name, {}) for name in names]
        assert [e.name for e in chosen(links, "a")] == ["a"]
        assert [e.name for e in chosen(links[1:], "a")] == ["a-x", "a-y", "search-a-x"]
        assert [e.name for e in chosen(links, "b")] == ["search-b-x"]

    def test_an_unknown_name_is_told_in_a_line_and_nothing_is_served(self, runs, capsys) -> None:
        assert main(["dashboard", "table3", "--runs", str(runs)]) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert line.startswith(
            "lit-lazy: dashboard 'table3': MLflow holds no experiment or ablation of this name; there are: "
        )
        assert ABLATION in line
        assert "train-other" in line
        assert not said.out


def cell(variant: str, axes: dict[str, str], *metrics: str) -> CellRun:
    return CellRun(variant, axes, set(metrics))


class TestViews:
    SOFTMAX = cell("softmax", {"bias": "NoBias"}, "loss/val", "sink/rate", "val/loss")
    LAZY = cell("lazy", {"bias": "Alibi", "tau_init": "1.0"}, "loss/val", "watch/tau_layer_0", "watch/tau_layer_11")
    LAZIER = cell("lazier", {"bias": "Alibi", "tau_init": "2.0"}, "loss/val", "watch/tau_layer_2", "val/excess")

    def charts(
        self, name: str, cells: list[CellRun], main: tuple[str, ...] = ("loss/excess", "loss/val")
    ) -> list[dict]:
        return views(["bias", "tau_init"], ["loss/excess", "loss/val"], main, cells)[name]["compareRunCharts"]

    def test_only_what_cells_have_is_drawn(self) -> None:
        drawn = self.charts(CHARTS_VIEW, [self.SOFTMAX])
        assert [c.get("metricKey") or c["xaxis"]["key"] for c in drawn] == [
            "loss/val",
            "sink/rate",
            "sink/rate",
            "val/loss",
        ]
        assert [c["type"] for c in drawn] == ["BAR", "BAR", "SCATTER", "LINE"]
        assert drawn[2]["yaxis"]["key"] == "loss/val"
        columns = views([], ["loss/excess", "loss/val"], [], [self.SOFTMAX])[CELLS_VIEW]["selectedColumns"]
        assert [column for column in columns if "metrics" in column] == ["metrics.`loss/val`"]

    def test_tau_of_the_first_and_the_last_layer_is_drawn(self) -> None:
        drawn = [c.get("metricKey") for c in self.charts(CHARTS_VIEW, [self.LAZY, self.LAZIER])]
        assert [name for name in drawn if name and "tau" in name] == ["watch/tau_layer_0", "watch/tau_layer_11"]

    def test_a_cell_is_in_a_chart_of_the_axes_that_it_has(self) -> None:
        drawn = self.charts(AXES_VIEW, [self.SOFTMAX, self.LAZY, self.LAZIER])
        assert [c["selectedParams"] for c in drawn] == [["bias"], ["tau_init"]]
        assert all(c["selectedMetrics"] == ["loss/val"] for c in drawn)

    def test_before_there_are_cells_every_chart_is_ready(self) -> None:
        drawn = [c.get("metricKey") for c in self.charts(CHARTS_VIEW, [])]
        assert {"loss/excess", "loss/val", "sink/rate", "watch/first_key_share", "watch/tau_layer_0"} <= set(drawn)
        assert [c["selectedParams"] for c in self.charts(AXES_VIEW, [])] == [["bias", "tau_init"]]

    @pytest.mark.long
    def test_metrics_without_a_chart_stay_folded_below_by_their_groups(self) -> None:
        sections = views([], ["loss/val"], ["loss/val"], [self.SOFTMAX, self.LAZY])[CHARTS_VIEW]["compareRunSections"]
        assert [s["name"] for s in sections if s["display"]] == [
            "Results by variant",
            "Loss against what attention does",
            "During training",
        ]
        other = cell("other", {}, "loss/val", "mass/all", "init/mass/all", "epoch")
        sections = views([], ["loss/val"], ["loss/val"], [other])[CHARTS_VIEW]["compareRunSections"]
        assert [s["name"] for s in sections if not s["display"]] == ["Model metrics", "init/mass", "mass"]
