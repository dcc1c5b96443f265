"""Work in a thread: repeated while a command does something else, or as long as there is patience for it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from lit_lazy.support.errors import UnfinishedError, describe_exception

LOOK_SECONDS = 0.2


class Patience:
    """The time that work may take from its last progress on, at first from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Progress was made."""
        self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the work hangs."""
        return time.monotonic() - self._since > self.seconds


@contextmanager
def repeat_in_background(
    work: Callable[[], object], seconds: float, log: logging.Logger, lost: str, patience: Patience | None = None
) -> Iterator[None]:
    """Call `work` every few seconds from a thread until the context exits, which waits for the last call.

    No exception ends anything. lost: what one means, logged with it once until `work` succeeds. patience: with the last
    call, over only if that hangs; None for an endless one.
    """
    stop = threading.Event()

    def loop() -> None:
        failed = False
        while not stop.wait(seconds):
            try:
                work()
                failed = False
            except Exception as error:
                if not failed:
                    log.warning("%s: %s", lost, describe_failure(error))
                failed = True

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        while thread.is_alive() and not (patience and patience.is_over):
            thread.join(LOOK_SECONDS)
        if patience and not thread.is_alive():
            patience.renew()


def describe_failure(error: Exception) -> str:
    """An exception of such work: a foreseen one by its message, any other by its type too."""
    return str(error) if isinstance(error, UnfinishedError | OSError | ValueError) else describe_exception(error)


T = TypeVar("T")


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T:
    """The result or the exception of `ask`. Raises TimeoutError if it takes longer.

    A socket's timeout limits each read, so a server that sends a byte now and then never exceeds it. After a timeout,
    the call continues in a daemon thread.
    """
    return call_with_patience(Patience(seconds), ask)


def call_with_patience(patience: Patience, ask: Callable[[], T]) -> T:
    """As `call_with_timeout`, for a call that may take long as long as it makes progress; none if patience is over."""
    answer = Future[T]()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    if not patience.is_over:
        threading.Thread(target=work, daemon=True).start()
    while not (answer.done() or patience.is_over):
        wait([answer], min(LOOK_SECONDS, patience.seconds))
    if not answer.done():
        raise TimeoutError(f"no answer in {patience.seconds:g} s")
    return answer.result()
