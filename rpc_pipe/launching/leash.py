"""The launcher's orders in a worker that it has started, and the worker's end when the launcher is gone."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.process import current_process
from pathlib import Path

from ..tracing import run_folders
from ..tracing.run_folders import RUN_FAILED, Ending, tell_end
from . import LAST_WORDS_S, LOOK_EVERY_S, STOP
from . import launcher_link as link


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
    args = os.dup(link.own_end()), Path(os.environ[link.FOLDER])
    threading.Thread(target=_follow, args=args, name="leash", daemon=True).start()


def lodge_children() -> None:
    """Let multiprocessing use the folder of this attempt for its files, because a killed worker removes none.

    Its path is short enough for unix sockets, which that of TMPDIR may not be.
    """
    vars(current_process())["_config"]["tempdir"] = os.environ[link.FOLDER]


def _follow(descriptor: int, folder: Path) -> None:
    while order := os.read(descriptor, 1):
        if order == STOP:
            link.request_stop()
        else:
            from . import epochs  # of an elastic job that has lost a worker

            epochs.follow(order, descriptor, [actor for pipe in link.pipelines() for actor in pipe.actors])
    _clear_up(folder)
    if os.getpgid(0) == os.getpid():  # with all processes that this worker has started
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _clear_up(folder: Path) -> None:
    """Remove the folder that the launcher would have removed, if it has gone: a script may have broken the link."""
    deadline = time.monotonic() + LAST_WORDS_S
    with suppress(OSError):  # another worker has removed them
        # Its sockets are closed a moment before it has ended.
        while run_folders.alive((folder / run_folders.LAUNCHER).read_text()):
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_EVERY_S)
    tell_end(folder, Ending(RUN_FAILED, "its launcher is gone"))
    shutil.rmtree(folder, ignore_errors=True)
