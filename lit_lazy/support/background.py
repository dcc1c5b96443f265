"""Work that is repeated while a command does something else."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeat_in_background(
    work: Callable[[], object], seconds: float, failures: tuple[type[Exception], ...], log: logging.Logger, lost: str
) -> Iterator[None]:
    """Call `work` every few seconds from a thread until the context exits, which waits for the last call.

    failures: exceptions that end nothing. lost: what it means, logged with the exception once until `work` succeeds.
    """
    stop = threading.Event()

    def loop() -> None:
        failed = False
        while not stop.wait(seconds):
            try:
                work()
                failed = False
            except failures as error:
                if not failed:
                    log.warning("%s: %s", lost, error)
                failed = True

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
