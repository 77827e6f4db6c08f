"""A worker's end of its carrier: it pulls from other workers and publishes payloads that they pull.

Every message is named by the run (call of the pipeline) that it belongs to, because runs may overlap.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import NoReturn

from ..dependency import PeerLost, PipeError, Stalled, WorkerFailure
from .compute.devices.device import DeviceBackend
from .transport.call import Call
from .transport.carrier import LEFT, Carrier, Delivered
from .transport.payload import Payload

logger = logging.getLogger(__name__)


class Mailbox:
    """The pulls and published payloads of a worker.

    Args:
        stall_s: seconds without an arrival, while this worker waits, that count as a failure.
    """

    def __init__(self, carrier: Carrier, backend: DeviceBackend, stall_s: float) -> None:
        self.carrier = carrier
        self._backend = backend
        self.stall_s = stall_s

    def begin(self, call: Call, keeps: int = 1) -> int:
        """Start a run for `call` and return its number; all workers start the same runs in the same order.

        Waits until other workers have pulled everything of the runs before the last `keeps`, so that the outbox is
        bounded.

        Raises:
            Disagreement: another worker has started something else under this number.
        """
        run = self.carrier.begin(call)
        self.carrier.wait_taken(run - keeps, self.stall_s)
        return run

    def pull(self, run: int, peer: int, names: Iterable[str], *, to_compute: bool = False) -> None:
        """Ask `peer` for all of `names`, ahead of need; payloads that are not computed with are read on the CPU."""
        # Copies to a GPU are started by the receiving thread: the compute thread must not wait for them.
        enter = self._backend.enter if to_compute and not self._backend.in_step else None
        self.carrier.pull(peer, run, names, enter)

    def publish(
        self, run: int, what: str, payload: Payload, others: Sequence[int], *, to_compute: bool = False
    ) -> None:
        """Let the workers `others` pull `payload`: at once if all take it from the device, else when it has left."""
        outbox, key = self.carrier.outbox, (run, what)
        if self._backend.in_step:
            outbox.offer(key, payload, others)
            return
        takes, device = self.carrier.post.takes_from_device, self._backend.device
        if to_compute and all([takes(peer, device) for peer in others]):
            if (stays := self._backend.staying(payload, self.carrier.fault)) is not None:
                outbox.offer(key, stays, others)
                return
        outbox.promise(key, others)
        self._backend.leave(payload, lambda left: outbox.offer(key, left, others), self.carrier.fault)

    def arrivals(self, runs: Container[int]) -> list[Delivered]:
        """Return the arrivals for `runs`, without waiting: payloads, or None for finished actions.

        Raises:
            PeerLost: a peer failed or is gone.
        """
        found = self.carrier.poll(runs)
        for peer, key, answer, _ in found:
            if answer is not None and not isinstance(answer, Payload):
                self._raise(peer, key[0], answer)
        return found

    def next_arrivals(
        self, runs: Collection[int], describe: Callable[[], str], *, looked: bool = False
    ) -> list[Delivered]:
        """Wait until something has arrived for `runs`, and return it.

        Args:
            looked: whether `arrivals` has just returned nothing.

        Raises:
            PeerLost: a peer failed or is gone.
            Disagreement: a peer has made another call, or has ended its script.
            Stalled: nothing arrived in time; `describe` names the awaited payloads.
        """
        me, begin, told = self.carrier.worker, time.monotonic(), False
        while looked or not (found := self.arrivals(runs)):
            looked = False
            left = begin + (self.stall_s if told else self.stall_s / 2) - time.monotonic()
            if self.carrier.wait(max(left, 0)):
                continue
            if told:
                waits = f"{describe()}, in {self.carrier.calls.named(runs)}"
                silent = " and ".join(f"worker {peer}" for peer in self.carrier.silent())
                why = f"; {silent} cannot be reached: its process, its host or the network hangs" if silent else ""
                raise Stalled(f"worker {me}: nothing arrived for {self.stall_s:g} s, waiting for {waits}{why}")
            told = True
            logger.warning(
                "worker %d: nothing has arrived for %g s, waiting for %s, in %s; that fails after %g s",
                me, self.stall_s / 2, describe(), self.carrier.calls.named(runs), self.stall_s,
            )  # fmt: skip
        return found

    def collect(self, run: int, what: str, peers: Iterable[int]) -> dict[int, Payload]:
        """Pull the payloads of this name from `peers` and wait for all."""
        missing = set(peers)
        for peer in sorted(missing):
            self.pull(run, peer, [what])
        found: dict[int, Payload] = {}
        while missing:
            for peer, _, payload, _ in self.next_arrivals((run,), lambda: f"{what} of workers {sorted(missing)}"):
                assert isinstance(payload, Payload)
                found[peer] = payload
                missing.remove(peer)
        return found

    def _raise(self, peer: int, run: int, answer: PipeError | str) -> NoReturn:
        if isinstance(answer, WorkerFailure):
            detail = f"worker {answer.worker} failed: {answer.summary}"
            raise PeerLost(self.carrier.worker, peer, detail, answer)
        if isinstance(answer, PipeError):
            raise answer
        if answer == LEFT:
            raise self.carrier.calls.missed(peer, run)
        raise PeerLost(self.carrier.worker, peer, answer)
