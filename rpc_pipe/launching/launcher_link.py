"""A worker's side towards the launcher.

The launcher's leash ends the worker when the launcher is gone; what the worker tells goes to the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

from ..dependency import ConfigError
from ..dependency.at_exit import at_exit
from ..tracing import run_folders
from ..tracing.mirror import RemoteBoards
from ..tracing.own_boards import (
    collect,
    end_calls,
    keep_boards,
    leave,
    release,
    roll_call_here,
    stay,
    tell_failure,
)
from ..tracing.run_ending import RUN_FAILED, Ending, tell_end
from ..tracing.run_summary import figures, lost_lines, sentence
from ..tracing.watchable import Watchable

logger = logging.getLogger(__name__)

#: environment variables: descriptor to write messages to, descriptor to read orders from
TELL, LEASH = "RPC_PIPE_TELL", "RPC_PIPE_LEASH"
#: environment variable: the folder of this attempt, which the launcher removes at its end
FOLDER = "RPC_PIPE_FOLDER"
#: environment variable: what is done about a loss that is not finite
NAN = "RPC_PIPE_NAN"
NANS = "stop", "warn", "ignore"
#: prctl(2)
_PR_SET_PDEATHSIG = 1
#: an order of the launcher: finish the step and stop
STOP = b"s"
#: signals that ask for the same where torchrun is the launcher, and what is done then to one that nobody handles
_STOPS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
#: how often who was asked to stop looks whether it can, and what it is given to say that it cannot
_LOOK_EVERY_S, _LAST_WORDS_S = 0.1, 2.0


class Attachable(Watchable, Protocol):
    """A training that the launcher can stop."""

    @property
    def stopped(self) -> bool:
        """Whether it has been stopped."""

    def request_stop(self) -> None:
        """Ask all workers to stop after the step that runs now."""


_lock = threading.Lock()
#: a list is copied at once, also while another thread adds to it; a lock would not do where a signal comes
_attached: list[ref[Attachable]] = []
_stop_requested = False
#: whether the user has been told how the run went, or why it ends
_concluded = _failed = False
_instead: Callable[[dict[str, Any]], None] | None = None


@cache
def _told_by() -> tuple[int, int] | None:
    """Return a descriptor of the pipe that the launcher reads, and the pipe's inode; None: there is no launcher.

    Asked for before the script runs, which may clear its environment.
    """
    descriptor = int(os.environ.get(TELL, -1))
    return (descriptor, os.fstat(descriptor).st_ino) if descriptor >= 0 else None


def present() -> bool:
    """Tell whether a launcher is there."""
    return _told_by() is not None


def heard() -> bool:
    """Tell whether what is told reaches anybody."""
    return present() or _instead is not None


def tell(**message: Any) -> None:
    """Send a message to the launcher, or to who took its place in this process."""
    global _concluded, _failed
    _concluded |= message["kind"] in ("summary", "result")
    _failed |= message["kind"] in ("failure", "wrong input")
    if (found := _told_by()) is not None:
        descriptor, inode = found
        try:
            if os.fstat(descriptor).st_ino == inode:  # a script may close it, and what it opens then gets its number
                with _lock, open(descriptor, "w", closefd=False) as pipe:
                    pipe.write(json.dumps(message) + "\n")
                return
        except OSError:
            pass
        if "text" in message:  # the launcher shows what a worker printed last
            print(message["text"], file=sys.stderr)
        return
    if message["kind"] in ("failure", "wrong input"):
        tell_failure(message["text"], consequence=message.get("consequence", False))
    if _instead is not None:
        _instead(message)


def tell_instead(handler: Callable[[dict[str, Any]], None]) -> None:
    """Without a launcher, as under torchrun, let `handler` have the messages of this process."""
    global _instead
    _instead = handler


def hold_leash() -> None:
    """Watch the launcher from a thread: do as it orders, and end at once when it is gone."""
    if LEASH in os.environ:
        _wake_when_orphaned()
        left = os.environ.get(FOLDER, ""), os.environ.get(run_folders.FOLDER, run_folders.OFF)
        threading.Thread(target=_follow, args=(int(os.environ[LEASH]), *left), name="leash", daemon=True).start()


def lodge_children() -> None:
    """Let multiprocessing keep what children need in a folder of the launcher's: killed workers remove none.

    Unix sockets are there, whose paths may not be long, as that of TMPDIR may be.
    """
    folder = os.environ.get(run_folders.FOLDER, run_folders.OFF)
    if folder == run_folders.OFF:
        folder = os.environ.get(FOLDER, "")
    if folder:
        vars(current_process())["_config"]["tempdir"] = folder


def _follow(descriptor: int, folder: str, boards: str) -> None:
    while order := os.read(descriptor, 1):
        if order == STOP:
            _request_stop()
    _clear_up(folder, boards)  # the launcher is gone, however it went
    if os.getpgid(0) == os.getpid():  # with all that this worker has started, as the launcher would end it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _request_stop() -> None:
    global _stop_requested
    _stop_requested = True
    for pipeline in _pipelines():
        pipeline.request_stop()


def _pipelines() -> list[Attachable]:
    """Return those that are attached and still used."""
    return [pipeline for attached in _attached.copy() if (pipeline := attached()) is not None]


def _stop_on_signals() -> None:
    """Without a launcher, let signals finish the step and stop by which torchrun and clusters end workers."""
    for number, usual in _STOPS.items():
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(number) is usual:  # a script's own handler stays
            signal.signal(number, partial(_on_stop, os.getpid()))


def _on_stop(process: int, number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one kills
    if os.getpid() != process:  # a fork, such as one that loads data
        os.kill(os.getpid(), number)
        return
    _request_stop()
    threading.Thread(target=_end_when_broken, args=(number,), name="ending", daemon=True).start()


def _end_when_broken(number: int) -> None:
    """End this process once no step can be finished any more: torchrun ends workers too when another has failed."""
    while not any(actor.carrier.broken for pipeline in _pipelines() for actor in pipeline.actors):
        time.sleep(_LOOK_EVERY_S)
    time.sleep(_LAST_WORDS_S)  # it may be about to say why
    leave()
    os.kill(os.getpid(), number)


def _wake_when_orphaned() -> None:
    """Let a worker that a signal has stopped go on when its launcher is gone, so that it sees that and ends."""
    with contextlib.suppress(OSError, AttributeError):  # another system, or another C library
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def _clear_up(folder: str, boards: str) -> None:
    """Remove what the launcher would have removed."""
    if Path(folder).name.startswith("rpc-pipe-"):
        shutil.rmtree(folder, ignore_errors=True)
    if boards != run_folders.OFF and Path(boards).name.startswith("run-"):
        tell_end(Path(boards), Ending(RUN_FAILED, "its launcher is gone"))
        shutil.rmtree(boards, ignore_errors=True)


def stopping() -> bool:
    """Tell whether this process has been asked to stop."""
    return _stop_requested or any(pipeline.stopped for pipeline in _pipelines())


def attach(pipeline: Attachable) -> None:
    """Pass the launcher's orders on to `pipeline` and let watchers see what its workers do.

    Raises:
        ConfigError: what the environment says of losses that are not finite makes no sense.
    """
    _attached.append(ref(pipeline, _attached.remove))
    nan = os.environ.get(NAN, "stop")
    if nan not in NANS:
        raise ConfigError(f"{NAN} {nan!r}: must be {', '.join(NANS[:-1])} or {NANS[-1]}")
    for actor in pipeline.actors:
        actor.nan = nan
    if _stop_requested:
        pipeline.request_stop()
    try:
        of_a_job = present() or any(isinstance(actor.carrier, RemoteBoards) for actor in pipeline.actors)
        kept = keep_boards(pipeline)
        if kept and not present():
            for actor in pipeline.actors:
                actor.roll_call = roll_call_here
        if kept and of_a_job:
            _end_with_a_sentence(pipeline.actors[0].worker)
        if of_a_job and not present():
            _stop_on_signals()
    except Exception as error:  # nothing depends on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)


@cache
def _end_with_a_sentence(worker: int) -> None:
    """Let worker 0 say at the end of its process how the run went, for which the others stay."""
    # What is registered later is done earlier: before the carrier leaves.
    at_exit(_end, worker)


def _end(worker: int) -> None:
    end_calls()  # `sys.exit` in a script ends one worker while the others go on
    if worker == 0:
        _say_how_it_went()
    elif not _has_failed():
        stay()


def _say_how_it_went() -> None:
    try:
        found = None if _concluded or _has_failed() else figures(collect())
        if found is None:
            return
        if heard():
            tell(kind="summary", title=sentence(found), lines=[], json=found)
        else:
            print(sentence(found), *lost_lines(found), sep="\n", file=sys.stderr)
    except Exception as error:
        logger.warning("this run has no summary: %s: %s", type(error).__name__, error)
    finally:
        release()


def _has_failed() -> bool:
    """Tell whether this process ends by an error of which the user hears otherwise."""
    return _failed or getattr(sys, "last_value", None) is not None
