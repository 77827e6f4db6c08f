"""Independent calls on all cores. Loads without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")

#: the function that a process of the pool calls
_work: Callable[[int], Any] | None = None


def in_parallel(
    work: Callable[[int], Result], count: int, tell: Callable[[float], None], *, cores: int | None = None
) -> list[Result]:
    """Return the results of `work` for each number below `count`; raise its errors.

    Args:
        work: may be a closure; its results are sent between processes.
        tell: function of the progress, 0 to 1; called after each result.
        cores: number of processes; 1: this one alone; None: one for each core that this process may use.
    """
    cores = min(count, len(os.sched_getaffinity(0)) if cores is None else cores)
    found: dict[int, Result] = {}
    if cores <= 1:
        for number in range(count):
            found[number] = work(number)
            tell(len(found) / count)
        return [*found.values()]
    global _work
    _work = work
    # The processes are forks, so closures need not be sent to them. The last calls, often the longest, begin first.
    with ProcessPoolExecutor(cores, get_context("fork")) as pool:
        calls = {pool.submit(_call, number): number for number in reversed(range(count))}
        for call in as_completed(calls):
            found[calls[call]] = call.result()
            tell(len(found) / count)
    return [found[number] for number in range(count)]


def _call(number: int) -> Any:
    assert _work is not None
    return _work(number)
