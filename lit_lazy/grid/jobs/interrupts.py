"""Interrupts of a worker, deferred while they would do harm."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch.callbacks import Callback


class Interrupts:
    """Context that defers SIGINT and SIGTERM except within `allow`.

    There the first one raises KeyboardInterrupt; further ones are ignored, so that held cells are requeued. Enter it in
    the main thread, the only one that receives signals.
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
        """Raise a deferred interrupt unless another exception is raised."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Context in which interrupts are raised, also one that arrived earlier."""
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
    """Raises a lost interrupt again: Python drops exceptions raised in weak reference callbacks."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def on_train_batch_start(self, *_args: object, **_kwargs: object) -> None:
        self._interrupts.check()

    def on_validation_batch_start(self, *_args: object, **_kwargs: object) -> None:
        self._interrupts.check()
