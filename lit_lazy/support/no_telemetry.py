"""Turns off the telemetry of libraries, unless the user has turned it on."""

import os

OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # of the client, the server and its pages
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables, read on import and inherited by child processes."""


def turn_off() -> None:
    """Set the variables that are unset. `DO_NOT_TRACK` is not set: it would override the user's choices."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
