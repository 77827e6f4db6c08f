"""Processes for tests in milliseconds: forks of one process that has imported torch and started no thread.

`processes.py` says which tests take them. All test processes of a run have one server, which imports torch once.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

#: the server has to import torch first, and perhaps transformers
_START_S = 60.0
_MOST_BYTES = 2**17
#: variable with the name of the server's socket
_ADDRESS = "RPC_PIPE_TEST_FORKS"
#: what is read once, when an interpreter starts and loads torch, is as the launcher gives it to workers; nothing may
#: start threads or CUDA then, which forks would not have
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip

#: a file in memory of each fork, into which it writes the stacks of its threads when it is sent the signal
STACKS, STACKS_SIGNAL = "stacks", signal.SIGRTMIN + 8

#: modules that take seconds, by the name in scripts that need them
_SLOW = {"transformers": "transformers.modeling_utils", "torch.distributed.tensor": "torch.distributed.tensor.parallel"}


class Started:
    """A process that the server has started, with what tests use of `subprocess.Popen`."""

    def __init__(self, status: int, stdout: IO[str], stderr: IO[str] | None) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._status, self._lock = open(status, "rb", buffering=0), threading.Lock()
        self.pid = self._told(_START_S)

    def _told(self, timeout_s: float | None) -> int:
        """Return what the server tells next: the number of the process, and then its exit code."""
        waiting = select.poll()  # not `select`, which knows the first 1,024 descriptors alone
        waiting.register(self._status, select.POLLIN | select.POLLHUP)
        if not waiting.poll(None if timeout_s is None else 1e3 * timeout_s):
            raise subprocess.TimeoutExpired("a fork", timeout_s or 0.0)
        told = self._status.readline()
        assert told, "the fork server has ended"
        return int(told)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._told(timeout)
                self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, None if the process has not ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what the process says until its end.

        Raise TimeoutExpired, and kill the process, if that takes too long; its notes are the output until then and the
        stacks of the process and of all that it has started.
        """
        stacks = ""
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(_rest, stream) for stream in (self.stdout, self.stderr)]
            if wait(reads, timeout).not_done:
                stacks = "\n".join(_stacks(pid) for pid in tree(self.pid))
                self.kill()
        out, err = (read.result() for read in reads)
        if stacks:
            late = subprocess.TimeoutExpired("a fork", timeout or 0.0)
            late.add_note(f"{out}\n{err}\n{stacks}")
            raise late
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def _rest(stream: IO[str] | None) -> str:
    """Return what has not been read of a stream, and close it."""
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


def tree(pid: int) -> list[int]:
    """Return the numbers of a process and of the processes below it."""
    tasks = Path(f"/proc/{pid}/task")
    below = []
    with suppress(OSError):
        below = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return [pid, *(number for child in below for number in tree(child))]


def _stacks(pid: int) -> str:
    """Return the stacks of a fork's threads, which it writes from C, also while its interpreter is stuck."""
    text = ""
    with suppress(OSError):
        links = {link: os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        file = next((link for link, target in links.items() if target.startswith(f"/memfd:{STACKS}")), None)
        if file is not None:
            os.kill(pid, STACKS_SIGNAL)
            time.sleep(0.5)
            text = file.read_text()
    return f"process {pid}:\n{text or 'no stacks'}"


def listen() -> None:
    """Start a server for this process and the test processes that it starts, until this process ends."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"rpc-pipe-tests-{os.getpid()}-{time.monotonic_ns()}"
    listening.bind(f"\0{name}")  # a name of the kernel, and no file
    listening.listen()
    read, write = os.pipe()
    command = [sys.executable, __file__, str(listening.fileno()), str(read)]
    with listening:
        process = subprocess.Popen(
            command, env={**os.environ, **_ENVIRONMENT}, pass_fds=[listening.fileno(), read],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.environ[_ADDRESS] = name
    os.close(read)

    def close() -> None:
        os.close(write)
        process.wait()

    atexit.register(close)


class ForkServer:
    """The server, as a test process has it."""

    def __init__(self) -> None:
        if _ADDRESS not in os.environ:
            listen()
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.connect(f"\0{os.environ[_ADDRESS]}")
        atexit.register(self._channel.close)

    def start(self, arguments: Sequence[str], env: Mapping[str, str], cwd: str, *, merged: bool) -> Started:
        """Start `python *arguments`; `merged`: what it writes to stderr goes to stdout."""
        pipes = [os.pipe() for _ in range(2 if merged else 3)]  # status, stdout, stderr
        request = json.dumps([list(arguments), dict(env), cwd]).encode()
        socket.send_fds(self._channel, [request], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        status, *said = (read for read, _ in pipes)
        streams = [open(read, encoding="utf-8") for read in said]
        return Started(status, streams[0], None if merged else streams[1])


@functools.cache
def server() -> ForkServer:
    """Return this process's connection to the server."""
    return ForkServer()


class _Process(NamedTuple):
    """A fork that runs: its number, the descriptor for its exit code, and the test process that wants it."""

    pid: int
    status: int
    client: int


class _Serving:
    """The server itself.

    Args:
        lifeline: a descriptor that ends when the process that started the server ends.
    """

    def __init__(self, listening: socket.socket, lifeline: int) -> None:
        self._listening, self._lifeline = listening, lifeline
        self._clients: dict[int, socket.socket] = {}
        #: by the descriptor of the process
        self._running: dict[int, _Process] = {}
        self._is_prepared = False

    def serve(self) -> None:
        """Fork until the lifeline ends; leave no process."""
        listening = self._listening.fileno()
        while True:
            for ready in select.select([self._lifeline, listening, *self._clients, *self._running], [], [])[0]:
                if ready == self._lifeline:
                    self._kill([*self._running.values()])
                    return
                if ready == listening:
                    client, _ = self._listening.accept()
                    self._clients[client.fileno()] = client
                elif ready in self._running:
                    self._tell_end(ready)
                elif not self._fork(ready):
                    self._clients.pop(ready).close()
                    self._kill([each for each in self._running.values() if each.client == ready])

    def _kill(self, processes: Sequence[_Process]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _fork(self, client: int) -> bool:
        """Do the next request of a test process; return whether there is one."""
        request = b""
        with suppress(ConnectionResetError):  # the test process was killed
            request, descriptors, *_ = socket.recv_fds(self._clients[client], _MOST_BYTES, 3)
        if not request:
            return False
        from forked import fork, prepare  # which import torch, for the first request

        if not self._is_prepared:
            prepare()
            _freeze()
            self._is_prepared = True
        arguments, environment, cwd = json.loads(request)
        _prepare_for(arguments, Path(cwd))
        status, output, errors = [*descriptors, descriptors[1]][:3]
        pid = fork(arguments, output, errors, env=environment, cwd=cwd)
        self._running[os.pidfd_open(pid)] = _Process(pid, status, client)
        with suppress(BrokenPipeError):
            os.write(status, b"%d\n" % pid)
        for descriptor in {output, errors}:
            os.close(descriptor)
        return True

    def _tell_end(self, ended: int) -> None:
        process = self._running.pop(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        with suppress(BrokenPipeError):  # nobody wants to know any more
            os.write(process.status, b"%d\n" % code)
        os.close(process.status)
        os.close(ended)


def _prepare_for(arguments: Sequence[str], folder: Path) -> None:
    """Import what takes seconds before the first script that names it; later forks have it too."""
    scripts = [folder / argument.partition(":")[0] for argument in arguments if ".py" in argument]
    texts = [script.read_text() for script in scripts if script.is_file()]
    for name, module in _SLOW.items():
        if module not in sys.modules and any(name in text for text in texts):
            importlib.import_module(module)
            _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # or a fork would copy every page when it collects
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork has none of the threads of its parent"


def main() -> None:
    _Serving(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
