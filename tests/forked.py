"""Python in a fork of a process that has imported everything: it starts in milliseconds, and so do workers of a job.

What a program does from its first line on is the same; what happens while the interpreter starts and imports is not
tried.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed.run
from fork_server import STACKS, STACKS_SIGNAL
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import rpc_pipe.commands.main
import rpc_pipe.pipeline
import rpc_pipe.workers.transport.rpc
import rpc_pipe.workers.transport.zeromq
from rpc_pipe.launching import worker_process

#: modules that most programs import when they need them; with them they import what most others need
USUAL = (
    "commands.own_train", "commands.run", "commands.script", "commands.verify", "demo.train", "verifying.proof",
    "launching.launcher", "launching.worker_main", "launching.ending", "launching.meeting_place", "tracing.run_summary",
    "elastic.recovery", "checkpoints.facade", "checkpoints.reading", "checkpoints.resume_options",
    "checkpoints.writing", "model.observed_partition", "workers.transport.shared_memory", "model.stale_weights",
    "model.ties", "workers.transport.call_difference", "schedules.one_f_one_b", "model.batches.loaders", "held_out",
    "workers.not_finite", "checkpoints.pretrained", "workers.compute.backward_state", "workers.exchange",
    "workers.compute.parts.ownership", "dependency.earlier_steps", "workers.compute.average", "own_members",
    "model.batches.prefetcher", "dependency.crossings", "boards.remote", "workers.joint", "commands.plan",
    "commands.compare", "dispatch.watcher", "dependency.replicating", "workers.compute.split_backward",
)  # fmt: skip


class Forked:
    """A process as `subprocess.Popen` would start it with `python ...`, but a fork.

    Args:
        command: interpreter, and what it would be given.
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
        self.pid = fork(command[1:], write, write, env=env, pass_fds=pass_fds, cwd=cwd)
        os.close(write)
        self.stdout: IO[Any] = open(read) if text else open(read, "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        """Return the exit code once the process has ended."""
        code = self.poll(0)
        assert code is not None
        return code

    def poll(self, how: int = os.WNOHANG) -> int | None:
        """Return the exit code; None: the process has not ended."""
        with self._lock:  # another thread may wait too
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, how)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Elastic:
    """A worker as torchrun starts it, but a fork: what torch asks of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: None, stderr: None, **_: Any) -> None:
        unbuffered, *arguments = args[1:]
        assert unbuffered == "-u"
        self.pid = fork(arguments, 1, 2, env={**env, "PYTHONUNBUFFERED": "1"})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code if the process has ended."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended.

        Raises:
            subprocess.TimeoutExpired: it has not in `timeout` seconds.
        """
        end = time.monotonic() + (timeout or math.inf)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return code


def fork(
    arguments: Sequence[str],
    output: int,
    errors: int,
    *,
    env: Mapping[str, str],
    pass_fds: Collection[int] = (),
    cwd: str | Path | None = None,
) -> int:
    """Start `python *arguments` as a fork that writes to the descriptors `output` and `errors`; return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            _become(output, errors, pass_fds, env, cwd)
            end_with(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _become(
    output: int, errors: int, pass_fds: Collection[int], env: Mapping[str, str], cwd: str | Path | None
) -> None:
    """Let this fork look as a process that has just been started."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((nowhere, output, errors)):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with suppress(OSError):
                os.dup2(nowhere, int(name))  # not closed: what this process has inherited would close the number again
    faulthandler.register(STACKS_SIGNAL, os.memfd_create(STACKS))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it depends on them
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of the parent: 174 of torch's libraries alone touch 35 MB, which a fork has to copy
    if cwd is not None:
        os.chdir(cwd)
    raw = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout, sys.stderr = _stream(1, raw=raw), _stream(2, raw=raw)
    threads = env.get("OMP_NUM_THREADS", "")  # what is no number is not read
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0)))


def _stream(number: int, *, raw: bool) -> io.TextIOWrapper:
    """Return what the interpreter would make of descriptor 1 or 2 that is no terminal."""
    binary: Any = open(number, "wb", 0 if raw else -1, closefd=False)
    errors = "strict" if number == 1 else "backslashreplace"
    return io.TextIOWrapper(binary, encoding="utf-8", errors=errors, line_buffering=number == 2, write_through=raw)


def end_with(arguments: Sequence[str]) -> None:
    """Go on as `python *arguments` would, to the end of this process."""
    code: object = 1
    try:
        _interpret(arguments)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code or 0)


def _interpret(arguments: Sequence[str]) -> None:
    """Run a module behind `-m`, a program behind `-c`, or a script."""
    what, *rest = arguments
    if what == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [what, *rest], str(Path(what).parent.absolute())
        runpy.run_path(what, run_name="__main__")


def prepare() -> None:
    """Let launchers of this process and of its forks, torchrun among them, start their workers as forks."""
    assert rpc_pipe.commands.main and rpc_pipe.pipeline and rpc_pipe.workers.transport and torch.distributed.run
    vars(subprocess_handler)["Popen"] = Elastic
    vars(worker_process)["subprocess"] = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )
    torch.set_num_threads(1)
    torch.optim.SGD([torch.ones(1, requires_grad=True)])  # the first one imports more than all of torch
    for name in USUAL:
        importlib.import_module(f"rpc_pipe.{name}")
