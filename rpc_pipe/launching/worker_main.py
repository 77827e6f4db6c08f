"""The frame of a worker process: it follows the launcher's orders, and reports its end."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from ..dependency import ConfigError, PipeError, ScheduleError
from ..dependency.errors import MOST_TRACEBACK, leading_to_user, shortened
from . import launcher_link as link
from . import leash
from .job import FAILED, WRONG_INPUT
from .report import Reporter


def as_worker(work: Callable[[], None], reporter: Reporter) -> int:
    """Do `work` in a worker process; report a failure to the launcher first.

    Without a launcher, as under torchrun, `reporter` shows this worker's messages.
    """
    if link.present():
        for number in (signal.SIGINT, signal.SIGUSR1):  # SLURM sends it to all processes, the launcher stops them
            signal.signal(number, signal.SIG_IGN)
        leash.hold_leash()
        leash.lodge_children()
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
