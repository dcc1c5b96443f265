"""Work in threads of this process."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from lit_lazy.support.error_messages import UnfinishedError, describe_exception

LOOK_SECONDS = 0.2
T = TypeVar("T")


@contextmanager
def repeat_in_background(
    work: Callable[[bool], object],
    seconds: float,
    log: logging.Logger,
    lost: str,
    hangs: Callable[[], bool] = lambda: False,
) -> Iterator[list[str]]:
    """Call `work(False)` every few seconds from a thread until the context exits, then `work(True)`; no error ends it.

    lost: what an error means, logged with it once until `work` succeeds. hangs: whether to leave the thread alone.
    Gives a list that has, after the exit, the error of the last call, if any.
    """
    stop, last = threading.Event(), list[str]()

    def loop() -> None:
        ends = failed = False
        while not ends:
            ends = stop.wait(seconds)
            try:
                work(ends)
                failed = False
            except Exception as error:
                known = isinstance(error, UnfinishedError | OSError | ValueError)
                why = str(error) if known else describe_exception(error)
                if ends:
                    last.append(why)
                elif not failed:
                    log.warning("%s: %s", lost, why)
                failed = True

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield last
    finally:
        stop.set()
        thread.join(LOOK_SECONDS)  # meanwhile it begins its last call
        while thread.is_alive() and not hangs():
            thread.join(LOOK_SECONDS)
        if thread.is_alive():
            last.append("no answer")


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
