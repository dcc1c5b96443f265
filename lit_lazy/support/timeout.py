"""Calls with a timeout."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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
