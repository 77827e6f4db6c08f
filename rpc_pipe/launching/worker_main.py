"""The frame of a worker process: it follows the launcher's orders, and reports its end."""

import ctypes
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import current_process
from pathlib import Path

from ..boards import run_folders
from ..boards.run_folders import RUN_FAILED, Ending, tell_end
from ..dependency import ConfigError, PipeError, ScheduleError
from ..dependency.errors import MOST_TRACEBACK, leading_to_user, shortened
from . import LAST_WORDS_S, LOOK_EVERY_S, STOP
from . import launcher_link as link
from .job import FAILED, WRONG_INPUT
from .report import Reporter


def as_worker(work: Callable[[], None], reporter: Reporter) -> int:
    """Do `work` in a worker process; report a failure to the launcher first.

    Without a launcher, as under torchrun, `reporter` shows this worker's messages.
    """
    if link.present():
        for number in (signal.SIGINT, signal.SIGUSR1):  # SLURM sends it to all processes, the launcher stops them
            signal.signal(number, signal.SIG_IGN)
        hold_leash()
        lodge_children()
    else:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # TensorPipe would warn when peers leave
        link.tell_instead(reporter.handle)
    process = os.getpid()
    try:
        work()
    except BaseException as error:
        if os.getpid() != process:  # in a fork of the script, the interpreter reports the error
            raise
        return _failed(error)
    if os.getpid() != process:  # in a fork, at its end
        return 0
    link.tell(kind="done")
    return reporter.exit_code


def _failed(error: BaseException) -> int:
    """Report an exception of `work` to the launcher; return the exit code, or raise the SystemExit of a script."""
    wrong_input = (ConfigError, ScheduleError)
    # The cause is an error in the configuration that only computing has shown.
    wrong = error.__cause__ if isinstance(error, PipeError) and not isinstance(error, wrong_input) else error
    here = Path(__file__).parents[1]
    if isinstance(wrong, wrong_input):
        places = traceback.extract_tb(error.__traceback__)
        own = [each for each in places if here not in Path(each.filename).parents and each.filename[0] != "<"]
        where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        link.tell(kind="wrong input", text=f"{wrong}{where}")
        return WRONG_INPUT
    if isinstance(error, PipeError):
        link.tell(kind="failure", error=type(error).__name__, text=str(error.args[0]))
        return FAILED
    if not isinstance(error, Exception):  # an error of the user's script outside calls of the pipeline
        well = isinstance(error, SystemExit) and error.code in (None, 0)
        if well or link.stopping() or not link.present():
            raise error
    frames = leading_to_user(error, lambda file: file == "<frozen runpy>" or here in Path(file).parents)
    text = shortened("".join(traceback.format_exception(type(error), error, frames)), MOST_TRACEBACK)
    link.tell(kind="failure", error=type(error).__name__, text=text)
    return FAILED


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
            from . import epochs

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
