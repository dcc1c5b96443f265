"""Logging of a checkpoint's benchmarks to its MLflow run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_lazy.tracking.databases import sqlite_file
from lit_lazy.tracking.run_address import read_run_id
from lit_lazy.tracking.store import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker

ARTIFACT = "lm-eval.json"


def log_benchmarks(checkpoint: Path, metrics: Mapping[str, float], result: Mapping[str, Any], limited: bool) -> str:
    """Log benchmark metrics to the run of the checkpoint's folder; returns a one-line description of what was done.

    Logs nothing for a checkpoint outside a run folder or if only part of the questions was used (limited).
    """
    if limited:
        return "not logged to MLflow: with --limit these are not benchmark results"
    folder = checkpoint.absolute().parent
    run_id = read_run_id(folder)
    if not run_id:
        return f"not logged to MLflow: {folder} belongs to no run"
    # runs/train-NAME/KEY, or runs/ABLATION/cells/KEY
    runs = next((above for above in folder.parents[1:3] if (above / "mlflow.db").exists()), folder.parents[1])
    uri = default_uri(runs)
    if (file := sqlite_file(uri)) is not None and not file.exists():
        return f"not logged to MLflow: {os.fspath(file)} does not exist; set MLFLOW_TRACKING_URI"
    try:
        tracker = Tracker(uri, runs, folder.parent.name)
        if not tracker.has_run(run_id):
            return f"not logged to MLflow: it has no run {run_id}"
        tracker.log_after_end(run_id, metrics)
        tracker.log_text(run_id, json.dumps(result, indent=1), ARTIFACT)
    except TrackingError as error:
        return f"not logged to MLflow: {error}"
    return f"logged to MLflow with run {run_id}"
