"""Work in a thread: repeated while a command does something else, or with a timeout."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar


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


T = TypeVar("T")


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T:
    """The result or the exception of `ask`. Raises TimeoutError if it takes longer.

    A socket's timeout limits each read, so a server that sends a byte now and then never exceeds it. After a timeout,
    the call continues in a daemon thread.
    """
    answer = Future[T]()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    wait([answer], seconds)
    if not answer.done():
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answer.result()
