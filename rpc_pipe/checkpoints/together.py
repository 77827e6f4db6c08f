"""All workers do a thing, or none: what failed on one is raised on every worker, and is the same error there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..dependency import ConfigError, Damaged, Stalled
from ..workers.actor import WorkerActor

T = TypeVar("T")


def agreed(actor: WorkerActor, name: str, value: Callable[[], str], of: int) -> str:
    """Return on every worker what `value` gives on worker `of`.

    Raises:
        ConfigError: what it raised there, on every worker.
    """
    _, told = together(actor, name, lambda: value() if actor.worker == of else "", str)
    return str(told[of])


def together(
    actor: WorkerActor, name: str, do: Callable[[], T], tell: Callable[[T], Any] = lambda done: None
) -> tuple[T, list[Any]]:
    """Do something on every worker; return what it gave here, and what each worker tells of its own, in order.

    Raises:
        ConfigError: it failed on one, on every worker; of several the first that did not only wait for another.
    """
    done: list[T] = []
    own: Any = None
    failed = failure(None)
    try:
        done.append(do())
        own = tell(done[0])
    except (ConfigError, Stalled) as error:
        failed = failure(error)
    told = actor.exchange(name, [own, failed])
    raise_first([failure for _, failure in told])
    return done[0], [each for each, _ in told]


def failure(error: Exception | None) -> list[Any]:
    """Return what a worker tells of an error, whether it only waited for another one, and whether files are damaged."""
    return ["" if error is None else str(error), isinstance(error, Stalled), isinstance(error, Damaged)]


def raise_first(told: list[list[Any]]) -> None:
    """Raise the first cause of what workers tell."""
    for text, _, damaged in sorted(told, key=lambda each: bool(each[1])):
        if text:
            raise (Damaged if damaged else ConfigError)(text)
