"""This process's standard streams, and the telemetry of its libraries."""

import io
import os
import sys
from typing import Any

OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # of the client, the server and its pages
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables, read on import and inherited by child processes."""


def turn_off_telemetry() -> None:
    """Set the variables that are unset. `DO_NOT_TRACK` is not set: it would override the user's choices."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)


class _Outlet(io.FileIO):
    """A stream whose reader may be gone: what is written then is lost, as in /dev/null."""

    is_read = True

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.is_read = False
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())  # child processes write to it too
            return super().write(data)


def prepare_streams() -> None:
    """Let no closed stream, no pipe without a reader and no character that an encoding lacks end the process."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a file, such as a database, would get its number
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # and no notebook's or test's
            stream.flush()
            buffer = io.BufferedWriter(_Outlet(stream.fileno(), "wb", closefd=False))
            by_line = stream.line_buffering or stream.write_through
            stream = io.TextIOWrapper(buffer, stream.encoding, line_buffering=by_line)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:backslashreplace"  # of child processes


def is_stdout_read() -> bool:
    """Whether no write to standard output has found its reader gone."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(raw, _Outlet) or raw.is_read
