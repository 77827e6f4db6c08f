"""The launcher: it starts local worker processes, shows their messages, restarts and ends them. Loads without torch.

An attempt covers the time between a start and its end; see `attempt.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..boards import run_folders
from ..boards.run_boards import RunBoards
from ..boards.run_folders import RUN_FAILED, RUN_STOPPED, Ending, tell_end
from ..dependency import ConfigError
from ..system import allocator
from ..system.files import refused
from . import STOP
from . import launcher_link as link
from .attempt import USUAL, Attempt, How
from .causes import Cause
from .interfaces import make_key
from .job import FAILED, INIT, INTERRUPTED, KEY, PORT, TRANSPORT, WRONG_INPUT, seconds
from .report import Reporter
from .worker_process import Logs, WorkerProcess

if TYPE_CHECKING:
    from .hosts import Hosts, RemoteWorker

#: signals that stop a run after its step: Ctrl-C, a cluster's requests, a closed terminal
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: the workers' program: by path, so that Python imports nothing from the current folder, as it would behind -m
PROGRAM = Path(__file__).parents[1] / "__main__.py"
#: seconds that a run may take to stop, if no user is present to ask again
STOP_TIMEOUT, _STOP_S = "RPC_PIPE_STOP_TIMEOUT", 30.0
#: environment variable of workers: number of earlier attempts
RESTARTS = "RPC_PIPE_RESTARTS"


class _Killed(BaseException):
    """Raised by a signal when the user wants the end at once, even inside a print that blocks."""


class Launcher:
    """Runs `rpc-pipe` with `arguments` in several local worker processes until all have ended."""

    def __init__(
        self,
        arguments: list[str],
        num_processes: int,
        reporter: Reporter,
        how: How = USUAL,
        hosts: Hosts | None = None,
    ) -> None:
        self._arguments, self._reporter, self._how, self._hosts = arguments, reporter, how, hosts
        self._num_processes = 1 if how.transport == "local" else num_processes
        self._world_size = num_processes
        if how.port:
            _check_port(how.port)
        self._stop_s = seconds(os.environ, STOP_TIMEOUT, _STOP_S)
        self._workers: list[WorkerProcess | RemoteWorker] = []
        #: stop signals in order, and the time of the first
        self._signals: list[int] = []
        self._asked_at = 0.0
        self._told_stop = self._ending = False

    def run(self) -> int:
        """Run the job; return 0: completed, 1: failed, 2: wrong input, 128 + n: stopped by signal n."""
        logs = Logs(self._num_processes)
        handlers = {name: signal.signal(name, self._on_signal) for name in _STOPS}
        code = FAILED
        try:
            code = self._attempts(logs)
        except _Killed as signalled:
            code = 128 + int(signalled.args[0])
        finally:
            self._ending = True
            if self._hosts is not None:
                self._hosts.end(code)
            logs.close(keep=code == FAILED)
            for name, handler in handlers.items():
                signal.signal(name, handler)
        return code

    def _attempts(self, logs: Logs) -> int:
        most = self._how.max_restarts
        for restarts in range(most + 1):
            cause, code = self._attempt(restarts, logs)
            if cause is None:
                return code
            if self._signals or cause.code != FAILED:
                break
            if restarts < most:
                self._reporter.text(f"starting again ({restarts + 1} of {most})")
            elif most:
                self._reporter.text(f"not starting again: {most + 1} attempts have failed")
        if logs.folder is not None and code == FAILED:
            self._reporter.text(f"what each worker printed is in {logs.folder}")
        return code

    def _attempt(self, restarts: int, logs: Logs) -> tuple[Cause | None, int]:
        """Run all workers once; report the cause of a failure."""
        folder, boards = self._make_folder()
        environment = self._environment(folder, boards) | {RESTARTS: str(restarts)}
        command = [sys.executable, str(PROGRAM), *self._arguments]
        attempt = Attempt(self._num_processes, self._reporter, boards, self._how, self._hosts)
        self._ending = False
        ending: Ending | None = None
        try:
            if self._hosts is not None:
                self._hosts.begin(self._arguments, restarts, folder, self._die_if_asked)
            self._workers = attempt.workers
            attempt.start(command, environment, logs)
            if self._signals:  # a signal arrived during the start
                self._order_stop()
            cause = attempt.watch(self._tick)
            if cause is not None:
                ending = Ending(RUN_FAILED, f"{cause.title}\n{cause.text}".strip())
                self._tell(cause, attempt)
                return cause, cause.code
            self._summarise(attempt)
            if self._signals:
                ending = _stopped_by(self._signals[0])
                return None, 128 + self._signals[0]
            return None, INTERRUPTED if attempt.interrupted else self._reporter.exit_code
        except _Killed as signalled:
            ending = _stopped_by(signalled.args[0])
            raise
        finally:
            self._ending = True  # another signal must not interrupt the removal of files
            if ending is not None:
                tell_end(folder, ending)
            attempt.end()
            shutil.rmtree(folder, ignore_errors=True)

    def _summarise(self, attempt: Attempt) -> None:
        """Print the summary of a run that has not failed, unless its script or command has printed a result."""
        if self._reporter.concluded or attempt.interrupted:
            return
        try:
            result = None if self._how.summarise is None else attempt.summary(self._how.summarise)
        except Exception as error:
            self._reporter.text(f"this run has no summary: {type(error).__name__}: {error}")
            return
        if result is not None:
            self._reporter.handle(result)
        elif attempt.deaths or self._hosts is not None:
            why = "rpc-pipe watch shows those of a host" if self._hosts else "no step was complete since then"
            self._reporter.text("\n".join(filter(None, [attempt.deaths, f"there are no figures of steps: {why}"])))

    def _make_folder(self) -> tuple[Path, RunBoards | None]:
        """Make the folder of an attempt; return it, and the boards in it if the run can be watched."""
        watched = self._how.watched and os.environ.get(run_folders.FOLDER) != run_folders.OFF
        try:
            folder = run_folders.new_launchers_folder(watched)
        except (OSError, ConfigError) as error:  # a container's shared memory is often full
            self._reporter.text(f"this run cannot be watched: {error}")
            return Path(tempfile.mkdtemp(prefix="rpc-pipe-")), None
        return folder, RunBoards(folder) if watched else None

    def _environment(self, folder: Path, boards: RunBoards | None) -> dict[str, str]:
        return {
            **os.environ,
            **allocator.variables(os.environ),
            **_meeting(self._how, folder),
            link.FOLDER: str(folder),
            "WORLD_SIZE": str(self._world_size),
            run_folders.FOLDER: run_folders.OFF if boards is None else str(folder),
            "PYTHONUNBUFFERED": "1",
            # Workers must iterate over sets of strings in the same order, or their batches may differ.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            "OMP_NUM_THREADS": str(self._how.threads or os.environ.get("OMP_NUM_THREADS", 1)),
            # TensorPipe warns when a peer dies; the launcher reports the cause instead.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def _on_signal(self, number: int, frame: object) -> None:
        """Handle a stop signal at once, even while the launcher prints."""
        self._signals.append(number)
        self._asked_at = self._asked_at or time.monotonic()
        if self._ending:
            return
        if len(self._signals) > 1:
            raise _Killed(self._signals[0])
        self._order_stop()

    def _die_if_asked(self) -> None:
        """Raise _Killed if a signal has arrived before there are workers."""
        if self._signals:
            raise _Killed(self._signals[0])

    def _order_stop(self) -> None:
        for worker in self._workers:
            worker.order(STOP)

    def _tick(self) -> None:
        """Announce a stop that a signal has requested, and kill workers that take too long for it."""
        if not self._signals:
            return
        if not self._told_stop:
            self._told_stop = True
            name = signal.Signals(self._signals[0]).name
            how = "; Ctrl-C again to kill" if name == "SIGINT" else f", by {name}; a second signal kills"
            self._reporter.text(f"stopping after this step{how}")
        if self._signals[0] != signal.SIGINT and time.monotonic() > self._asked_at + self._stop_s:
            self._reporter.text(f"not stopped within {self._stop_s:g} s: killed")
            raise _Killed(self._signals[0])

    def _tell(self, cause: Cause, attempt: Attempt) -> None:
        if cause.code == WRONG_INPUT:
            self._reporter.error(cause.text)
        else:
            first = cause.text.partition("\n")[0]  # a peer reports the cause itself, or says it of another pair
            said = [line for line in attempt.consequences if line not in cause.text and first not in line]
            consequences = [line for line in said if line.rpartition(": ")[2] != first.rpartition(": ")[2]]
            self._reporter.failure(cause.title, cause.text, consequences)


def _stopped_by(number: int) -> Ending:
    return Ending(RUN_STOPPED, f"by {signal.Signals(number).name}")


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with refused(ConfigError, f"--port {port}", "; leave it out and no port is needed"):
            probe.bind(("127.0.0.1", port))


def _meeting(how: How, folder: Path) -> dict[str, str]:
    """Return the environment variables of the meeting place: a folder that only the user may enter, or a port.

    Over ZeroMQ, only processes with the key, which is made for this job, may connect to the port.
    """
    meeting = {INIT: f"file://{folder}/rendezvous", TRANSPORT: how.transport}
    if how.transport == "zmq" and not how.meet:
        make_key(folder / "key")
        meeting |= {KEY: str(folder / "key")} | ({PORT: str(how.port)} if how.port else {})
    elif how.port:
        meeting[INIT] = f"tcp://127.0.0.1:{how.port}"
    return meeting
