"""Runs folders with a prepared MLflow store; databases that tests replace."""

import gc
import shutil
from pathlib import Path

import sqlalchemy


def make_runs(folder: Path, store: Path) -> Path:
    """An empty runs folder with a copy of the store."""
    (runs := folder / "runs").mkdir()
    shutil.copy(store, runs / "mlflow.db")
    return runs


def forget_databases() -> None:
    """Close this process's connections to database files, of which one was replaced."""
    for engine in gc.get_objects():
        if type(engine) is sqlalchemy.Engine:
            engine.dispose()
