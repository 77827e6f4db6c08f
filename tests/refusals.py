"""Expectations of refusals: by class and subject, not by their sentences, so that words can be improved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpc_pipe.dependency import ConfigError, PipeError, WorkerFailure


@contextmanager
def refused(subject: str, kind: type[PipeError] = ConfigError) -> Iterator[pytest.ExceptionInfo[PipeError]]:
    """Expect a refusal of an option, a part, or a file by its name; of a worker that failed: that of its cause."""
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value.__cause__ if isinstance(raised.value, WorkerFailure) else raised.value
    assert isinstance(error, PipeError) and subject in (error.subject, Path(error.subject).name), raised.value


@contextmanager
def failed(kind: type[BaseException]) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect that a worker failed by an error of this class."""
    with pytest.raises(WorkerFailure) as raised:
        yield raised
    assert type(raised.value.__cause__) is kind, raised.value
