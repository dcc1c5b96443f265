"""One thread per process (two run side by side), and a ready MLflow store, whose first touch takes seconds."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without experiments of ours, to be copied."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty runs folder with a ready store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip elsewhere, and say why."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
