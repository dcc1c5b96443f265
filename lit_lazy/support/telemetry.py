"""What the libraries below would report to their makers: off, unless a user has turned it on."""

import os

OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a client's, a server's, and that of the pages it serves
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables that are read on import, and inherited by every process that one of ours starts."""


def turn_off() -> None:
    """Set what the user has not set. `DO_NOT_TRACK` stays theirs: it would overrule what they turn on."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
