"""One attempt of a job: its worker processes from start to end, and the first cause of a failure. Loads without torch.

    launcher ──leash──> worker     a pipe whose end, however it comes, ends the worker; a byte means "finish and stop"
    launcher <──tell─── worker     progress, summary, failure: one JSON object a line
    launcher <──board── worker     state and last steps; readable after its death, also by `rpc-pipe watch`

The first cause of a failure wins; what other workers report after it are consequences.
"""

from __future__ import annotations

import queue
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import ConfigError
from ..tracing.board import Live, State
from ..tracing.boards import RunBoards
from ..tracing.run_summary import figures
from ..tracing.stall_report import waits_for_unseen
from ..tracing.view import View
from .job import FAILED, INTERRUPTED, WRONG_INPUT
from .report import Reporter
from .worker_process import MOST_UNREAD, Events, Logs, WorkerEvent, WorkerProcess

#: seconds to wait for a cause after a consequence was reported
_GRACE_S = 3.0
#: and after workers have reported different calls, which may be due to a worker that has just died
_DISAGREED_S = 1.0
#: seconds after which missing workers are named at the start
_JOIN_TOLD_S = 8.0
#: seconds between polls of the boards
_LOOK_EVERY_S = 1.0
_NO_CAUSE = "no worker named a cause"
#: what a worker prints when TensorPipe has read garbage as a length
_GARBAGE = re.compile(r"std::bad_alloc|std::length_error|tensorpipe", re.IGNORECASE)
#: number of last lines shown of a worker that has died without a message
LAST_LINES = 5


class Attempt:
    """Runs `command` in several local processes until all have ended or one has failed.

    Args:
        environment: environment variables that all processes share.
        boards: what the workers show; None: nothing.
        rpc: whether torch RPC carries their messages.
    """

    def __init__(
        self,
        command: list[str],
        num_processes: int,
        environment: dict[str, str],
        reporter: Reporter,
        boards: RunBoards | None,
        logs: Logs,
        *,
        rpc: bool,
    ) -> None:
        self._reporter, self._boards, self._rpc = reporter, boards, rpc
        self._num_processes = num_processes
        self._view = View()
        self._events: Events = queue.Queue(MOST_UNREAD)
        #: workers that have begun to meet the others, that have met them, and that have completed their work
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._ended: dict[int, int] = {}
        #: workers that send no more messages: they are ending, or their script has closed the pipe
        self._mute: set[int] = set()
        self._lines: dict[int, deque[str]] = {rank: deque(maxlen=LAST_LINES) for rank in range(num_processes)}
        self._cause: Cause | None = None
        #: that workers have made different calls; a death takes precedence
        self._disagreement: Cause | None = None
        self._consequences: dict[int, str] = {}
        #: the title of the failure if no cause turns up
        self._vague = ""
        self._failed_at = 0.0
        self._looked_at = 0.0
        self._told_stall = self._told_joining = False
        self._joining_at = 0.0
        self._memory_kills = memory_kills()
        self._process = partial(WorkerProcess, command=command, environment=environment, events=self._events, logs=logs)
        #: the started processes
        self.workers: list[WorkerProcess] = []

    def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: the system cannot start one.
        """
        for rank in range(self._num_processes):
            try:
                self.workers.append(self._process(rank))
            except (OSError, RuntimeError) as error:
                which = f"--workers {self._num_processes}: worker {rank}"
                raise ConfigError(f"{which} cannot be started: {error}; start fewer, or see ulimit -a") from error

    def watch(self, tick: Callable[[], None]) -> Cause | None:
        """Return the cause of the failure; None: all workers have completed their work, or were stopped.

        Args:
            tick: called several times a second.
        """
        while len(self._ended) < self._num_processes:
            with suppress(queue.Empty):
                event = self._events.get(timeout=0.2)
                self._take(event)
            tick()
            if time.monotonic() > self._looked_at + _LOOK_EVERY_S:
                self._look()
            if self._cause is not None:
                return self._cause
            ends = self._disagreement is not None and self._mute <= self._ended.keys()
            grace_s = _DISAGREED_S if ends else _GRACE_S
            if self._consequences and time.monotonic() > self._failed_at + grace_s:
                break
        return self._cause or self._without_cause()

    @property
    def interrupted(self) -> bool:
        """Whether workers have reported that they were stopped."""
        return INTERRUPTED in self._ended.values()

    @property
    def consequences(self) -> list[str]:
        """The reports of workers that have lost others."""
        return list(self._consequences.values())

    def figures(self) -> dict[str, Any] | None:
        """Return the figures of the run as its workers have shown it, for JSON; None if no step is complete."""
        if self._boards is None:
            return None
        self._view.take(self._boards.look())
        return figures(self._view)

    def end(self) -> None:
        """Kill all remaining processes."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()

    def _take(self, event: WorkerEvent) -> None:
        if event.what == "printed":
            self._lines[event.worker].append(event.detail)
            self._reporter.line(event.worker, event.detail)
        elif event.what == "told":
            self._told(event.worker, event.detail)
        elif event.what == "no more":
            self._mute.add(event.worker)
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
            self._failed(rank, message)
        elif kind == "joining":
            self._joining_at = self._joining_at or time.monotonic()
            self._joining.add(rank)
        elif kind == "joined":
            self._joined.add(rank)
        elif kind == "done":
            self._done.add(rank)
        elif kind == "wrong input":
            self._cause = self._cause or Cause("", message["text"] + self._who_is_missing(rank), WRONG_INPUT)
        else:
            self._reporter.handle(message)

    def _who_is_missing(self, rank: int = -1) -> str:
        """Say who has not begun to meet the others, if `rank`, or anybody, waits for them."""
        missing = sorted(set(range(self._num_processes)) - self._joining)
        waits = self._joining - self._joined
        if not missing or not waits or rank not in (-1, *waits):
            return ""
        names = ", ".join(f"worker {other}" for other in missing)
        return f"; {names} {'has' if len(missing) == 1 else 'have'} made no Pipeline so far"

    def _failed(self, rank: int, message: dict[str, Any]) -> None:
        if message["consequence"] or message.get("disagreement"):
            if not message["consequence"]:
                self._disagreement = self._disagreement or Cause(f"worker {rank} failed", message["text"])
            unmet = message.get("unmet", False)
            missing = self._who_is_missing(rank) if unmet else ""
            self._follow_up(rank, message["text"] + missing, "the workers could not meet" if unmet else "")
        elif self._cause is None and message.get("stalled"):
            self._cause = self._who_stalls(message["text"])
        else:
            self._cause = self._cause or Cause(f"worker {rank} failed", message["text"])

    def _who_stalls(self, told: str) -> Cause:
        self._look()
        culprit, view = self._view.culprit(), self._view
        calls = [f"  {line}" for line in view.roll_call()]
        stacks = self._boards.stacks(culprit) if self._boards is not None else []
        return of_stall(told, culprit, view.latest.lives, [*calls, *stacks], view.latest.now_ns)

    def _blame_death(self, rank: int, code: int) -> None:
        if rank in self._done and code < 0:  # killed during teardown, as by a device library
            self._reporter.text(f"{killed(rank, code)} when its script had ended")
        if code == INTERRUPTED or rank in self._done or rank in self._consequences or self._cause is not None:
            return
        self._look()
        live = self._live(rank)
        # A script may call os._exit after its work, but not in the middle of a step.
        if code != 0 or (live is not None and live.state in (State.RUNNING, State.WAITING)):
            memory = memory_kills() > self._memory_kills
            self._cause = of_death(rank, code, live, self._lines[rank], rpc=self._rpc, out_of_memory=memory)

    def _live(self, rank: int) -> Live | None:
        """Return the last state of a worker; None: unknown, although it has met the others."""
        unseen = rank in self._joined and (self._boards is None or not self._boards.folder.exists())
        return self._view.latest.lives.get(rank, None if unseen else Live())

    def _without_cause(self) -> Cause | None:
        if not self._consequences:
            return None
        quiet = [rank for rank, code in self._ended.items() if code in (0, INTERRUPTED) and rank not in self._done]
        if quiet and self._vague == _NO_CAUSE:
            code, live = self._ended[quiet[0]], self._live(quiet[0])
            return of_death(quiet[0], code, live, [], rpc=self._rpc, out_of_memory=False)
        if self._disagreement is not None:
            return self._disagreement
        return Cause(self._vague, "\n".join(self._consequences.values()), FAILED)

    def _follow_up(self, rank: int, text: str, vague: str = "") -> None:
        if not self._consequences:
            self._vague = vague or _NO_CAUSE
            self._failed_at = time.monotonic()
        self._consequences[rank] = text

    def _look(self) -> None:
        """Poll the boards, and report a stall."""
        self._looked_at = time.monotonic()
        if self._joining and not self._told_joining and self._looked_at > self._joining_at + _JOIN_TOLD_S:
            self._told_joining = True
            if missing := self._who_is_missing():
                self._reporter.text(f"waiting for all workers to meet{missing}")
        if self._boards is None:
            return
        self._view.take(self._boards.look())
        if self._view.stalled and not self._told_stall:
            self._reporter.roll_call(self._view.roll_call(), self._boards.stacks(self._view.culprit()))
        self._told_stall = self._view.stalled


class Cause(NamedTuple):
    """The cause of a failure, with its exit code."""

    title: str
    text: str
    code: int = FAILED


def of_death(
    worker: int, code: int, live: Live | None, lines: Sequence[str], *, rpc: bool, out_of_memory: bool
) -> Cause:
    """Return the cause when a worker's process has ended with `code`, as in `Popen.returncode`.

    Args:
        live: its last state; None: unknown.
        lines: its last printed lines.
        rpc: whether torch RPC carried its messages.
        out_of_memory: whether the system has killed processes for lack of memory since the run began.
    """
    doing = "; what it was doing is not known: it has no board" if live is None else f" while {live}"
    text = f"{killed(worker, code) if code < 0 else f'worker {worker} ended with exit code {code}'}{doing}"
    if code == 0:
        text += "; it may call os._exit or sys.exit"
    if code == -signal.SIGKILL and out_of_memory:
        text += "; the system has killed processes meanwhile, as it was out of memory"
    if code == -signal.SIGABRT and rpc and any(map(_GARBAGE.search, lines)):
        text += (
            "; TensorPipe aborts when what comes to a worker's port is not its protocol, such as an HTTP request: see "
            "SECURITY.md; --transport zmq refuses strangers"
        )
    if lines and code:
        text += "\nit printed last:\n" + "\n".join(f"  {line}" for line in lines)
    return Cause(f"worker {worker} died", text)


def killed(worker: int, code: int) -> str:
    """Return the signal that has killed a worker's process, as text; its `code` is below 0."""
    name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
    return f"worker {worker} was killed by signal {-code}{name}"


def of_stall(told: str, culprit: int | None, lives: Mapping[int, Live], details: Sequence[str], now_ns: int) -> Cause:
    """Return the cause when a worker has reported (`told`) that it waited for too long.

    Args:
        culprit: the worker at the end of the chain of waits.
        details: what each worker does, and the stacks of the culprit, line by line.
    """
    live = lives.get(culprit) if culprit is not None else None
    if live is None:
        return Cause("a worker waits in vain", told)
    for_s = max(0.0, (now_ns - live.since_ns) / 1e9)
    if culprit is not None and (unseen := waits_for_unseen(lives, culprit)) is not None:
        title = f"worker {unseen} has not begun"
        text = f"worker {unseen} has made no pipeline yet, and the others wait for it"
    elif live.state in (State.WAITING, State.LEFT):  # a worker that leaves now has waited as well
        title = "no worker goes on"
        text = (
            "each waits for another: they were called differently, as above, or the machine is overloaded, for which a "
            "higher stall_s waits"
        )
    elif live.state is State.STOPPED:
        title = f"worker {culprit} is stopped"
        text = f"worker {culprit} was stopped by a signal, as Ctrl-Z sends it, in step {live.step}"
    else:
        title, text = f"worker {culprit} hangs", f"worker {culprit} hangs: {live} for {for_s:.0f} s"
    return Cause(title, "\n".join([text, told, "what the workers do:", *details]))


def memory_kills() -> int:
    """Return the number of processes that the system has killed for lack of memory."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
