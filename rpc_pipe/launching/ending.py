"""The end of a worker that no launcher of ours has started, as under torchrun: signals, and the summary."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache

from ..boards.own_boards import collect, end_calls, leave, stay
from ..system.at_exit import at_exit
from . import LAST_WORDS_S, LOOK_EVERY_S
from . import launcher_link as link
from .launcher_link import Summarise

logger = logging.getLogger(__name__)

#: signals with the same meaning under torchrun, and their default handlers
_STOPS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_STOPS[signal.SIGUSR1] = signal.SIG_DFL  # SLURM's announcement of a job's end


def heed(signals: Mapping[signal.Signals, object], do: Callable[[int], None]) -> None:
    """Let the first of these signals call `do`, unless the script has a handler for it; a second one kills.

    Args:
        signals: with their usual handlers.
    """
    process = os.getpid()

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a fork, such as one that loads data
            os.kill(os.getpid(), number)
        else:
            do(number)

    for number, usual in signals.items() if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) is usual:
            signal.signal(number, on_signal)


def _stop_on_signal(number: int) -> None:
    """Without a launcher, finish the step and stop."""
    link.request_stop()
    threading.Thread(target=_end_when_broken, args=(number,), name="ending", daemon=True).start()


def _end_when_broken(number: int) -> None:
    """End this process if no step can be finished: torchrun also sends the signal when another worker has failed."""
    while not any(actor.carrier.broken for pipeline in link.pipelines() for actor in pipeline.actors):
        time.sleep(LOOK_EVERY_S)
    time.sleep(LAST_WORDS_S)  # it may be about to report the cause
    leave()
    os.kill(os.getpid(), number)


def prepare(worker: int, summarise: Summarise | None) -> None:
    """Prepare the end of a worker of a job, with a summary unless a launcher prints one."""
    if summarise is not None:
        # Exit functions run in reverse order: this one before the carrier's.
        _once_at_exit(_end, worker, summarise)
    if not link.present():
        heed(_STOPS, _stop_on_signal)


_once_at_exit = cache(at_exit)


def _end(worker: int, summarise: Summarise) -> None:
    """Without a launcher, let worker 0 report the summary; other workers stay until then."""
    end_calls()  # `sys.exit` may end one worker while other workers continue
    if link.present():
        return  # it has the boards of all workers, and prints the summary
    if worker == 0:
        _say_how_it_went(summarise)
    elif not _has_failed():
        stay()


def _say_how_it_went(summarise: Summarise) -> None:
    try:
        result = None if link.concluded() or _has_failed() else summarise(collect())
        if result is not None:
            link.tell(**result)
    except Exception as error:
        logger.warning("this run has no summary: %s: %s", type(error).__name__, error)


def _has_failed() -> bool:
    """Return whether this process ends by an error, which is reported elsewhere."""
    return link.failed() or getattr(sys, "last_value", None) is not None
