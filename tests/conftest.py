"""One thread per process (two run in parallel), Triton's interpreter without a GPU, and a prepared MLflow store."""

import faulthandler
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
from chromium import CHROMIUM
from filelock import FileLock
from mistakes import place
from mlflow_server import mlflow_server
from postgres import postgres_server
from stores import make_runs
from task_files import offline, task_folder
from torch_alone import torch_site

from lit_lazy.support import console

__all__ = ["mlflow_server", "offline", "place", "postgres_server", "task_folder", "torch_site"]

# Imports and the collection make millions of objects and hardly any garbage, so none is looked for until its end.
gc.disable()

# What a user's shell names is no store of tests.
os.environ.pop("MLFLOW_TRACKING_URI", None)

# A busy machine must not add lines to what a command says.
console.QUIET_SECONDS = math.inf

# Forks of a process with threads must not collect inherited objects, and must report what ends them.
os.register_at_fork(after_in_child=gc.freeze)
os.register_at_fork(after_in_child=lambda: faulthandler.enable(2))

# A shell without job control starts background jobs, and so these tests and their children, with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose Triton's interpreter without a GPU. The process that only hands out tests imports no torch."""
    if session.config.getoption("dist", "no") == "no":
        import torch

        # Triton decides at a kernel's definition, so this precedes the import of flash_lazy.
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _cheap_grids() -> None:
    import forked

    forked.make_cheap(fork=True)


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Write tables without figures and empty reports: drawing takes longer than a tiny grid."""
    from lit_lazy.report import ablation_page

    def write_empty_report(_grid: object, folder: Path, *_: object) -> None:
        (folder / ablation_page.REPORT).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation_page, "draw_table_figures", lambda _table: {})
        patch.setattr(ablation_page, "write_report", write_empty_report)
        yield


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the other ranks of a run as forks of this process, which has done their imports."""
    import forked

    from lit_lazy.training import ranks, run

    monkeypatch.setattr(ranks, "subprocess", forked)
    # A fork has the classes of users' files; importing them again would duplicate them.
    monkeypatch.setattr(run, "list_user_files", lambda _: [])


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory, _cheap_grids: None) -> Path:
    """An MLflow database without our experiments, to be copied: its creation takes seconds."""
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "empty-mlflow.db"
    with FileLock(f"{path}.lock"):  # one for all processes of a test run
        if not path.exists():
            MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs folder with a prepared store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return make_runs(tmp_path, empty_store)


@pytest.fixture(scope="session")
def duo_runs(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A runs folder with a training and a finished ablation, `duo.py` beside it, with its models and report.

    To be copied; the tests that need it are one group, and so run in one process.
    """
    from two_rows import ODD, two_rows

    from lit_lazy.command.main import main

    runs = make_runs(tmp_path_factory.mktemp("duo"), empty_store)
    ablation = runs.with_name("duo.py")
    ablation.write_text(two_rows("duo", lazy=ODD))
    command = ["ablate", "run", str(ablation), "--keep-checkpoint", "--workers", "1", "--runs", str(runs)]
    assert main(command) == 0
    assert main(["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1"]) == 0
    return runs


@pytest.fixture
def postgres_storage(postgres_server: str) -> str:
    return postgres.create_database(postgres_server, "queue")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a file in one process, which makes once what its tests share, but the kernels' anywhere, and last.

    So no process waits for a long file. Skip tests that need a GPU, or a browser, with a reason without one.
    """
    import torch

    items.sort(key=lambda item: "kernels" in item.path.parts)
    for item in items:
        if "kernels" not in item.path.parts and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
        if item.get_closest_marker("browser") and CHROMIUM is None:
            assert not os.environ.get("LIT_LAZY_REQUIRE_BROWSER"), "chromium is missing, and must not be here"
            item.add_marker(pytest.mark.skip(reason="needs chromium on the PATH"))


@pytest.fixture
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own for the Python files that transformers copies from a model's folder and imports."""
    import transformers

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget()
    yield
    forget()
