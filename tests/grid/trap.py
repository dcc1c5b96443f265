"""Kills or errors before any effect of a command on files, by Python's audit events."""

import mmap
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instant import Command, Lab, LaunchOptions

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WAYS = ("the command", "a worker", "all", "the command, SIGTERM")


@dataclass
class Trap:
    """Kills a process of a command before its n-th effect, or lets that fail.

    An effect is a file that is opened to write, renamed, removed or locked. The counters are shared with forks.
    """

    root: Path
    way: str
    """Whose effects count, one of WAYS. If all are killed, every process dies at its next effect."""
    at: int
    """The effect's number, from 1; 0 for none."""
    error: int | None = None
    """Number of the system's error that the effect meets; None for SIGKILL."""
    most: int = 1
    """How many effects fail, from the n-th on."""
    pattern: str = ""
    """Only effects whose kind and path it matches count."""

    def __post_init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("q")
        self._command = 0

    @property
    def count(self) -> int:
        return self._shared[0]

    @property
    def is_sprung(self) -> bool:
        return bool(self._shared[1])

    def start(self, lab: Lab, **options: Any) -> Command:
        """Start a command that is watched with its workers."""
        launch = LaunchOptions(**{"workers": 1, "threads": 1} | options)

        def work(console: Any) -> bool:
            self._command = os.getpid()
            sys.addaudithook(self._notice)
            return lab.work_on(launch, console)

        lab.commands.append(command := Command(work, lab.training.log.parent))
        return command

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = self._find_path(event, arguments)
        if path is None or not re.search(self.pattern, f"{event} {path}"):
            return
        counts = self.way == "all" or (self.way != "a worker") == (os.getpid() == self._command)
        self._shared[0] += counts
        if counts and self.at <= self._shared[0] < self.at + self.most and self.at:
            self._shared[1] = 1
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error), path)
            os.kill(os.getpid(), signal.SIGTERM if "SIGTERM" in self.way else signal.SIGKILL)
        if self.is_sprung and self.way == "all" and self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def _find_path(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        """The file that an event changes; None for other events. A lock's file is not known."""
        if event == "fcntl.flock":
            return ""
        if event not in (*CHANGES, "open"):
            return None
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return None
        path = arguments[0]
        return str(path) if isinstance(path, str | os.PathLike) and str(path).startswith(str(self.root)) else None
