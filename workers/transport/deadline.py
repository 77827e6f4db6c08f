"""A deadline for calls without a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(timeout_s: float, call: Callable[[], object]) -> None:
    """Make a call on a new thread, which is abandoned if the call does not return in time.

    Raises:
        TimeoutError: it did not.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError("no answer")
    for error in errors:
        raise error
