"""The report is rebuilt from a grid's folder byte for byte, names what is missing, and renders in a real browser."""

import ctypes
import doctest
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import forked
import numpy as np
import pytest
from chromium import Browser
from made_grid import MadeGrid
from two_rows import ODD

from lit_lazy import results
from lit_lazy.command.main import main
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.report.ablation_page import REPORT, render_report
from lit_lazy.table.render import DETAILS, render_brief, render_html_parts, render_markdown
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, METRICS, RunResult, read_lines

pytestmark = pytest.mark.xdist_group("duo")  # one process, one grid
ID = "duo-backcopy_tiny"
UI = "http://127.0.0.1:5000"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
CLONE_NEWNS = 0x20000
"""Of Linux's unshare: mounts of its own."""


@pytest.fixture(scope="module")
def store(duo_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with a finished grid, whose report has figures of no variant."""
    runs = shutil.copytree(duo_runs, tmp_path_factory.mktemp("report") / "runs")
    over_training = (f"{name}_over_training" for name in ("loss", "tau", "bias.table", "sink"))
    names = ("effects", "loss_against_sparsity", *over_training)
    drawn = {path.name for path in (runs / ID).iterdir() if path.suffix in (".png", ".svg") and path.stat().st_size}
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    return runs


@pytest.fixture(scope="module")
def page(store: Path) -> str:
    """The report with figures of both variants."""
    return render_report(read_grid(store / ID), drawn=["all"])


class Reader(HTMLParser):
    """Collects tags in order, images, link targets, ids and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.images, self.links, self.ids, self.text = [], [], [], set[str | None](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.images += [given] * (tag == "img")
        self.links += [given["href"] or ""] if tag == "a" else []

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_holds_table_command_cells_versions_and_commit(store: Path, page: str) -> None:
    grid = read_grid(store / ID)
    opening, numbers = render_html_parts(grid.build_table())
    assert page.index(opening) < page.index("<figure") < page.index(numbers)
    text = Reader(page).text
    assert len(grid.cells) == 4
    for cell in grid.cells:
        assert cell.result is not None
        sha = cell.result.environment["git_sha"]
        for shown in (f"complete{cell.key}{sha}", f"{cell.result.made_in} (4 cells)", f"{sha} (4 cells)"):
            assert shown in text
    facts = "4 of 4 cells complete", f"Command{grid.plan.command}", "optimum_nats 1.5233", f"0, 1: softmax, {ODD}"
    assert [fact for fact in facts if fact not in text] == []


def test_it_needs_nothing_but_itself_and_names_are_text(page: str) -> None:
    assert page.isascii()
    read = Reader(page)
    assert not {"script", "link", "iframe", "object", "base", "i"} & set(read.tags)
    assert all(image["src"].startswith("data:image/") and image["alt"] for image in read.images)
    assert not re.search(r"url\(|@import", page)
    assert read.links
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert ODD in read.text


def test_each_variant_is_shown_by_its_first_seed(page: str) -> None:
    """Softmax has no tau or bias; all other figures of a run exist for both."""
    shown: dict[str, list[str]] = {}
    for image in Reader(page).images:
        title, _, subject = image["alt"].partition(": ")
        shown.setdefault(subject, []).append(title)
    assert list(shown) == ["all variants", "softmax, seed 0", f"{ODD}, seed 0"]
    over_training = ("Validation loss", "Offset parameter", "bias.table", "First key")
    expected = ["Differences to the baseline", "Loss against sparsity", *(f"{x} over training" for x in over_training)]
    assert shown["all variants"] == expected
    softmax, lazy = shown["softmax, seed 0"], shown[f"{ODD}, seed 0"]
    tau = {"Offset parameter by layer", "Learned parameters over training, by head"}
    assert set(lazy) - set(softmax) == {*tau, "Bias by distance"}
    assert {"Attention maps", "Sinks by layer and head", "Row mass by position"} <= {*softmax}


def test_the_command_rebuilds_it_to_the_byte(store: Path, duo_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / ID / REPORT
    path.unlink()
    assert main(["report", ID, "--runs", str(store)]) == 0
    assert str(path) in capsys.readouterr().out
    assert path.read_bytes() == (duo_runs / ID / REPORT).read_bytes()


@pytest.mark.long
def test_ui_url_links_the_run_of_every_cell(store: Path, duo_runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "linked.html"
    assert main(["report", ID, "--runs", str(store), "--ui-url", f"{UI}/", "--out", str(file)]) == 0
    linked = file.read_text()
    tracker = Tracker(default_uri(store), ID)
    expected = sorted(
        f"{UI}/#/experiments/{tracker.experiment_id}/runs/{run.info.run_id}?workflowType=machine_learning"
        for run in tracker.find({"kind": "cell"})
    )
    assert sorted(link for link in Reader(linked).links if not link.startswith("#")) == expected
    assert len(expected) == 4
    assert re.sub(rf'<a href="{UI}[^"]*">(.*?)</a>', r"\1", linked) == (duo_runs / ID / REPORT).read_text()


WRONG = [
    (["report", "nothing-at-all"], f"has no such results; it has {ID}"),
    (["report", ID, "--base", "stdlib"], f"--base 'stdlib': '{ID}' names its experiment already; leave --base out"),
    *(
        (["report", ID, "--ui-url", url], "must be http://HOST:PORT")
        for url in ("javascript:alert(1)", "http://host:port", f"{UI}/#/x", "http://me:geheim@host")
    ),
    (["report", ID, "--figures", "softmx"], "--figures 'softmx': is no row of this table (did you mean softmax?); "),
    (["ablate", "table", ID, "--out", "/proc/none"], "--out '/proc/none': nothing can be written there"),
    (["ablate", "table", ID, "--from", "x", "--out", "y"], "--from, --out: a table.json says its experiment and place"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_wrong_input_is_told_in_a_line_and_creates_nothing(store, tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = {path for path in store.rglob("*") if "-" not in path.suffix}
    assert main([*arguments, "--runs", str(store)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"lit-lazy: [^\n]+\n", said.err)
    assert message in said.err
    assert "geheim" not in said.err
    assert {path for path in store.rglob("*") if "-" not in path.suffix} == before
    assert not list(tmp_path.iterdir())


TAU = Diagnostics({"tau": np.ones((2, 2), np.float32), "sample": np.array([4, 16, 2])})


@pytest.fixture
def made(tmp_path: Path) -> MadeGrid:
    return MadeGrid(tmp_path)


def test_what_has_no_figures_is_named_and_the_next_seed_drawn(made: MadeGrid) -> None:
    made.finish("lazy", 0)
    made.finish("lazy", 1, diagnostics=TAU)
    read = Reader(render_report(made.read(), drawn=["all"]))
    assert [image["alt"] for image in read.images] == ["Offset parameter by layer: lazy, seed 1"]
    assert f"lazy, seed 0: {made.locate('lazy', 0).name} has no diagnostics.npz" in read.text
    assert "softmax: no cell is complete" in read.text


def test_a_failed_cell_is_listed_and_not_drawn(made: MadeGrid) -> None:
    assert "0 of 4 cells complete" in Reader(render_report(made.read())).text
    made.fail("lazy", 0, "DivergedError: loss is nan")
    made.train("lazy", 1, range(1, 2))
    made.finish("softmax", 0)
    read = Reader(render_report(made.read()))
    assert not read.images
    for cell in ("lazy0failed", "lazy1waiting", "softmax0complete", "softmax1waiting"):
        assert cell in read.text
    assert "Not complete: 1 of 4 cells have a result" in read.text


def test_variants_have_figures_that_are_asked_for_and_many_are_folded(tmp_path, monkeypatch) -> None:
    names = ["softmax", ODD, "a", "b"]
    made = MadeGrid(tmp_path, rows=names)
    for name in names:
        made.finish(name, 0, diagnostics=TAU)
    monkeypatch.setattr("lit_lazy.report.ablation_page.SHOWN_VARIANTS", 1)
    asked = f"<code>lit-lazy report {made.folder.name} --figures all</code>, or a list of rows, draws those of "
    for drawn, shown, others in (
        ((), ["softmax"], [ODD, "a", "b"]),
        ((ODD,), [ODD], ["softmax", "a", "b"]),
        (("all",), names, []),
    ):
        page = render_report(made.read(), drawn=drawn)
        assert re.findall("<summary>(.*) <small>seed 0</small></summary>", page) == [escape(name) for name in shown]
        assert ("<details open>" in page) == (len(shown) < 4)
        assert (f"{asked}{', '.join(escape(name) for name in others)}." in page) == bool(others)


def test_the_best_softmax_row_is_held_against_the_trigram(tmp_path: Path) -> None:
    """A warning of the table comes before all else."""
    rows = {
        "softmax at 0.1": ({"attention": {"class": "AttentionSpec", "normaliser": "Softmax"}}, (2.5, 2.4)),
        "softmax at 0.2": ({"attention": {"normaliser": "Softmax"}, "mixer": "SelfAttention"}, (2.2, 2.3)),
        "elastic": ({"attention": {"normaliser": "Elastic"}}, (1.0, 1.0)),
        "retnet": ({"attention": {"normaliser": "Softmax"}, "mixer": "RetNet"}, (1.1, 1.1)),
    }
    made = MadeGrid(tmp_path, rows=tuple(rows))
    made.change_plan(facts={"trigram_bits_per_byte": 2.5})
    text = Reader(render_report(made.read())).text
    assert text.index("no softmax row to hold against the byte-trigram baseline") < text.index("What was run")
    for name, (model, losses) in rows.items():
        for seed, loss in enumerate(losses):
            made.finish(name, seed, {"loss/bits_per_byte": loss}, model)
    (said,) = made.read().build_table().warnings
    assert said.startswith("UNDERTRAINED: 'softmax at 0.2' reaches 2.250 bits/byte; 2.200 would be 0.3 below")
    text = {"trigram_bits_per_byte": 2.5, "bytes_per_token": 1.0, "train_tokens": 3 * 8}
    made.change_plan(facts=text)  # more training would not help
    (said,) = made.read().build_table().warnings
    assert said.startswith("16 passes through the text: a model learns it by heart")
    made.change_plan(facts=text | {"trigram_bits_per_byte": 2.6, "train_tokens": 3 * 8 + 1})
    assert made.read().build_table().warnings == ()


IMAGES = "[...document.images].map(image => [image.complete, image.naturalWidth, image.alt])"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
GRIDS = "[...document.querySelectorAll('.ablation-table .grid')]"
NAMES = "[...document.querySelectorAll('.grid thead tr')].map(row => [...row.cells].map(cell => cell.textContent))"
LABELS = "[...document.querySelectorAll('.grid tbody tr:first-child')].map(r => [...r.cells].map(c => c.dataset.label))"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser without a network."""
    with Browser(tmp_path / "profile", 1600, 1000) as opened:
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        opened.call("Network.enable")
        opened.call("Network.emulateNetworkConditions", **offline)
        yield opened


@pytest.mark.browser
def test_a_browser_without_network_shows_all_of_it(browser: Browser, page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page)
    backgrounds = set()
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for width in (360, 1600):
            browser.resize(width, 1000)
            browser.open(file.as_uri())
            browser.wait("document.readyState === 'complete' && document.images.length > 0")
            images = browser.evaluate(IMAGES)
            assert len(images) == page.count("<img") > 10
            assert all(complete and natural > 0 for complete, natural, _ in images), images
            assert browser.evaluate(OVERFLOW) == 0, f"wider than {width}"
            assert browser.evaluate(f"{GRIDS}.every(grid => grid.scrollWidth <= grid.clientWidth)") == (width == 360)
            shown = browser.evaluate(f"{GRIDS}.map(grid => getComputedStyle(grid.querySelector('thead')).display)")
            assert set(shown) == {"none" if width == 360 else "table-header-group"}
        named, labelled = browser.evaluate(f"[{NAMES}, {LABELS}]")
        assert named == labelled, "a card's lines are named after the columns"
        backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        behind = browser.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundColor")
        assert behind == "rgb(255, 255, 255)"
    assert len(backgrounds) == 2
    assert browser.errors == []


# From Python


def test_cells_from_python_are_those_of_the_folder(store: Path) -> None:
    found, grid = results("duo", runs=store), read_grid(store / ID)  # its name is enough for its only grid
    assert found.table == grid.build_table()
    assert str(found) == found._repr_markdown_() == render_brief(found.table)
    assert repr(found) == f"<{ID}: 2 variants, 4 of 4 cells finished; print it for its table>"
    cells = found.cells.set_index(["variant", "seed"])
    assert sorted(cells.index) == [(ODD, 0), (ODD, 1), ("softmax", 0), ("softmax", 1)]
    for cell in grid.cells:
        line, result = cells.loc[(cell.variant, cell.seed)], RunResult.peek(cell.folder)
        assert result is not None
        assert {name: line[name] for name in result.metrics} == result.metrics
        assert line["time/train_seconds"] == result.timings["train_seconds"]
        about = (cell.key, str(cell.folder), result.environment["git_sha"], "complete")
        assert tuple(line[["key", "folder", "git_sha", "status"]]) == about
        assert line["checkpoint"] == str(cell.folder / FINAL_CHECKPOINT)
        curve = found.curves.query(f"variant == {cell.variant!r} and seed == {cell.seed} and metric == 'val/loss'")
        logged = [(r.step, r.metrics["val/loss"]) for r in read_lines(cell.folder / METRICS) if "val/loss" in r.metrics]
        assert list(zip(curve["step"], curve["value"], strict=True)) == logged != []
    lazy = cells.loc[(ODD, 1)]
    expected = {"normaliser": "Elastic", "normaliser.tau_init": 1.0}
    assert {name: lazy[f"model.attention.{name}"] for name in expected} == expected
    expected = {"model.tie_embeddings": True, "train.betas": [0.9, 0.95], "model.n_kv_heads": None}
    assert {name: lazy[name] for name in expected} == expected
    assert found.table.measures["loss/excess"][ODD].mean == pytest.approx(cells.loc[[ODD], "loss/excess"].mean())


def test_the_examples_of_the_function_and_of_the_readme_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on this grid and on the tiny probe."""
    monkeypatch.chdir(store.parent)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(r"^```python\n(from lit_lazy import .*?)^```", readme, re.M | re.S)
    assert len([line for line in shown.splitlines() if line]) <= 10
    shown = shown.replace('"backcopy"', '"backcopy_tiny"').replace("table2-backcopy_tuned", ID).replace("17", "7")
    exec(compile(shown, "README.md", "exec"), {})
    assert Path("heads.png").is_file()
    (example,) = [test for test in doctest.DocTestFinder().find(results, globs={}) if test.examples]
    for line in example.examples:
        line.source = line.source.replace("table2-backcopy", ID)
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


# A read-only archive


def make_read_only(folder: Path) -> None:
    """Forbid this process to write below a folder: by modes or, for root, who ignores them, by a mount of its own."""
    if os.geteuid():
        for path in [folder, *folder.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
        return
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    for words in (["--make-rprivate", "/"], ["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
        subprocess.run(["mount", *words], check=True)
    with pytest.raises(OSError, match="Read-only"):
        (folder / "new").touch()


@pytest.fixture(scope="module")
def archive(duo_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the runs, with a question's results."""
    if not os.geteuid() and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("root may write anywhere, and this machine permits no mounts")
    folder = shutil.copytree(duo_runs, tmp_path_factory.mktemp("cd") / "runs")
    shutil.copytree(RESULTS / "q_window_2-stdlib_small", folder / "q_window_2-stdlib_small")
    return folder


def run_on_archive(archive: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Status, output and errors of commands in a process that cannot write to the archive, nor see its original."""

    def work() -> list[tuple[int, str, str]]:
        make_read_only(archive)
        found = []
        for words in commands:
            out, errors = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(errors):
                found.append((main(words), out.getvalue(), errors.getvalue()))
        return found

    return forked.run_in_fork(work)


def test_a_read_only_archive_is_read_and_needs_a_place_for_what_is_written(duo_runs, archive, tmp_path) -> None:
    table = render_markdown(read_grid(duo_runs / ID).build_table())
    hidden = duo_runs.rename(duo_runs.with_name("hidden"))
    try:
        *found, report_here, table_here, dashboard, runs = run_on_archive(
            archive,
            ["report", "duo", "--runs", str(archive), "--out", str(tmp_path / "report.html")],
            ["ablate", "table", ID, "--runs", str(archive), "--out", str(tmp_path / "table")],
            ["ablate", "status", ID, "--runs", str(archive)],
            ["ablate", "verdicts", str(archive)],
            ["report", ID, "--runs", str(archive)],
            ["ablate", "table", ID, "--runs", str(archive)],
            ["dashboard", "--runs", str(archive)],
            ["runs", "--runs", str(archive)],
        )
    finally:
        hidden.rename(duo_runs)
    assert [(status, errors) for status, _, errors in found] == 4 * [(0, "")]
    assert "4 of 4 cells complete" in (tmp_path / "report.html").read_text()
    assert found[1][1].startswith("duo on backcopy_tiny\n\nNo row learned the task.")
    assert (tmp_path / "table" / DETAILS).read_text().strip() == table.strip()
    assert (tmp_path / "table" / "effects.png").stat().st_size
    assert f"{ID}: 4/4 cells complete" in found[2][1]
    assert "q_window_2" in found[3][1]
    said = f"lit-lazy: --runs {str(archive)!r}: is read-only"
    assert report_here[::2] == table_here[::2] == (2, f"{said}; say by --out where to write\n")
    why = "MLflow writes in its database; copy the folder, and name the copy"
    assert dashboard == runs == (2, "", f"{said}, and {why}\n")
