"""The launcher of another host than the first: it starts and ends workers as the first host's launcher orders."""

import os
import shutil
import signal
import socket as sockets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import zmq

from ..boards import run_folders
from ..dependency import ConfigError
from . import hosts
from .attempt import How
from .hosts import frames_of, read, understood, write_journal
from .interfaces import interface_towards
from .job import FAILED, Job, seconds
from .launcher import PROGRAM, RESTARTS, Launcher
from .report import Reporter
from .worker_process import Logs, WorkerProcess, hear

_POLL_S = 0.01
#: attempt, numbers of workers and hosts, arguments of `rpc-pipe`, workers of this host
_Begin = tuple[int, int, int, list[str], list[int]]
_GONE = "the first host, {0}, is gone, or cut off: rpc-pipe join {0} takes part again; else start again on all hosts"


class HostLauncher(Launcher):
    """Runs the workers of this host in a job; its first host is at `address`.

    Args:
        arguments: of `rpc-pipe`; empty: the arguments of the first host.
    """

    def __init__(self, address: str, arguments: list[str], reporter: Reporter, how: How) -> None:
        super().__init__(arguments, 0, reporter, how)
        self._address = address
        self._here: list[WorkerProcess] = []
        self._journal = self._has = self._number = -1
        self._ranks: list[int] = []
        self._code: int | None = None

    def _attempts(self, logs: Logs) -> int:
        host, port = hosts.read_address(self._address)
        self._reporter.text(f"the first host is {self._address}: waiting for places of workers")
        self._interface = self._reach(host, port)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = hosts.make_socket(context, zmq.DEALER)
        self._broken = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hosts.launcher_keys().prove(self._socket, 1, 0)
        self._socket.connect(hosts.spelt(host, port))
        self._send("hello", sockets.gethostname())
        with ExitStack() as of_job, ExitStack() as of_attempt:
            of_job.callback(context.destroy)
            while self._code is None:
                self._turn(of_attempt)
        return self._code

    def _reach(self, host: str, port: int) -> str:
        """Return the interface towards the first host, when its launcher listens."""
        timeout_s = seconds(os.environ, hosts.JOIN_TIMEOUT, Job.join_timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            self._die_if_asked()
            try:
                sockets.create_connection((host, port), timeout_s).close()
                return interface_towards(host)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(f"--meet {self._address}: no job listens ({error}); start it there") from error
            time.sleep(hosts.LOOK_EVERY_S)

    def _send(self, *message: Any) -> None:
        with suppress(zmq.Again):  # the first host is lost
            self._socket.send_multipart(frames_of(message), zmq.DONTWAIT)

    def _turn(self, of_attempt: ExitStack) -> None:
        """Pass on the events of this host's workers, and follow the first host."""
        for event in [*hear(self._here, _POLL_S), None]:
            # Before the word that workers rest.
            self._has = hosts.share(self._journal, self._has, self._send)
            if event is not None:
                self._send("event", self._number, event.worker, event.what, event.detail)
        for message in self._messages():
            with understood(f"the first host, {self._address},"):
                self._obey(of_attempt, message)
            if self._code is not None:
                return  # the next message may be of the loss of the first host
        self._tick()
        if self._signals and all(worker.ended for worker in self._here):
            self._code = 128 + self._signals[0]

    def _obey(self, of_attempt: ExitStack, message: list[Any]) -> None:
        """Follow a message of the first host."""
        match message:
            case []:
                pass  # it is there
            case ["begin", *told]:
                attempt, world, self._count, arguments, self._ranks = msgspec.convert(told, _Begin)
                of_attempt.close()
                self._begin(of_attempt, attempt, world, arguments)
            case ["worker", int(rank), bool(newcomer)] if rank in self._ranks:
                if not self._signals:
                    self._start(rank, {run_folders.NEWCOMER: "on"} if newcomer else {})
            case ["journal", at, data]:
                self._has = max(self._has, write_journal(self._journal, at, data))
            case [("order" | "kill") as what, int(rank), *order]:
                for worker in self._here:
                    if worker.rank == rank:
                        worker.order(order[0].encode()) if what == "order" else worker.kill()
            case ["end", int(code), str(text)]:
                self._code = code
                if text:
                    self._reporter.text(text)
            case [kind, *_]:
                raise ValueError(f"{kind}")

    def _messages(self) -> Iterator[list[Any]]:
        """Yield the messages of the first host; the last one is of its loss."""
        there = not self._broken.poll(0)
        while self._socket.poll(0):
            yield read(self._socket.recv_multipart(), f"the first host, {self._address},")
        if not there and self._number < 0:
            yield ["end", FAILED, f"--meet {self._address}: no answer; name a job of several hosts with the same key"]
        elif not there:
            yield ["end", FAILED, _GONE.format(self._address)]

    def _begin(self, of_attempt: ExitStack, attempt: int, world: int, told: list[str]) -> None:
        """Begin an attempt of the job."""
        self._number, self._world_size, self._has = attempt, world, 0
        folder, boards = self._make_folder()
        of_attempt.callback(shutil.rmtree, folder, ignore_errors=True)
        self._journal = hosts.open_journal(folder)
        of_attempt.callback(os.close, self._journal)
        self._environ = self._environment(folder, boards) | {RESTARTS: str(attempt)}
        self._command = [sys.executable, str(PROGRAM), *(self._arguments or told)]
        of_attempt.callback(self._end_workers)

    def _start(self, rank: int, more: dict[str, str]) -> None:
        environment = self._environ | hosts.variables(self._count, self._interface, self._ranks, rank) | more
        self._here = [worker for worker in self._here if worker.rank != rank]
        self._here.append(WorkerProcess(rank, self._command, environment))

    def _end_workers(self) -> None:
        for worker in self._here:
            worker.kill()
        for worker in self._here:
            worker.end()
        self._here = []

    def _order_stop(self) -> None:
        """Let the workers of this host leave after the step."""
        for worker in self._here:
            if not worker.ended:
                os.kill(worker.process.pid, signal.SIGTERM)


def of_hosts(arguments: list[str], num_processes: int, reporter: Reporter, how: How) -> Launcher:
    """Return the launcher of this host in a job on several: it leads where `how.meet` is, else it follows."""
    try:
        return Launcher(arguments, num_processes, reporter, how, hosts.Hosts(how.meet, how.hosts, num_processes))
    except OSError:  # another host has the address, or another launcher listens there
        return HostLauncher(how.meet, arguments, reporter, how)
