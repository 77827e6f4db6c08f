"""What every test needs."""

import os
import signal
from collections.abc import Iterator

import pytest

collect_ignore = ["trials"]

# A shell without job control lets what it starts in the background ignore Ctrl-C, and so all that this starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Leave the environment as it was: commands, which have a process of their own elsewhere, tell workers by it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
