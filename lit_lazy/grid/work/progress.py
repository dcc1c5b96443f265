"""Live progress of a grid: cells done, running and failed, time gone and time left."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_lazy.grid.queue.queue import FINISHED, Queue, State
from lit_lazy.support.console import clock

PLAIN_EVERY_SECONDS = 15.0
MOST_SHOWN = 12


class Progress:
    """A live display on a terminal; elsewhere a line whenever a cell has ended, at most every few seconds."""

    def __init__(
        self, queue: Queue, keys: Sequence[str], console: Console, notes: Callable[[], list[str]] = list
    ) -> None:
        """notes: what else there is to say."""
        self.queue, self.keys, self.console, self.notes = queue, set(keys), console, notes
        self._running: list[str] = []
        self.started = time.monotonic()
        self.done_before = _done(self._counts(queue.states()))
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_line, self._last_told = 0.0, (-1, False)

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()
        else:
            self._print_line(self._counts(self.queue.states()))

    def update(self, states: Mapping[str, State]) -> None:
        """Show these states of the queue's cells."""
        counts = self._counts(states)
        if self.live:
            self.live.update(self._panel(counts))
            return
        told, now = (_done(counts) + counts["failed"], counts["running"] > 0), time.monotonic()
        if told != self._last_told and (
            now - self._last_line >= PLAIN_EVERY_SECONDS or told == (self._last_told[0], True)
        ):
            self._last_line, self._last_told = now, told
            self._print_line(counts)

    def show_running(self, names: Sequence[str]) -> None:
        """Name the running cells from now on; the terminal has room for a few."""
        rest = [f"and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
        self._running = [*names[:MOST_SHOWN], *rest]

    def _counts(self, states: Mapping[str, State]) -> Counter[str]:
        return Counter(states.get(key, "waiting") for key in self.keys)

    def _summary(self, counts: Counter[str]) -> str:
        parts = [f"{_done(counts)}/{len(self.keys)} cells done", f"{counts['running']} running"]
        parts += [f"{counts[state]} {state}" for state in ("pruned", "failed") if counts[state]]
        elapsed = time.monotonic() - self.started
        return ", ".join([*parts, f"{clock(elapsed)} elapsed", self._rest(counts, elapsed), *self.notes()])

    def _rest(self, counts: Counter[str], elapsed: float) -> str:
        done = _done(counts) - self.done_before
        left = counts["waiting"] + counts["running"]
        if not left:
            return "nothing left"
        # Running cells are about half done, on average.
        progressed = done + 0.5 * min(counts["running"], left)
        return (
            f"about {clock(elapsed / progressed * (left - 0.5 * counts['running']))} left"
            if done
            else "estimating the rest"
        )

    def _print_line(self, counts: Counter[str]) -> None:
        self.console.print(self._summary(counts), highlight=False)

    def _panel(self, counts: Counter[str]) -> Group:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=len(self.keys), completed=_done(counts), width=40), self._summary(counts))
        names = [Text(f"  {name}", style="dim") for name in self._running]
        return Group(bar, *names)


def _done(counts: Mapping[str, int]) -> int:
    return sum(counts[state] for state in FINISHED)
