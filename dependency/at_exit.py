"""What a process does at its end, and its forks do not."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any


def at_exit(call: Callable[..., object], *args: Any) -> Callable[[], None]:
    """Let this process call `call(*args)` when it ends, but no fork of it: what it would leave is not the fork's.

    Returns:
        what `atexit.unregister` takes to take that back.
    """
    process = os.getpid()

    def own() -> None:
        if os.getpid() == process:
            call(*args)

    return atexit.register(own)
