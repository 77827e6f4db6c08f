"""Start workers as local processes, show what they tell, and leave no process behind. Loads without torch.

    launcher ──leash──> worker     its end, however it comes, ends the worker; a byte means "finish and stop"
    launcher <──tell─── worker     progress, summary, failure: one JSON object a line
    launcher <──board── worker     what each worker does and did; readable after its death, also by `rpc-pipe watch`

The first cause of a failure wins; what other workers report after it are consequences.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import ConfigError, PeerLost, PipeError, ScheduleError
from ..dispatch.view import View
from ..tracing import run_folders
from ..tracing.board import Live
from ..tracing.boards import Boards
from . import launcher_link as link
from .job import INIT, KEY, PORT, TRANSPORT, TRANSPORTS
from .key_file import make_key
from .report import Reporter
from .worker_process import Event, Events, WorkerProcess

#: how long consequences wait for their cause
_GRACE_S = 3.0
#: how often the boards are looked at
_LOOK_EVERY_S = 1.0

_FAILED, _WRONG_INPUT, _INTERRUPTED = 1, 2, 130


class _Killed(BaseException):
    """The user wants the end at once: raised by a signal wherever the launcher is, be it in a print that blocks."""


class How(NamedTuple):
    """How processes are started."""

    #: torch threads of a worker; by default OMP_NUM_THREADS, or 1: more than cores slow all down
    threads: int | None = None
    #: meet at this TCP port; by default at a file, or through unix sockets, which need none
    port: int | None = None
    #: what carries messages between workers; `local`: one process has all of them
    transport: str = TRANSPORTS[0]


_USUAL = How()


class Launcher:
    """Runs `command` in several local worker processes until all have ended."""

    def __init__(
        self,
        command: list[str],
        num_workers: int,
        reporter: Reporter,
        how: How = _USUAL,
    ) -> None:
        self._command = command
        self._num_workers = num_workers
        self._num_processes = 1 if how.transport == "local" else num_workers
        self._reporter = reporter
        self._how = how
        if how.port:
            _check_port(how.port)
        self._events = Events()
        self._workers: list[WorkerProcess] = []
        self._interrupts = 0
        self._ending = False
        #: those that have begun to meet the others, and those that have met them
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self._ended: dict[int, int] = {}
        self._cause: tuple[str, str, int] | None = None
        self._consequences: dict[int, str] = {}
        #: what is said if no cause turns up
        self._vague = ""
        self._failed_at = 0.0
        self._view = View()
        self._looked_at = 0.0
        self._told_stall = False

    def run(self) -> int:
        """Return the exit code: 0 all done, 1 failed, 2 wrong input, 130 stopped by the user."""
        folder = Path(tempfile.mkdtemp(prefix="rpc-pipe-"))
        self._boards = self._make_boards()
        handlers = {name: signal.signal(name, self._on_signal) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start(folder)
            return self._watch()
        except _Killed as signalled:
            return 128 + int(signalled.args[0])
        finally:
            self._ending = True
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.process.wait()
            for name, handler in handlers.items():
                signal.signal(name, handler)
            self._reporter.close()
            shutil.rmtree(folder, ignore_errors=True)
            if self._boards is not None:
                shutil.rmtree(self._boards.folder, ignore_errors=True)

    def _make_boards(self) -> Boards | None:
        """Make the folder for the workers' boards; without it the run cannot be watched, and goes on all the same."""
        if os.environ.get(run_folders.FOLDER) == run_folders.OFF:
            return None
        try:
            folder = run_folders.new_folder()
            (folder / run_folders.LAUNCHER).write_text(run_folders.identity())
        except (OSError, ConfigError) as error:
            self._reporter.console.print(f"this run cannot be watched: {error}", markup=False)
            return None
        return Boards(folder)

    def _start(self, folder: Path) -> None:
        environment = os.environ | _meeting(self._how, folder)
        environment |= {
            "WORLD_SIZE": str(self._num_workers),
            run_folders.FOLDER: run_folders.OFF if self._boards is None else str(self._boards.folder),
            "PYTHONUNBUFFERED": "1",
            # The order of a set of strings is that of their hashes: batches drawn from one must not differ.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            "OMP_NUM_THREADS": str(self._how.threads or os.environ.get("OMP_NUM_THREADS", 1)),
            # A peer's death makes TensorPipe print warnings; we report the cause instead.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        for rank in range(self._num_processes):
            self._workers.append(WorkerProcess(rank, self._command, environment, self._events))

    def _on_signal(self, number: int, frame: object) -> None:
        """Do at once what was asked for: the launcher may be busy with what workers print."""
        self._interrupts += 1
        if self._ending:
            return
        if number == signal.SIGTERM or self._interrupts > 1:
            raise _Killed(number)
        for worker in self._workers:
            worker.order_stop()

    def _watch(self) -> int:
        told_stop = False
        while len(self._ended) < self._num_processes:
            event = self._events.next(timeout_s=0.2)
            if self._interrupts and not told_stop:
                told_stop = True
                self._reporter.console.print("stopping after this step; Ctrl-C again to kill")
            if event is not None:
                self._take(event)
            if time.monotonic() > self._looked_at + _LOOK_EVERY_S:
                self._look()
            if self._cause is not None:
                return self._give_up(*self._cause)
            if self._consequences and time.monotonic() > self._failed_at + _GRACE_S:
                break
        if self._consequences:
            return self._give_up(self._vague, "\n".join(self._consequences.values()), _FAILED)
        stopped = self._interrupts or _INTERRUPTED in self._ended.values()
        return _INTERRUPTED if stopped else self._reporter.exit_code

    def _take(self, event: Event) -> None:
        if event.what == "printed":
            self._reporter.line(event.worker, event.detail)
        elif event.what == "told":
            self._told(event.worker, event.detail)
        else:
            self._ended[event.worker] = event.detail
            self._blame_death(event.worker, event.detail)
        if self._joining and not self._joined:
            for rank in self._ended.keys() - self._joining:
                waits = ", ".join(f"worker {other}" for other in sorted(self._joining))
                text = f"worker {rank} has ended without a Pipeline, but {waits} made one: all workers make the same"
                self._follow_up(rank, text, "the workers cannot meet")

    def _told(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failure":
            if message["consequence"]:
                self._follow_up(rank, message["text"])
            else:
                self._cause = self._cause or (f"worker {rank} failed", message["text"], _FAILED)
        elif kind == "joining":
            self._joining.add(rank)
        elif kind == "joined":
            self._joined.add(rank)
        elif kind == "wrong input":
            self._cause = self._cause or ("", message["text"], _WRONG_INPUT)
        else:
            self._reporter.handle(message, self._view.bubble() if kind == "progress" else None)

    def _blame_death(self, rank: int, code: int) -> None:
        if code in (0, _INTERRUPTED) or rank in self._consequences or self._cause is not None:
            return
        if code < 0:
            name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
            how = f"was killed by signal {-code}{name}"
        else:
            how = f"ended with exit code {code}"
        self._look()
        state = self._view.lives.get(rank, Live())
        self._cause = f"worker {rank} died", f"worker {rank} {how} while {state}", _FAILED

    def _follow_up(self, rank: int, text: str, vague: str = "no worker named a cause") -> None:
        if not self._consequences:
            self._vague = vague
            self._failed_at = time.monotonic()
        self._consequences[rank] = text

    def _give_up(self, title: str, text: str, code: int) -> int:
        if code == _WRONG_INPUT:
            self._reporter.error(text)
        else:
            consequences = [line for line in self._consequences.values() if line not in text]
            self._reporter.failure(title, text, consequences)
        return code

    def _look(self) -> None:
        """See what the workers do, and hold a roll-call if nothing finishes."""
        self._looked_at = time.monotonic()
        if self._boards is None:
            return
        self._view.take(self._boards.look())
        if self._view.stalled and not self._told_stall:
            culprit = self._view.culprit()
            stacks = "" if culprit is None else self._boards.stacks(culprit)
            self._reporter.roll_call(self._view.roll_call(), f"worker {culprit}", stacks)
        self._told_stall = self._view.stalled


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; leave it out and no port is needed") from error


def _meeting(how: How, folder: Path) -> dict[str, str]:
    """Return the variables that say where the workers meet: in a folder that their user alone may enter, or at a port.

    Over ZeroMQ a port is open to those who have the key, which is made for this job.
    """
    meeting = {INIT: f"file://{folder}/rendezvous", TRANSPORT: how.transport}
    if how.transport == "zmq":
        make_key(folder / "key")
        meeting |= {KEY: str(folder / "key")} | ({PORT: str(how.port)} if how.port else {})
    elif how.port:
        meeting[INIT] = f"tcp://127.0.0.1:{how.port}"
    return meeting


def launch(arguments: list[str], num_workers: int, reporter: Reporter, how: How = _USUAL) -> int:
    """Run `rpc-pipe` with `arguments` in each of `num_workers` local workers; return the exit code."""
    return Launcher([sys.executable, "-m", "rpc_pipe", *arguments], num_workers, reporter, how).run()


def as_worker(work: Callable[[], None], reporter: Reporter) -> int:
    """Do `work` in a worker process; tell the launcher of a failure before anything else.

    Without a launcher, as under torchrun, `reporter` shows what this worker has to say.
    """
    if link.present():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        link.hold_leash()
    else:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the others leave, which TensorPipe warns of
        link.tell_instead(reporter.handle)
    try:
        work()
    except (ConfigError, ScheduleError) as error:
        link.tell(kind="wrong input", text=str(error))
        return _WRONG_INPUT
    except PipeError as error:
        link.tell(kind="failure", consequence=isinstance(error, PeerLost), text=str(error))
        return _FAILED
    except Exception as error:  # outside the pipeline's own calls: the user's script
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        link.tell(kind="failure", consequence=False, text=text)
        return _FAILED
    return reporter.exit_code
