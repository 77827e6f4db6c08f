"""A worker's end of the carrier: pulls that become arrivals, payloads that become pullable.

The transport's threads only put arrivals into a queue and wake the compute thread, which alone reads it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..dependency import Action, PeerLost, PipeError, Stalled, WorkerFailure
from .compute.device import Courier
from .transport.call import Call, left
from .transport.carrier import LEFT, Carrier, Deliver
from .transport.outbox import Answer
from .transport.payload import Payload

#: added to the name of an action of which only that it is finished is wanted
_DONE = " done"
_name = lru_cache(maxsize=2**14)(str)


class Arrival(NamedTuple):
    """Something pulled is here; without payload, only its being finished counts."""

    what: Action | str
    peer: int
    payload: Payload | None
    #: when the transport had it, which may be long before it is read here
    at_ns: int


class Mailbox:
    """Names things by run, so that what two runs of the pipeline exchange is never mixed up.

    Args:
        stall_s: how long nothing may arrive while somebody waits, before that counts as a failure.
    """

    def __init__(self, carrier: Carrier, courier: Courier, stall_s: float) -> None:
        self._carrier = carrier
        self._courier = courier
        self._stall_s = stall_s
        self._call = Call(carrier.worker, "nothing")
        self._told: set[int] = set()
        self._arrived: deque[tuple[int, Action | str, int, Answer | str, int]] = deque()

    @property
    def _run(self) -> int:
        return self._carrier.outbox.run

    def begin(self, call: Call) -> None:
        """Start another run, which is for `call`; all workers do so in the same order.

        Waits until all of the run before the last has been taken, so that what is kept for others is bounded. What
        has arrived here since is told together with the first questions of this run.

        Raises:
            Disagreement: others have begun something else under this number.
        """
        outbox = self._carrier.outbox
        outbox.begin(call)
        self._call = call
        self._told.clear()
        self._carrier.flush()
        if outbox.holds(before=self._run - 1):
            self.dispatch(busy=False)
            outbox.wait_taken(before=self._run - 1, timeout_s=self._stall_s)

    def drain(self) -> None:
        """Wait until the others have taken everything."""
        self._carrier.flush()
        self.dispatch(busy=False)
        self._carrier.outbox.wait_taken(before=self._run + 1, timeout_s=self._stall_s)
        self._carrier.settle(self._stall_s)

    def dispatch(self, busy: bool) -> None:
        """Send what has been published and asked for; `busy`: while this thread computes."""
        self._carrier.dispatch(busy)

    def pull(self, peer: int, wanted: Iterable[tuple[Action | str, bool]], *, often: bool = True) -> None:
        """Ask `peer` for all of `wanted`, ahead of need: (what, whether its payload or just that it is finished).

        Args:
            often: whether to expect more of this, so that a way of its own is worth its memory.
        """
        run = self._run
        if peer not in self._told:
            self._told.add(peer)
            self._carrier.say(peer, (run, self._call.told()))
        self._carrier.pull(
            peer,
            {
                (run, _name(what) if carries else _name(what) + _DONE): self._deliver(peer, what)
                for what, carries in wanted
            },
            # The way to a GPU has copies in it that its compute thread, which should run ahead, must not wait for.
            polled=often and self._courier.in_step,
        )

    def _deliver(self, peer: int, what: Action | str) -> Deliver:
        run, enter, put, wake = self._run, self._courier.enter, self._arrived.append, self._carrier.wake
        for_compute = isinstance(what, Action)  # the rest is read on the CPU

        def deliver(answer: Answer | str, at_ns: int) -> None:
            if for_compute and isinstance(answer, Payload):
                answer = enter(answer)
            put((run, what, peer, answer, at_ns))
            wake()

        return deliver

    def publish(self, what: str, payload: Payload, others: Sequence[int], *, here: bool = False) -> None:
        """Make `payload` pullable by `others` once it has left the device; `here`: it also arrives at this worker."""
        run, outbox = self._run, self._carrier.outbox
        key = run, what
        if others and not self._courier.in_step:
            outbox.promise(key, others)

        def publish(payload: Payload) -> None:
            if others:
                outbox.put(key, payload, others)
            if here:
                self._arrived.append((run, what, self._carrier.worker, payload, time.perf_counter_ns()))
                self._carrier.wake()

        self._courier.leave(payload, publish)

    def finished(self, what: str) -> None:
        """Make it known that `what` is finished."""
        self._carrier.outbox.finish((self._run, what + _DONE))

    def arrivals(self) -> list[Arrival]:
        """Return what has arrived, without waiting."""
        self._carrier.poll()
        found = []
        while self._arrived:
            found.append(self._checked(*self._arrived.popleft()))
        return found

    def next_arrival(self, describe: Callable[[], str]) -> Arrival:
        """Wait for something to arrive.

        Raises:
            PeerLost: a peer failed or is gone.
            Disagreement: a peer was asked for something else, or for nothing more.
            Stalled: nothing came in time; `describe` says what was waited for.
        """
        self.dispatch(busy=False)
        self._carrier.poll()
        while not self._arrived:
            if not self._carrier.wait(self._stall_s):
                me = self._carrier.worker
                raise Stalled(f"worker {me}: nothing arrived for {self._stall_s:g} s, waiting for {describe()}")
            self._carrier.poll()
        return self._checked(*self._arrived.popleft())

    def collect(self, what: str, peers: Iterable[int]) -> dict[int, Payload]:
        """Pull `what` from each of `peers` and wait for all."""
        missing = set(peers)
        for peer in sorted(missing):
            self.pull(peer, [(what, True)], often=False)
        arrived: dict[int, Payload] = {}
        while missing:
            arrival = self.next_arrival(lambda: f"{what} of workers {sorted(missing)}")
            assert arrival.payload is not None and arrival.what == what
            arrived[arrival.peer] = arrival.payload
            missing.remove(arrival.peer)
        return arrived

    def _checked(self, run: int, what: Action | str, peer: int, answer: Answer | str, at_ns: int) -> Arrival:
        if isinstance(answer, WorkerFailure):
            detail = f"worker {answer.worker} failed: {answer.summary}"
            raise PeerLost(self._carrier.worker, peer, detail, answer)
        if isinstance(answer, PipeError):
            raise answer
        if answer == LEFT:
            raise left(peer, self._call)
        if isinstance(answer, str):
            raise PeerLost(self._carrier.worker, peer, answer)
        assert run == self._run, f"{what} of run {run} arrived in run {self._run}"
        return Arrival(what, peer, answer, at_ns)
