"""Waiting for others no longer than is said, whatever they do."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` gives or raises; TimeoutError where it has not ended after so many seconds.

    The timeouts of sockets are of each read: a server that sends a byte now and then would pass them for ever. What is
    given up goes on in a thread that ends with the process.
    """
    given: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            given.append(ask())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not given:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return given[0]
