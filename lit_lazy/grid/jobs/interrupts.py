"""Interrupts of a worker: they arrive between any two of its steps, and are held back where one would do harm."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch.callbacks import Callback


class Interrupts:
    """Holds back SIGINT and SIGTERM while it is entered, except where they are allowed.

    There the first one raises KeyboardInterrupt. Further ones are ignored, so that what is held is requeued.
    To be entered in the main thread, which alone receives signals.
    """

    def __init__(self) -> None:
        self._arrived = self._allowed = False

    def __enter__(self) -> "Interrupts":
        self._arrived = False
        self._former = {
            number: signal.signal(number, self._handle_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise what was held back until the end."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Within, an interrupt is raised when it arrives, or at once if it has arrived before."""
        try:
            self._allowed = True
            self.check()
            yield
        finally:
            self._allowed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if an interrupt has arrived."""
        if self._arrived:
            raise KeyboardInterrupt

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._arrived = True
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt


class EndIfInterrupted(Callback):
    """Raises an interrupt again that was lost: Python drops what is raised in the callback of a weak reference."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def on_train_batch_start(self, *_args: object, **_kwargs: object) -> None:
        self._interrupts.check()

    def on_validation_batch_start(self, *_args: object, **_kwargs: object) -> None:
        self._interrupts.check()
