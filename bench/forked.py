"""`rpc-pipe` in a fork of a process that has imported everything: it starts in milliseconds, and so do its workers.

What a run does from its first line on is the same; what happens while the interpreter starts and imports is not tried.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

import rpc_pipe.pipeline
import rpc_pipe.workers.transport.rpc
import rpc_pipe.workers.transport.zeromq
from rpc_pipe.commands.main import main as rpc_pipe_command
from rpc_pipe.launching import worker_process


class Forked:
    """A process as `subprocess.Popen` would start it with `python -m rpc_pipe ...`, but a fork.

    Args:
        command: interpreter, `-m`, `rpc_pipe` and its arguments.
        pass_fds: descriptors that the process keeps; others are closed.
        cwd: the folder that it runs in.
        text: whether its output is read as text.
    """

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str],
        pass_fds: Collection[int] = (),
        cwd: str | Path | None = None,
        text: bool = False,
        **_: Any,
    ) -> None:
        read, write = os.pipe()
        self.args = command
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(write, pass_fds, env, cwd)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            end_with(command[3:])
        os.close(write)
        self.stdout: IO[Any] = open(read) if text else open(read, "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        """Return the exit code once the process has ended."""
        with self._lock:  # another thread may wait too
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(output: int, pass_fds: Collection[int], env: Mapping[str, str], cwd: str | Path | None) -> None:
    """Let this fork look as a process that has just been started."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with suppress(OSError):
                os.dup2(nowhere, int(name))  # not closed: what this process has inherited would close the number again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)


def end_with(argv: list[str]) -> None:
    """Run a command and end this process with its exit code, as the interpreter would."""
    code = 1
    try:
        code = rpc_pipe_command(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def prepare() -> None:
    """Let launchers of this process, and of its forks, start their workers as forks."""
    assert rpc_pipe.pipeline and rpc_pipe.workers.transport
    vars(worker_process)["subprocess"] = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )
    torch.set_num_threads(1)
