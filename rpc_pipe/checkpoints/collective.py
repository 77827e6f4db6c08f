"""Calls that succeed on all workers or on none: an error on one worker is raised on every worker."""

from collections.abc import Callable
from typing import Any, TypeVar

from ..dependency import ConfigError, Damaged, PipeError, Stalled, StorageError
from ..workers.actor import WorkerActor

T = TypeVar("T")
#: errors that keep their class on every worker; any other becomes a `ConfigError`
_TYPES = {kind.__name__: kind for kind in (Damaged, StorageError)}


def agreed(actor: WorkerActor, name: str, value: Callable[[], str]) -> str:
    """Return on every worker the result of `value` on the first process.

    Raises:
        ConfigError: on every worker, if `value` raised.
    """
    _, told = together(actor, name, lambda: value() if is_first_process(actor) else "", str)
    return str(told[0])


def is_first_process(actor: WorkerActor) -> bool:
    """Return whether this is the first member of the first worker, which need not be worker 0."""
    return actor.worker == min(actor.carrier.workers) and is_first_member(actor)


def is_first_member(actor: WorkerActor) -> bool:
    """Return whether this process is alone, or the first member of its worker."""
    return actor.members is None or actor.members.index == 0


def everywhere(actor: WorkerActor, name: str, value: Any) -> list[Any]:
    """Return every process's `value` on every process: of all first members, in order of workers, then of the next."""
    told = actor.exchange(name, value)
    return told if actor.members is None else [each for plane in actor.members.exchange(told) for each in plane]


def together(
    actor: WorkerActor, name: str, do: Callable[[], T], tell: Callable[[T], Any] = lambda done: None
) -> tuple[T, list[Any]]:
    """Make a call on every worker; return the local result, and each worker's report of its result, as `everywhere`.

    Raises:
        ConfigError: it failed on one, on every worker; of several the first that did not only wait for another.
    """
    done: list[T] = []
    own: Any = None
    failed, unexpected = failure(None), None
    try:
        done.append(do())
        own = tell(done[0])
    except Exception as error:  # any exception: the other workers wait for this worker's report
        failed, unexpected = failure(error), None if isinstance(error, PipeError) else error
    told = everywhere(actor, name, [own, failed])
    if unexpected is not None:
        raise unexpected
    raise_first([failure for _, failure in told])
    return done[0], [each for each, _ in told]


def failure(error: Exception | None) -> list[Any]:
    """Return a worker's text of an error, whether it only waited for another worker, and the name of its type."""
    text = "" if error is None else str(error) if isinstance(error, PipeError) else f"{type(error).__name__}: {error}"
    return [text, isinstance(error, Stalled), type(error).__name__]


def raise_first(told: list[list[Any]]) -> None:
    """Raise the first cause among the workers' reports."""
    for text, _, kind in sorted(told, key=lambda each: bool(each[1])):
        if text:
            raise _TYPES.get(kind, ConfigError)(text)
