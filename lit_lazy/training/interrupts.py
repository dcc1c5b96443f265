"""Signals that stop a training, deferred while they would do harm, and in its steps until the step has a checkpoint."""

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_lazy.training.ranks import RankGroup

STDOUT, STDERR = 1, 2
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; a batch system or `kill`; a terminal or connection that was closed."""
NOTE = b"stopping after this step, with a checkpoint of it; once more stops at once\n"


class Interrupts:
    """Context that takes the signals that stop a training over, unless they are ignored.

    The first raises KeyboardInterrupt within `allow`, and elsewhere waits for the next `check`. A further one is
    ignored if `patient`, as by a worker, which must give its cells back; otherwise the former handler, which usually
    raises, gets it. Does nothing except in the main thread, the only one that receives signals.
    """

    def __init__(self, patient: bool = False) -> None:
        self.patient, self.arrived = patient, False
        self._entered = self._allowed = False
        self._former = _get_handlers()

    def __enter__(self) -> "Interrupts":
        self.arrived, self._entered, self._former = False, True, _get_handlers()
        self.set_handlers()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise a deferred interrupt unless another exception is raised."""
        self._entered = False
        self.set_handlers()
        if kind is None:
            self.check()

    def set_handlers(self) -> None:
        """Set the handlers that belong here now; also to be called after a library has set its own."""
        if threading.current_thread() is threading.main_thread():
            own = self._entered and (self.patient or not self.arrived)
            for number, former in self._former.items():
                signal.signal(number, self._handle_signal if own and former != signal.SIG_IGN else former)

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Context in which an interrupt is raised, also one that arrived earlier."""
        try:
            self._allowed = True
            self.check()
            yield
        finally:
            self._allowed = False

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Context within `allow` in which an interrupt only arrives."""
        allowed, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = allowed and not self.arrived

    def check(self) -> None:
        """Raise KeyboardInterrupt if an interrupt has arrived."""
        if self.arrived:
            raise KeyboardInterrupt

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the terminal was closed: writing to it would be an error
            for stream in (STDOUT, STDERR):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        self.arrived = True
        if not self.patient:
            self.set_handlers()
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
        if not self.patient:
            os.write(STDERR, NOTE)  # printing is not safe in a handler


def _get_handlers() -> dict[int, Any]:
    """The handlers of the signals that were set from Python."""
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    return {number: handler for number, handler in handlers.items() if handler is not None}


class StopOnInterrupt(Callback):
    """Ends a training after the step in which an interrupt arrives, once a checkpoint of that step is written.

    On one device a validation ends at once, and is repeated when the run resumes; on several, they end it together.
    """

    def __init__(self, interrupts: Interrupts, path: Path, group: RankGroup | None) -> None:
        """path: of the checkpoint to resume from."""
        self.interrupts, self.path, self.group = interrupts, path, group

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Lightning's handler of SIGTERM would message the other ranks in the middle of a collective."""
        self.interrupts.set_handlers()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, outputs, batch
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        arrived = self.interrupts.arrived
        if (self.group is None and arrived) or (self.group and self.group.agree_to_stop(trainer.global_step, arrived)):
            self._stop(trainer)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_args: Any, **_kwargs: Any
    ) -> None:
        if self.group is None and self.interrupts.arrived:
            pl_module.on_validation_epoch_end()  # the trained weights, not their average
            self._stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        if self.group and trainer.strategy.broadcast(self.interrupts.arrived):
            self._stop(trainer)

    def _stop(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        raise KeyboardInterrupt
