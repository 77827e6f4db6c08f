"""One attempt of a job: its worker processes from start to end, and the first cause of a failure. Loads without torch.

    launcher ──orders─> worker     a socket: if it closes, the worker ends; a byte means "finish and stop"
    launcher <─messages─ worker    through the same: progress, results, failure: one JSON object a line
    launcher <──board── worker     state and last steps; readable after its death, also by `rpc-pipe watch`

The first cause of a failure wins; later reports of other workers are consequences.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..boards.board import Live, State, named
from ..boards.run_boards import RunBoards
from ..boards.run_folders import NEWCOMER, tell_event
from ..boards.view import View, layout
from ..dependency import ConfigError
from .causes import Cause, of_death, of_stall
from .job import INTERRUPTED, TRANSPORTS, WRONG_INPUT
from .launcher_link import Summarise
from .report import Reporter
from .worker_process import PATIENCE_S, Logs, Printed, WorkerEvent, WorkerProcess, hear

if TYPE_CHECKING:
    from .hosts import Hosts, RemoteWorker

#: seconds to wait for a cause after a consequence was reported
_GRACE_S = 3.0
#: seconds after which missing workers are named at the start
_JOIN_TOLD_S = 8.0
#: seconds between polls of the boards, and of the ends of processes
_LOOK_EVERY_S, _POLL_S = 1.0, 0.05
#: seconds between polls of messages from other hosts
_HOSTS_POLL_S = 0.01
#: titles of failures without a cause named by a worker
_NO_CAUSE, _UNMET = "no worker named a cause", "the workers could not meet"
#: errors that other workers may have caused
_CONSEQUENCES = ("PeerLost", "NotMet", "Disagreement")
#: number of last lines shown of a worker that has died without a message
LAST_LINES = 5


class How(NamedTuple):
    """Options of starting processes."""

    #: torch threads of a worker; default: OMP_NUM_THREADS, or 1, as more threads than cores slow all workers down
    threads: int | None = None
    #: TCP port where workers meet; default: a file, or unix sockets
    port: int | None = None
    #: the carrier between workers; `local`: one process has all of them
    transport: str = TRANSPORTS[0]
    #: number of restarts after failures
    max_restarts: int = 0
    #: whether workers show boards
    watched: bool = True
    #: returns the message with the summary at the end; None: there is no summary
    summarise: Summarise | None = None
    #: the workers with printed lines to show; None: all
    log_workers: Sequence[int] | None = None
    #: whether the job continues without workers that die
    elastic: bool = False
    #: whether processes are started in the places of workers that die
    rejoins: bool = False
    #: number of hosts, and where launchers of other hosts reach the first one's (HOST:PORT)
    hosts: int = 1
    meet: str = ""


USUAL = How()


class Attempt:
    """Runs one command in several local processes until all have ended or one has failed.

    Args:
        boards: the workers' boards; None: none.
        hosts: the other hosts of the job; None: there are none.
    """

    def __init__(
        self, num_processes: int, reporter: Reporter, boards: RunBoards | None, how: How = USUAL,
        hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        shown = range(num_processes) if how.log_workers is None else how.log_workers
        self._printed = Printed(shown, self._show_line)
        self._reporter, self._boards = reporter, boards
        self._num_processes = num_processes
        self._view = View()
        #: progress of each worker that has begun to meet the other workers: "joining", "joined"
        self._come: dict[int, str] = {}
        #: workers that have completed their work
        self._done: set[int] = set()
        self._ended: dict[int, int] = {}
        self._lines: dict[int, deque[str]] = {rank: deque(maxlen=LAST_LINES) for rank in range(num_processes)}
        self._cause: Cause | None = None
        #: workers' reports that may be due to another worker
        self._consequences: dict[int, Cause] = {}
        self._failed_at = self._looked_at = self._joining_at = 0.0
        self._told_stall = self._told_joining = self._told_first = False
        #: whether the layout has been printed
        self._told_layout = False
        #: the started processes
        self.workers: list[WorkerProcess | RemoteWorker] = []
        self._hosts, self._poll_s = hosts, _POLL_S if hosts is None else _HOSTS_POLL_S
        self._epochs = None
        if how.elastic:
            from .epochs import Epochs  # few jobs are

            comes = self._start_newcomer if how.rejoins else None
            self._epochs = Epochs(num_processes, self.workers, self._tell_epoch, comes)

    def start(self, command: list[str], environment: dict[str, str], logs: Logs) -> None:
        """Start the processes.

        Raises:
            ConfigError: the system cannot start one.
        """
        self._how = command, environment, logs
        for rank in range(self._num_processes):
            try:
                self.workers.append(self._make(rank))
            except OSError as error:
                which = f"--workers {self._num_processes}: worker {rank}"
                raise ConfigError(f"{which} cannot be started: {error}; start fewer, or see ulimit -a") from error

    def _tell_epoch(self, text: str, warning: bool) -> None:
        """Report a change of an elastic job's workers to the user and to watchers."""
        self._reporter.text(text)
        if self._boards is not None:
            tell_event(self._boards.folder, text, warning=warning)

    def _make(self, rank: int, **more: str) -> WorkerProcess | RemoteWorker:
        """Start a process, on the host that has the place of its worker."""
        command, environment, logs = self._how
        if self._hosts is not None:
            if (remote := self._hosts.worker(rank, newcomer=bool(more))) is not None:
                return remote
            environment = environment | self._hosts.variables(rank)
        return WorkerProcess(rank, command, environment | more, logs)

    def _start_newcomer(self, rank: int) -> bool:
        """Start a newcomer; return whether its host is there."""
        if self._hosts is not None and not self._hosts.can_start(rank):
            return False
        del self._ended[rank]
        self.workers[:] = [worker for worker in self.workers if worker.rank != rank]
        self.workers.append(self._make(rank, **{NEWCOMER: "on"}))
        return True

    # --- of other hosts

    def _take_remote(self, event: WorkerEvent) -> None:
        """Take an event of another host."""
        from .hosts import understood

        if event.what == "printed":
            self._how[2].write(event.worker, f"{event.detail}\n".encode())
        if event.what == "lost":
            self._loses(*event.detail)
        elif event.what == "come":
            self._comes(*event.detail)
        else:
            with understood(f"the host of worker {event.worker}"):
                self._take(event)

    def _comes(self, ranks: list[int], name: str) -> None:
        """Start newcomers on a host that has joined."""
        assert self._epochs is not None
        self._tell_epoch(f"host {name} comes in the places of workers {ranks}", False)
        for rank in ranks:
            self._start_newcomer(rank)
            self._epochs.comes(rank)

    def _loses(self, ranks: list[int], name: str) -> None:
        """Go on without the workers of a host."""
        what = f"host {name} is gone, or cut off, with workers {ranks}"
        dead = [rank for rank in ranks if rank not in self._ended]
        self._ended |= dict.fromkeys(dead, -signal.SIGKILL)
        assert self._epochs is not None
        if dead and not self._epochs.survives(dead, -signal.SIGKILL, self._come, what):
            self._cause = self._cause or Cause(f"host {name} is gone", what)

    def watch(self, tick: Callable[[], None]) -> Cause | None:
        """Return the cause of the failure; None: all workers have completed their work, or were stopped.

        Args:
            tick: called several times a second.
        """
        try:
            self._follow(tick)
        finally:
            self._printed.show()
        return self._cause or self._without_cause()

    def _follow(self, tick: Callable[[], None]) -> None:
        """Follow the workers until all have ended or one has failed."""
        while len(self._ended) < self._num_processes:
            for event in hear([worker for worker in self.workers if isinstance(worker, WorkerProcess)], self._poll_s):
                self._take(event)
            if self._hosts is not None and self._epochs is not None:
                for event in self._hosts.events([rank for rank in self._epochs.vacant if rank in self._ended]):
                    self._take_remote(event)
            self._printed.show(PATIENCE_S)
            tick()
            if self._epochs is not None:
                self._epochs.tick()
            if time.monotonic() > self._looked_at + _LOOK_EVERY_S:
                self._look()
            late = self._consequences and time.monotonic() > self._failed_at + _GRACE_S
            if self._cause is not None or late:
                return

    @property
    def interrupted(self) -> bool:
        """Whether workers have reported that they were stopped."""
        return INTERRUPTED in self._ended.values()

    @property
    def consequences(self) -> list[str]:
        """The reports of workers that have lost a peer."""
        return [each.text for each in self._consequences.values()]

    @property
    def deaths(self) -> str:
        """Lines on an elastic job's epochs with deaths or newcomers; "" if there are none."""
        return "" if self._epochs is None else self._epochs.summary

    def summary(self, summarise: Summarise) -> dict[str, Any] | None:
        """Return the summary of the run as its workers have shown it; None if no step is complete."""
        if self._boards is None:
            return None
        self._view.take(self._boards.look())
        return summarise(self._view, self.deaths, told_layout=self._told_layout)

    def end(self) -> None:
        """Kill all remaining processes."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.end()

    def _take(self, event: WorkerEvent) -> None:
        rank, detail = event.worker, event.detail
        if event.what == "printed":
            self._lines[rank].append(detail)
            self._printed.add(rank, detail)
        elif event.what == "told":
            self._told(rank, detail)
        else:
            self._ended[rank] = detail
            self._blame_death(rank, detail)
        if set(self._come.values()) == {"joining"}:
            for rank in self._ended.keys() - self._come.keys():
                waits = _names(self._come)
                text = f"worker {rank} has ended without a Pipeline, but {waits} made one: all workers make the same"
                self._follow_up(rank, Cause(_UNMET, text))

    def _show_line(self, ranks: list[int], text: str) -> None:
        self._reporter.line(ranks, text, self._view.members)

    def _name(self, rank: int) -> str:
        """Return the name of a process, which is a worker or a member of one."""
        return named(rank, self._view.members)

    def _told(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if self._epochs is not None and self._epochs.takes(rank, message):
            return
        if kind == "failure":
            self._failed(rank, message["error"], message["text"])
        elif kind == "done":
            self._done.add(rank)
        elif kind in ("joining", "joined", "ready"):
            self._joining_at = self._joining_at or time.monotonic()
            self._come[rank] = kind
        elif kind == "wrong input":
            self._cause = self._cause or Cause("", message["text"] + self._who_is_missing(rank), WRONG_INPUT)
        else:
            self._printed.show()
            self._reporter.handle(message)

    def _who_is_missing(self, rank: int | None = None) -> str:
        """Report the workers that have not begun to meet, if `rank`, or any worker, waits for them."""
        missing = [other for other in range(self._num_processes) if other not in self._come]
        waits = [other for other in self._come if self._come[other] == "joining"]
        if not missing or not waits or rank not in (None, *waits):
            return ""
        return f"; {_names(missing)} {'has' if len(missing) == 1 else 'have'} made no Pipeline so far"

    def _failed(self, rank: int, error: str, text: str) -> None:
        cause = Cause(f"{self._name(rank)} failed", text)
        if error in _CONSEQUENCES:
            if error == "NotMet":
                cause = Cause(_UNMET, text + self._who_is_missing(rank))
            self._follow_up(rank, cause if error != "PeerLost" else Cause(_NO_CAUSE, text))
        elif self._cause is None:
            self._cause = self._who_stalls(text) if error == "Stalled" else cause

    def _who_stalls(self, told: str) -> Cause:
        self._look()
        view = self._view
        culprit, stacks = view.hanging(self._boards) if self._boards is not None else (view.culprit(), [])
        calls = [f"  {line}" for line in view.roll_call(culprit)]
        return of_stall(told, culprit, view.latest.lives, [*calls, *stacks], view.latest.now_ns, view.members)

    def _blame_death(self, rank: int, code: int) -> None:
        if self._epochs is not None and self._epochs.survives([rank], code, self._come):
            return
        if code == INTERRUPTED or rank in self._done or rank in self._consequences:
            return
        self._look()
        live = self._live(rank)
        # A script may call os._exit after its work, but not in the middle of a step.
        if code != 0 or (live is not None and live.state in (State.RUNNING, State.WAITING)):
            # Workers of an elastic job that have not made their shards yet.
            early = self._epochs is not None and list(self._come.values()) != ["ready"] * self._num_processes
            self._cause = self._cause or of_death(self._name(rank), code, live, self._lines[rank], early=early)

    def _live(self, rank: int) -> Live | None:
        """Return the last state of a worker; None: it shows none."""
        return self._view.latest.lives.get(rank, None if self._boards is None else Live())

    def _without_cause(self) -> Cause | None:
        if not self._consequences:
            return None
        first = next(iter(self._consequences.values()))
        for rank, code in self._ended.items():
            silent = rank not in self._consequences and rank not in self._done
            if silent and code in (0, INTERRUPTED) and first.title != _UNMET:
                return of_death(self._name(rank), code, self._live(rank), [])
        named = [each for each in self._consequences.values() if each.title not in (_NO_CAUSE, _UNMET)]
        return named[0] if named else Cause(first.title, "\n".join(self.consequences))

    def _follow_up(self, rank: int, cause: Cause) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._consequences[rank] = cause

    def _look(self) -> None:
        """Poll the boards, and report a stall."""
        self._looked_at = time.monotonic()
        if self._joining_at and not self._told_joining and self._looked_at > self._joining_at + _JOIN_TOLD_S:
            self._told_joining = True
            if missing := self._who_is_missing():
                self._reporter.text(f"waiting for all workers to meet{missing}")
        if self._boards is None:
            return
        self._view.take(self._boards.look())
        is_late = self._told_layout or self._ended or self._done or self._reporter.grows
        if not is_late and (told := layout(self._view.headers)):
            self._told_layout = True
            self._reporter.text(told)
        if self._view.first_step_line and not self._told_first:
            self._told_first = True
            self._reporter.text(self._view.first_step_line)
        if self._view.stalled and not self._told_stall:
            culprit, stacks = self._view.hanging(self._boards)
            self._reporter.roll_call(self._view.roll_call(culprit), stacks)
        self._told_stall = self._view.stalled


def _names(workers: Sequence[int] | Mapping[int, str]) -> str:
    return ", ".join(f"worker {worker}" for worker in sorted(workers))
