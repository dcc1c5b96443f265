"""MLflow's real server and a real browser: the printed links open on the training runs, the parent shows its table."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_lazy.cli import main

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=30000"),
]


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[dict[str, str]]:
    """What `lit-lazy dashboard` prints over the runs of three rows, by the name of the link."""
    runs = tmp_path_factory.mktemp("dashboard") / "runs"
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    rows = "softmax,lazy,lazy ALiBi"
    command = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", rows, "--seeds", "0,1"]
    assert main([*command, "--runs", str(runs), "--workers", "2"]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "lit_lazy.cli", "dashboard", "--runs", str(runs), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    printed = ""
    assert server.stdout is not None
    while "Ctrl-C stops the server" not in printed:
        line = server.stdout.readline()
        assert line, f"the server ended: {printed}"
        printed += line
    yield {
        name.strip(): url for name, url in re.findall(r"^  (by variant|all cells|its table) +(http\S+)$", printed, re.M)
    }
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def page(url: str, profile: Path, holds: str) -> str:
    """The text of a page drawn by headless Chromium; tried again while MLflow is still fetching what it should hold."""
    text = ""
    for _ in range(3):
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=6000,2000", "--dump-dom", url],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", done.stdout))
        if holds in text:
            return text
        time.sleep(1)
    return text


@pytest.fixture
def browser(tmp_path: Path) -> Path:
    if CHROMIUM is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_BROWSER"), "chromium is missing, and must not be here"
        pytest.skip("needs chromium on the PATH")
    return tmp_path / "profile"


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
class TestPages:
    def test_the_grouped_link_shows_variants_and_every_axis_as_a_column(self, links, browser) -> None:
        text = page(links["by variant"], browser, "Group: softmax")
        assert "Group by: variant" in text
        for variant in ("softmax", "lazy", "lazy ALiBi"):
            assert f"Group: {variant} " in text
        for column in ("normaliser", "tau_init", "threshold", "renormalise", "bias", "loss/excess", "mass/trigger"):
            assert f" {column} " in text, column
        assert "6 matching runs" in text

    def test_the_flat_link_shows_every_cell(self, links, browser) -> None:
        text = page(links["all cells"], browser, "lazy seed 1")
        for variant in ("softmax", "lazy", "lazy ALiBi"):
            for seed in (0, 1):
                assert f"{variant} seed {seed}" in text
        assert "Group: softmax" not in text

    def test_the_parent_shows_its_table(self, links, browser) -> None:
        text = page(links["its table"], browser, "table.html")
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
