"""Start workers as local processes, show what they tell, and leave no process behind. Loads without torch.

    launcher ──leash──> worker     its end, however it comes, ends the worker; a byte means "finish and stop"
    launcher <──tell─── worker     progress, summary, failure: one JSON object a line
    launcher <──board── worker     what each worker does and did; readable after its death, also by `rpc-pipe watch`

The first cause of a failure wins; what other workers report after it are consequences.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..dependency import ConfigError, PeerLost, PipeError, ScheduleError
from ..dispatch.view import View
from ..tracing import run_folders
from ..tracing.board import Live
from ..tracing.boards import Boards
from . import launcher_link as link
from .job import INIT
from .report import Reporter

#: how long consequences wait for their cause
_GRACE_S = 3.0
#: how often the boards are looked at
_LOOK_EVERY_S = 1.0

_FAILED, _WRONG_INPUT, _INTERRUPTED = 1, 2, 130


class _Worker:
    """One worker process with its pipes."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        self.rank = rank
        leash_end, self.leash = os.pipe()
        self.told, tell_end = os.pipe()
        environment = environment | {
            "RANK": str(rank),
            link.LEASH: str(leash_end),
            link.TELL: str(tell_end),
        }
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(leash_end, tell_end),
            start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
        )
        os.close(leash_end)
        os.close(tell_end)

    def order_stop(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.leash, link.STOP)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Launcher:
    """Runs `command` in several local worker processes until all have ended.

    Args:
        threads: torch threads of a worker; by default OMP_NUM_THREADS, or 1: more than cores slow all down.
        port: meet at this TCP port; by default at a file, which needs none.
    """

    def __init__(
        self,
        command: list[str],
        num_workers: int,
        reporter: Reporter,
        *,
        threads: int | None = None,
        port: int | None = None,
    ) -> None:
        self._command = command
        self._num_workers = num_workers
        self._reporter = reporter
        self._init = f"tcp://127.0.0.1:{port}" if port else ""
        if port:
            _check_port(port)
        self._events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._threads = threads
        self._workers: list[_Worker] = []
        self._interrupts = 0
        self._cause: tuple[str, str, int] | None = None
        self._consequences: dict[int, str] = {}
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
            self._start(self._init or f"file://{folder}/rendezvous")
            return self._watch()
        finally:
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

    def _start(self, init_method: str) -> None:
        environment = os.environ | {
            "WORLD_SIZE": str(self._num_workers),
            INIT: init_method,
            run_folders.FOLDER: run_folders.OFF if self._boards is None else str(self._boards.folder),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(self._threads or os.environ.get("OMP_NUM_THREADS", 1)),
            # A peer's death makes TensorPipe print warnings; we report the cause instead.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        for rank in range(self._num_workers):
            worker = _Worker(rank, self._command, environment)
            self._workers.append(worker)
            for target in (self._read_told, self._read_output):
                threading.Thread(target=target, args=(worker,), daemon=True).start()

    def _read_told(self, worker: _Worker) -> None:
        with open(worker.told) as lines:
            for text in lines:
                self._events.put(("told", worker.rank, json.loads(text)))
        self._events.put(("ended", worker.rank, worker.process.wait()))

    def _read_output(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for text in worker.process.stdout:
            self._events.put(("printed", worker.rank, text.decode(errors="replace").rstrip()))

    def _on_signal(self, number: int, frame: object) -> None:
        self._interrupts += 1
        self._events.put(("signal", self._interrupts, number))

    def _watch(self) -> int:
        ended: dict[int, int] = {}
        while len(ended) < self._num_workers:
            try:
                what, rank, detail = self._events.get(timeout=0.2)
            except queue.Empty:
                what, rank, detail = "", -1, None
            if what == "told":
                self._told(rank, detail)
            elif what == "printed":
                self._reporter.line(rank, detail)
            elif what == "signal":
                if rank > 1 or detail == signal.SIGTERM:
                    return 128 + int(detail)
                self._reporter.console.print("stopping after this step; Ctrl-C again to kill")
                for worker in self._workers:
                    worker.order_stop()
            elif what == "ended":
                ended[rank] = detail
                self._ended(rank, detail)
            if time.monotonic() > self._looked_at + _LOOK_EVERY_S:
                self._look()
            if self._cause is not None:
                return self._give_up(*self._cause)
            if self._consequences and time.monotonic() > self._failed_at + _GRACE_S:
                return self._give_up("no worker named a cause", "\n".join(self._consequences.values()), _FAILED)
        if self._consequences:
            return self._give_up("no worker named a cause", "\n".join(self._consequences.values()), _FAILED)
        self._look()
        self._reporter.finish(self._view)
        return _INTERRUPTED if _INTERRUPTED in ended.values() else self._reporter.exit_code

    def _told(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failure":
            if message["consequence"]:
                self._follow_up(rank, message["text"])
            else:
                self._cause = self._cause or (f"worker {rank} failed", message["text"], _FAILED)
        elif kind == "wrong input":
            self._cause = self._cause or ("", message["text"], _WRONG_INPUT)
        else:
            self._reporter.handle(message, self._view.bubble() if kind == "progress" else None)

    def _ended(self, rank: int, code: int) -> None:
        if code in (0, _INTERRUPTED) or rank in self._consequences or self._cause is not None:
            return
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit code {code}"
        self._look()
        state = self._view.lives.get(rank, Live())
        self._cause = f"worker {rank} died", f"worker {rank} {how} while {state}", _FAILED

    def _follow_up(self, rank: int, text: str) -> None:
        if not self._consequences:
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


def launch(
    arguments: list[str], num_workers: int, reporter: Reporter, *, threads: int | None = None, port: int | None = None
) -> int:
    """Run `rpc-pipe` with `arguments` in each of `num_workers` local workers; return the exit code."""
    command = [sys.executable, "-m", "rpc_pipe", *arguments]
    return Launcher(command, num_workers, reporter, threads=threads, port=port).run()


def as_worker(work: Callable[[], None], reporter: Reporter) -> int:
    """Do `work` in a worker process; tell the launcher of a failure before anything else.

    Without a launcher, as under torchrun, `reporter` shows what this worker has to say.
    """
    if link.present():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        link.hold_leash()
    else:
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
