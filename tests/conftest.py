"""What every test needs."""

import gc
import os
import signal
from collections.abc import Iterator

import fork_server
import hypothesis
import pytest

collect_ignore = ["trials", "mortal.py", "forked.py", "rpc_pipe/torch_runtime.py"]

# As a worker has: tests share few cores, on which the threads of one operation would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take as long as it takes on a busy machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# A shell without job control lets what it starts in the background ignore Ctrl-C, and so all that this starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A command that runs within a test would keep its priority for all later tests of the process: priority cannot rise.
os.nice = lambda increment: 0


def pytest_configure(config: pytest.Config) -> None:
    """Start one fork server for all test processes of a run."""
    if getattr(config.option, "numprocesses", None) and hasattr(os, "pidfd_open"):
        fork_server.listen()


def pytest_collection() -> None:
    """Search for no garbage while modules and tests are made, which stay to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep modules and tests out of the garbage collections of each test."""
    gc.freeze()
    gc.set_threshold(5_000)  # most of what tests make ends by its last reference
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    """Keep what a file's tests have imported and remembered out of the garbage collections of later ones."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Leave environment and signals as they were: commands, which have a process elsewhere, tell workers by it."""
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
    for number, handler in handlers.items():  # a worker of a job, which has a process of its own too, sets them
        signal.signal(number, handler)
