"""A worker's end of its carrier: pulls that become arrivals, payloads that become pullable.

Everything is named by the run it belongs to, so that what two runs exchange is never mixed up; runs may overlap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..dependency import Action, PeerLost, PipeError, Stalled, WorkerFailure
from .compute.device import Courier
from .transport.call import Call
from .transport.carrier import LEFT, Carrier, Delivered
from .transport.outbox import Key, Outbox
from .transport.payload import Payload

logger = logging.getLogger(__name__)

#: added to the name of an action of which only that it is finished is wanted
_DONE = " done"
_name = lru_cache(maxsize=2**14)(str)


class Arrival(NamedTuple):
    """Something pulled is here; without payload, only its being finished counts."""

    run: int
    what: Action | str
    peer: int
    payload: Payload | None
    #: when the carrier had it, which may be long before it is read here
    at_ns: int


class Mailbox:
    """What a worker pulls and publishes.

    Args:
        stall_s: how long nothing may arrive while somebody waits, before that counts as a failure.
    """

    def __init__(self, carrier: Carrier, courier: Courier, stall_s: float) -> None:
        self._carrier = carrier
        self._courier = courier
        self._stall_s = stall_s
        #: what keys stand for that are pulled or this worker's own
        self._actions: dict[Key, Action] = {}

    def begin(self, call: Call, keeps: int = 1) -> int:
        """Start another run, which is for `call`, and return its number; all workers do so in the same order.

        Waits until all of the runs before the last `keeps` has been taken, so that what is kept for others is bounded.

        Raises:
            Disagreement: others have begun something else under this number.
        """
        run = self._carrier.begin(call)
        self._carrier.wait_taken(run - keeps, self._stall_s)
        return run

    def go_on(self, run: int) -> None:
        """Note that the caller wants the result of `run`, the oldest that has begun; 0: that the next one rests."""
        self._carrier.calls.go_on(run)

    def end(self, run: int) -> None:
        """Note that `run` is over on this worker: all its actions are finished."""
        self._carrier.end(run)

    def abandon(self, run: int) -> None:
        """Drop what is kept for others, and what comes, of `run`, which no worker goes on with."""
        self._carrier.abandon(run)
        for key in list(self._actions):  # in one step of the interpreter: a thread that copies may add to it
            if key[0] == run:
                self._actions.pop(key, None)

    @property
    def outbox(self) -> Outbox:
        """What others have not taken yet."""
        return self._carrier.outbox

    def drain(self) -> None:
        """Wait until the others have taken everything."""
        self._carrier.wait_taken(None, self._stall_s)

    def pull(self, run: int, peer: int, wanted: Iterable[tuple[Action | str, bool]]) -> None:
        """Ask `peer` for all of `wanted`, ahead of need: (what, whether its payload or just that it is finished)."""
        for_compute: list[str] = []
        others: list[str] = []
        for what, carries in wanted:
            if isinstance(what, Action):
                name = _name(what) if carries else _name(what) + _DONE
                self._actions[run, name] = what
                (for_compute if what.kind.resource == "compute" else others).append(name)
            else:
                others.append(what)
        if for_compute:
            # The way to a GPU has copies in it that its compute thread, which should run ahead, must not wait for.
            self._carrier.pull(peer, run, for_compute, None if self._courier.in_step else self._courier.enter)
        if others:
            self._carrier.pull(peer, run, others)  # read on the CPU

    def publish(self, run: int, what: str, payload: Payload, others: Sequence[int]) -> None:
        """Make `payload` pullable by `others` once it has left the device."""
        outbox, key = self._carrier.outbox, (run, what)
        if not self._courier.in_step:
            outbox.promise(key, others)
        self._courier.leave(payload, lambda left: outbox.offer(key, left, others), self._carrier.fault)

    def deliver_own(self, run: int, what: Action, outcome: Payload | BaseException | None) -> None:
        """Let something of this worker's own arrive, or fail the worker with it. May be called from any thread."""
        if isinstance(outcome, BaseException):
            self._carrier.fault(outcome)
            return
        key = run, str(what)
        self._actions[key] = what
        self._carrier.deliver(key, outcome)

    def finished(self, run: int, what: str) -> None:
        """Make it known that `what` is finished."""
        self._carrier.outbox.finish((run, what + _DONE))

    def arrivals(self, runs: Container[int]) -> list[Arrival]:
        """Return what has arrived for `runs`, without waiting.

        Raises:
            PeerLost: a peer failed or is gone.
        """
        return [self._read(arrived) for arrived in self._carrier.poll(runs)]

    def next_arrivals(
        self, runs: Collection[int], describe: Callable[[], str], *, looked: bool = False
    ) -> list[Arrival]:
        """Wait until something has arrived for `runs`, and return it.

        Args:
            looked: whether `arrivals` has just found nothing.

        Raises:
            PeerLost: a peer failed or is gone.
            Disagreement: a peer was asked for something else, or for nothing more.
            Stalled: nothing came in time; `describe` says what was waited for.
        """
        me, begin, told = self._carrier.worker, time.monotonic(), False
        while looked or not (found := self.arrivals(runs)):
            looked = False
            left = begin + (self._stall_s if told else self._stall_s / 2) - time.monotonic()
            if self._carrier.wait(max(left, 0)):
                continue
            if told:
                waits = f"{describe()}, in {self._carrier.calls.named(runs)}"
                raise Stalled(f"worker {me}: nothing arrived for {self._stall_s:g} s, waiting for {waits}")
            told = True
            logger.warning(
                "worker %d: nothing has arrived for %g s, waiting for %s, in %s; that fails after %g s",
                me, self._stall_s / 2, describe(), self._carrier.calls.named(runs), self._stall_s,
            )  # fmt: skip
        return found

    def collect(self, run: int, what: str, peers: Iterable[int]) -> dict[int, Payload]:
        """Pull `what` from each of `peers` and wait for all."""
        missing = set(peers)
        for peer in sorted(missing):
            self.pull(run, peer, [(what, True)])
        found: dict[int, Payload] = {}
        while missing:
            for arrival in self.next_arrivals((run,), lambda: f"{what} of workers {sorted(missing)}"):
                assert arrival.payload is not None and arrival.what == what
                found[arrival.peer] = arrival.payload
                missing.remove(arrival.peer)
        return found

    def _read(self, arrived: Delivered) -> Arrival:
        peer, key, answer, at_ns = arrived
        what = self._actions.pop(key, key[1])
        if answer is None or isinstance(answer, Payload):
            return Arrival(key[0], what, peer, answer, at_ns)
        if isinstance(answer, WorkerFailure):
            detail = f"worker {answer.worker} failed: {answer.summary}"
            raise PeerLost(self._carrier.worker, peer, detail, answer)
        if isinstance(answer, PipeError):
            raise answer
        if answer == LEFT:
            raise self._carrier.calls.missed(peer, key[0])
        raise PeerLost(self._carrier.worker, peer, answer)
