"""Exit functions that run in the process that registered them, and not in its forks."""

import atexit
import os
from collections.abc import Callable
from typing import Any


def at_exit(call: Callable[..., object], *args: Any) -> Callable[[], None]:
    """Let this process call `call(*args)` when it ends, but none of its forks, which do not hold the resource.

    Returns:
        The function to give `atexit.unregister`, which cancels the call.
    """
    process = os.getpid()

    def own() -> None:
        if os.getpid() == process:
            call(*args)

    return atexit.register(own)
