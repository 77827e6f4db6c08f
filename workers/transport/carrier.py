"""A worker's end of all pulls: its outbox, its open questions, arrivals, and lost peers.

    worker's compute thread                     carrier                              other workers
        outbox.offer(1F3) ──────────────────────> post.answer ───────────────────>
        pull(2F0) ──────────────────────────────> post.ask ──────────────────────> their outbox
        poll(), wait() <── queue <── arrive <──── post <──────────────────────────

A delivering thread only records an arrival, so no thread is held and none computes. A `Delivery` brings it: calls in
a process (`local.py`), or by messages between processes (`messages.py`) over RPC or ZeroMQ.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...dependency import PipeError
from .call import Call, is_call
from .calls import Calls
from .outbox import Answer, Key, Outbox
from .payload import Payload

if TYPE_CHECKING:
    from .device_way import DeviceWay

#: brings an arrived payload towards the device; called in any thread
Enter = Callable[[Payload], Payload]
#: the reason of a peer that has left in good order
LEFT = "has left"
#: seconds between two requests to peers that have not confirmed their payloads: first, and at most
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 1.0
#: seconds for a worker to report its clock; and, after a long silence, before it counts as silent
_PING_S, _ANSWER_S = 30.0, 5.0
#: seconds that a leaving worker waits for peers to take its payloads
_DRAIN_S = 300.0


class Delivered(NamedTuple):
    """The answer to a pull, as the compute thread gets it."""

    peer: int
    key: Key
    #: the payload; or the peer's error; or, as text, why the peer cannot be reached (`LEFT`)
    answer: Answer | PipeError | str
    #: time of arrival in ns (`perf_counter_ns`); it may be read much later
    at_ns: int


class Plane(NamedTuple):
    """The processes that carry together: member `member` of each worker, where a worker has `members` processes."""

    member: int = 0
    members: int = 1

    def rank(self, worker: int) -> int:
        """Return the number of the process that stands for a worker in this plane."""
        return worker * self.members + self.member


#: where each worker is one process
ALONE = Plane()


class Delivery(Protocol):
    """Brings questions and answers to other workers, and theirs to the carrier that has opened it."""

    #: whether all workers are of this process
    within_process: bool

    def open(self, carrier: Carrier) -> None:
        """Meet the other workers; from now on `carrier` gets their questions, answers, confirmations and losses.

        Raises:
            ConfigError: they are missing, or the address cannot be used.
        """

    def ask(self, peer: int, keys: list[Key]) -> None:
        """Take questions to `peer`, no later than this worker polls or waits."""

    def answer(self, peer: int, key: Key, answer: Answer | PipeError) -> bool:
        """Take an answer to `peer`, where it is to arrive. Return whether it is there for good, so was taken."""

    def use_device(self, way: DeviceWay | None) -> None:
        """Let payloads move from this device to devices of other workers, or stay on the device of several workers."""

    def takes_from_device(self, peer: int, device: Any) -> bool:
        """Return whether an answer to `peer` may be a payload that stays on this device."""

    def fail(self, failure: PipeError) -> None:
        """Send all contacted peers the reason why there are no more answers."""

    def poll(self) -> None:
        """Send deferred messages, and take in arrivals. For the compute thread, as the next methods."""

    def wait(self, timeout_s: float, there: Callable[[], bool]) -> bool:
        """Block until notified or until `there()`; return False on timeout."""

    def wait_taken(self, timeout_s: float) -> None:
        """Send deferred messages, then sleep until a payload may have been taken."""

    def notify(self) -> None:
        """Wake the compute thread, or do when it sleeps next. For any thread."""

    def request(self, peer: int, what: str, value: Any = None) -> Future[Any]:
        """Send `peer` a request: to confirm its payloads now, to report its clock, or its board."""

    def close(self) -> None:
        """Send a goodbye to all contacted peers."""


class Carrier:
    """Carries pulls between the outboxes of workers. Its runs may overlap.

    Args:
        workers: the numbers of all workers between which payloads are carried, this one too.
        post: to the other workers, which are met before this returns.
    """

    def __init__(self, worker: int, workers: Iterable[int], post: Delivery, plane: Plane = ALONE) -> None:
        self.worker, self.plane = worker, plane
        self.workers = frozenset(workers)
        self.post = post
        self.outbox = Outbox(post.answer)
        #: this worker's calls, which peers get with the first questions of a run
        self.calls = Calls(worker, self._disagree)
        #: values for watchers on other machines; see rpc_pipe/boards/remote.py
        self.serve_board: Callable[[int], bytes] | None = None
        #: whether a peer asks this worker, which holds the last stage, to stop all of them
        self.stop_requested = False
        self._told: dict[int, set[int]] = {}
        self._open: dict[tuple[int, Key], Enter | None] = {}
        self._arrived: deque[Delivered] = deque()
        #: arrivals of runs that were not polled for yet
        self._set_aside: list[Delivered] = []
        #: peers that answer nothing more, with the reason; and among them the peers with open questions
        self._lost: dict[int, PipeError | str] = {}
        self._breaking: deque[int] = deque()
        self._fault: BaseException | None = None
        self._sleeps = self._awaits_taken = False
        post.open(self)

    # --- for the compute thread

    def begin(self, call: Call) -> int:
        """Start another run, which is for `call`, and return its number; all workers do so in the same order.

        Raises:
            PipeError: this worker has failed before, or a peer makes another call.
        """
        run = self.calls.begin(call)
        self._told[run] = set()
        self.outbox.begin(run)
        if self.outbox.failure is not None:
            raise self.outbox.failure
        return run

    def end(self, run: int) -> None:
        """`run` is over on this worker."""
        self.calls.end(run)
        self.outbox.end(run)
        self._told.pop(run, None)

    def abandon(self, run: int) -> None:
        """`run` is abandoned by all workers, each perhaps at another point of it."""
        self.calls.end(run)
        self.outbox.abandon(run)
        self._told.pop(run, None)
        for asked in list(self._open):  # in one step of the interpreter: other threads take from it
            if asked[1][0] == run:
                self._open.pop(asked, None)
        self._set_aside = [arrived for arrived in self._set_aside if arrived.key[0] != run]

    def pull(self, peer: int, run: int, names: Iterable[str], enter: Enter | None = None) -> None:
        """Ask `peer` for all `names` of `run`; each answer arrives once. Return at once."""
        keys = [(run, name) for name in names]
        self._open.update(dict.fromkeys([(peer, key) for key in keys], enter))
        if peer not in self._told[run]:
            self._told[run].add(peer)
            keys.insert(0, (run, self.calls.told(run)))
        self.post.ask(peer, keys)
        if peer in self._lost:
            self._breaking.append(peer)

    def look_for_fault(self) -> None:
        """Raise the error that ended a thread of this worker, or ends its epoch. For any thread."""
        if self._fault is not None:
            raise self._fault

    def poll(self, runs: Container[int]) -> list[Delivered]:
        """Return the arrivals for `runs`, without waiting; make sure that deferred messages are sent.

        Raises:
            BaseException: the error that ended a thread of this worker.
        """
        self.post.poll()
        self.look_for_fault()
        while self._breaking:
            self._give_up(self._breaking.popleft())
        found: list[Delivered] = []
        if self._set_aside:
            self._arrived.extendleft(reversed(self._set_aside))
            self._set_aside = []
        while self._arrived:
            arrived = self._arrived.popleft()
            if arrived.key[0] in runs:
                found.append(arrived)
            elif arrived.key[0] in self._told:  # later arrivals of an abandoned run are dropped
                self._set_aside.append(arrived)
        return found

    def wait(self, timeout_s: float) -> bool:
        """Send deferred messages, then sleep until there is an arrival to poll for.

        Returns:
            False if nothing arrived in time; True may be for nothing.
        """
        self._sleeps = True  # before the poll, so that a thread that delivers after it sees the flag
        try:
            return self.post.wait(timeout_s, self._has_come)
        finally:
            self._sleeps = False

    def wait_taken(self, before: int | None, timeout_s: float, since: int = 0) -> None:
        """Wait until everything offered in runs from `since` to before `before` has been taken; None: in all.

        Raises:
            PipeError: it was not, in time.
        """
        if not self.outbox.untaken(before, since):
            return
        now = look = time.monotonic()
        deadline, pause = now + timeout_s, _FIRST_LOOK_S
        self._awaits_taken = True
        try:
            while left := self.outbox.untaken(before, since):
                self.look_for_fault()
                if now >= deadline:
                    names = ", ".join(f"{what} by {sorted(who)}" for (_, what), who in left.items())
                    raise PipeError(f"outbox: not taken after {timeout_s:g} s: {names}")
                if now >= look:  # a peer may have no other reason to confirm soon
                    for peer in set().union(*left.values()):
                        self.post.request(peer, "hurry")
                    look, pause = now + pause, min(2 * pause, _LAST_LOOK_S)
                self.post.wait_taken(max(min(look, deadline) - now, 0))
                now = time.monotonic()
        finally:
            self._awaits_taken = False

    def request_stop(self, peer: int) -> None:
        """Have `peer`, which holds the last stage, stop all workers after its next step."""
        if peer != self.worker:
            self.post.request(peer, "stop")

    @property
    def broken(self) -> bool:
        """Whether this worker has failed, or another one has gone or failed: no step can be finished."""
        return bool(self._lost) or self.outbox.failure is not None or self._fault is not None

    def fail(self, failure: PipeError) -> None:
        """Answer every question, now and from now on, with the reason why there is no payload."""
        if self.outbox.failure is not None:
            return  # the peers know it already
        self.outbox.fail(failure)
        self.post.fail(failure)

    def look(self, peer: int, seen: int) -> Future[bytes]:
        """Request a value that `peer` exhibits."""
        return self.post.request(peer, "look", seen)

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Return (peer's `perf_counter_ns` minus ours, half the round trip: the error of it).

        The fastest of eight pings counts, as its asymmetry can be the least (Cristian 1989).

        Raises:
            RuntimeError, TimeoutError: it does not answer.
        """
        pings = []
        for _ in range(8):
            sent = time.perf_counter_ns()
            there = self.post.request(peer, "clock").result(_PING_S)
            error_ns = (time.perf_counter_ns() - sent) // 2
            pings.append((error_ns, there - (sent + error_ns)))
        error_ns, offset_ns = min(pings)
        return offset_ns, error_ns

    def silent(self) -> list[int]:
        """Return the workers that answer nothing."""
        asked = {peer: self.post.request(peer, "clock") for peer in sorted(self.workers - {self.worker})}
        futures.wait(asked.values(), _ANSWER_S)
        return [peer for peer, answer in asked.items() if not answer.done() or answer.exception()]

    def end_calls(self) -> None:
        """Start no further runs. A peer that makes a call which this worker will not make gets a `Disagreement`."""
        self.calls.leave()

    def close(self) -> None:
        """Leave, when the peers have taken their payloads; a later pull from here is answered with `LEFT`."""
        self.end_calls()
        if self.outbox.failure is None and self._fault is None:
            with suppress(PipeError):
                self.wait_taken(None, _DRAIN_S)
        self.post.close()

    # --- for any thread

    def deliver(self, key: Key, answer: Answer | BaseException) -> None:
        """Let a payload of this worker arrive here, or fail with an error."""
        if isinstance(answer, BaseException):
            self.fault(answer)
            return
        self._open[self.worker, key] = None
        self.arrive(self.worker, key, answer, time.perf_counter_ns())

    def fault(self, error: BaseException) -> None:
        """A thread that works for this worker has ended by `error`, so the worker fails with it when it polls."""
        self._fault = self._fault or error
        self.post.notify()

    # --- for the post, in any thread

    def arrive(self, peer: int, key: Key, answer: Answer | PipeError | str, at_ns: int) -> bool:
        """An answer is here, to be polled, unless it was given up. Return whether `poll` could have brought it."""
        try:
            enter = self._open.pop((peer, key))
        except KeyError:
            return False
        if enter is not None and isinstance(answer, Payload):
            try:
                answer = enter(answer)
            except Exception as error:  # this may be another worker's thread
                self.fault(error)
        self._arrived.append(Delivered(peer, key, answer, at_ns))
        if self._sleeps:
            self.post.notify()
        return enter is None

    def asked(self, peer: int, keys: Iterable[Key]) -> None:
        """`peer` asks for `keys`, and reports its call, which is no question."""
        questions: list[Key] = []
        for key in keys:
            if is_call(key[1]):
                self.calls.heard(peer, *key)
            else:
                questions.append(key)
        if questions:
            self.outbox.ask(questions, peer)

    def taken(self, keys: Iterable[Key], peer: int) -> None:
        """`peer` has taken `keys`."""
        self.outbox.taken(keys, peer)
        if self._awaits_taken:
            self.post.notify()

    def lose(self, peer: int, reason: PipeError | str) -> None:
        """`peer` answers and takes nothing more; its earlier answers count first."""
        self.outbox.leaves(peer)
        self._lost.setdefault(peer, reason)
        self._breaking.append(peer)
        self.post.notify()

    def _has_come(self) -> bool:
        return bool(self._arrived or self._breaking)

    def _disagree(self, error: PipeError) -> None:
        self.fail(error)
        self.fault(error)

    def _give_up(self, peer: int) -> None:
        for asked, key in list(self._open):
            if asked == peer:
                self.arrive(peer, key, self._lost[peer], time.perf_counter_ns())
