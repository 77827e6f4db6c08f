"""A deadline for calls without a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the result of a call on a new thread, which is abandoned if the call does not return in time.

    Raises:
        TimeoutError: it did not.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    if wait([done], timeout_s).not_done:
        raise TimeoutError("no answer")
    return done.result()
