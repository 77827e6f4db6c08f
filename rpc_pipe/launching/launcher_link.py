"""A worker's side towards the launcher.

One socket carries the launcher's orders and the worker's messages; its end means that the launcher is gone.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any
from weakref import ref

from ..dependency import ConfigError
from ..system.at_exit import at_exit
from ..tracing import run_folders
from ..tracing.own_boards import Watchable, collect, end_calls, keep_boards, leave, roll_call_here, stay, tell_failure
from ..tracing.run_folders import RUN_FAILED, Ending, tell_end
from . import STOP

logger = logging.getLogger(__name__)

#: environment variable: descriptor of the socket for messages to the launcher, and for its orders
LINK = "RPC_PIPE_LINK"
#: environment variable: the folder of this attempt, which the launcher removes
FOLDER = "RPC_PIPE_FOLDER"
#: environment variable: the reaction to a loss that is not finite
NAN = "RPC_PIPE_NAN"
NANS = "stop", "warn", "ignore"
#: signals with the same meaning under torchrun, and their default handlers
_STOPS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_STOPS[signal.SIGUSR1] = signal.SIG_DFL  # SLURM's announcement of a job's end
#: seconds between checks whether a stop is still possible, and for reporting that it is not
_LOOK_EVERY_S, _LAST_WORDS_S = 0.1, 2.0


_lock = threading.Lock()
#: copying a list is atomic, also while another thread appends; a lock could deadlock in a signal handler
_attached: list[ref[Watchable]] = []
_stop_requested = False
#: whether the summary, or the cause of the end, has been reported
_concluded = _failed = False
_instead: Callable[[dict[str, Any]], None] | None = None


@cache
def _own_end() -> int:
    """Return the descriptor of the socket to the launcher; -1: there is no launcher.

    It is cached before the script runs, which may clear the environment.
    """
    return int(os.environ.get(LINK, -1))


def present() -> bool:
    """Return whether there is a launcher."""
    return _own_end() >= 0


def tell(**message: Any) -> None:
    """Send a message to the launcher or its substitute; without one print its text."""
    global _concluded, _failed
    _concluded |= message["kind"] == "result"
    _failed |= message["kind"] in ("failure", "wrong input")
    if present():
        with suppress(OSError), _lock, open(_own_end(), "w", closefd=False) as pipe:
            pipe.write(json.dumps(message) + "\n")
            return
    elif message["kind"] in ("failure", "wrong input"):
        tell_failure(message["text"], consequence=message.get("error") in ("PeerLost", "NotMet"))
    if not present() and _instead is not None:
        _instead(message)
    elif "text" in message:  # on a failure the launcher shows a worker's last printed lines
        print(message["text"], file=sys.stderr)


def tell_instead(handler: Callable[[dict[str, Any]], None]) -> None:
    """Pass the messages of this process to `handler` if there is no launcher, as under torchrun."""
    global _instead
    _instead = handler


def hold_leash() -> None:
    """Follow the launcher's orders in a thread, and end this process when the launcher has gone.

    The thread of a process that is stopped (SIGSTOP, a debugger) sees nothing. So the kernel continues the process when
    its parent ends; if the parent has ended before, the thread reads the end of the socket at once. SIGCONT and not
    SIGKILL: the thread also ends the children of this process, and clears up. And it does no harm to a worker if only
    the launcher's thread that started it ends.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(15, f"worker {os.environ.get('RANK')}".encode())  # PR_SET_NAME, which top and ps show
    # A separate descriptor, because a script may close the other.
    args = os.dup(_own_end()), Path(os.environ[FOLDER])
    threading.Thread(target=_follow, args=args, name="leash", daemon=True).start()


def lodge_children() -> None:
    """Let multiprocessing use the folder of this attempt for its files, because a killed worker removes none.

    Its path is short enough for unix sockets, which that of TMPDIR may not be.
    """
    vars(current_process())["_config"]["tempdir"] = os.environ[FOLDER]


def _follow(descriptor: int, folder: Path) -> None:
    while order := os.read(descriptor, 1):
        if order == STOP:
            _request_stop()
        else:
            from . import epochs  # of an elastic job that has lost a worker

            epochs.follow(order, descriptor, [actor for pipe in _pipelines() for actor in pipe.actors])
    _clear_up(folder)
    if os.getpgid(0) == os.getpid():  # with all processes that this worker has started
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _request_stop() -> None:
    global _stop_requested
    _stop_requested = True
    for pipeline in _pipelines():
        pipeline.request_stop()


def _pipelines() -> list[Watchable]:
    """Return the attached pipelines that are still alive."""
    return [pipeline for attached in _attached.copy() if (pipeline := attached()) is not None]


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
    _request_stop()
    threading.Thread(target=_end_when_broken, args=(number,), name="ending", daemon=True).start()


def _end_when_broken(number: int) -> None:
    """End this process if no step can be finished: torchrun also sends the signal when another worker has failed."""
    while not any(actor.carrier.broken for pipeline in _pipelines() for actor in pipeline.actors):
        time.sleep(_LOOK_EVERY_S)
    time.sleep(_LAST_WORDS_S)  # it may be about to report the cause
    leave()
    os.kill(os.getpid(), number)


def _clear_up(folder: Path) -> None:
    """Remove the folder that the launcher would have removed, if it has gone: a script may have broken the link."""
    deadline = time.monotonic() + _LAST_WORDS_S
    with suppress(OSError):  # another worker has removed them
        # Its sockets are closed a moment before it has ended.
        while run_folders.alive((folder / run_folders.LAUNCHER).read_text()):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_EVERY_S)
    tell_end(folder, Ending(RUN_FAILED, "its launcher is gone"))
    shutil.rmtree(folder, ignore_errors=True)


def stopping() -> bool:
    """Return whether this process has been asked to stop."""
    return _stop_requested or any(pipeline.stopped for pipeline in _pipelines())


def attach(pipeline: Watchable) -> None:
    """Pass the launcher's orders to `pipeline`, and write boards of its workers; once more when its model is cut.

    Raises:
        ConfigError: the environment's rule for losses that are not finite is unknown.
    """
    if all(each is not pipeline for each in _pipelines()):
        _attached.append(ref(pipeline, _attached.remove))
    nan = os.environ.get(NAN, "stop")
    if nan not in NANS:
        raise ConfigError(f"{NAN} {nan!r}: must be {', '.join(NANS[:-1])} or {NANS[-1]}")
    for actor in pipeline.actors:
        actor.nan = nan
    if _stop_requested:
        pipeline.request_stop()
    try:
        of_a_job = present() or any(not actor.carrier.post.within_process for actor in pipeline.actors)
        kept = keep_boards(pipeline)
        if kept and not present():
            for actor in pipeline.actors:
                actor.roll_call = roll_call_here
        if kept and of_a_job:
            _end_with_a_sentence(pipeline.actors[0].worker)
        if of_a_job and not present():
            heed(_STOPS, _stop_on_signal)
    except Exception as error:  # training does not depend on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)


@cache
def _end_with_a_sentence(worker: int) -> None:
    """Without a launcher, let worker 0 report the summary at its process's end; other workers stay until then."""
    # Exit functions run in reverse order: this one before the carrier's.
    at_exit(_end, worker)


def _end(worker: int) -> None:
    end_calls()  # `sys.exit` may end one worker while other workers go on
    if present():
        return  # it has the boards of all workers, and prints the summary
    if worker == 0:
        _say_how_it_went()
    elif not _has_failed():
        stay()


def _say_how_it_went() -> None:
    from ..tracing.run_summary import figures, summary  # at the end of the run

    try:
        found = None if _concluded or _has_failed() else figures(collect())
        if found is not None:
            tell(kind="result", text=summary(found, found["layout"]), json=found)
    except Exception as error:
        logger.warning("this run has no summary: %s: %s", type(error).__name__, error)


def _has_failed() -> bool:
    """Return whether this process ends by an error, which is reported elsewhere."""
    return _failed or getattr(sys, "last_value", None) is not None
