"""A worker: owns its shards, one thread that computes, one outbox.

    other workers ──(transport's threads)──> mailbox ──┐
                                                       v
         outbox <── publish ── compute thread: event -> state -> instruction -> shard

The caller's thread is the compute thread: between runs nothing happens here, and the outbox is served by
the carrier's threads alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..dependency import Disagreement, PeerLost, Spec, Stalled, WorkerFailure
from .compute.device import Courier
from .compute.result import Result
from .compute.shard import Shard
from .hooks import Listeners
from .mailbox import Mailbox
from .run import Run, Tasks, Work
from .transport.call import Call
from .transport.carrier import Carrier
from .transport.payload import Payload, Tree, pack, unpack

_HERE = Path(__file__).parent


class WorkerActor:
    """Runs its part of every step. All workers make the same calls in the same order.

    Args:
        shards: by (stage, route).
        lookahead: how many actions ahead of the oldest unfinished one may be pulled for.
        stall_s: how long nothing may arrive while nothing can run, before that counts as a failure.
    """

    def __init__(
        self,
        carrier: Carrier,
        courier: Courier,
        shards: dict[tuple[int, int], Shard],
        *,
        lookahead: int = 64,
        stall_s: float = 300.0,
    ) -> None:
        self.carrier = carrier
        self.worker = carrier.worker
        self.courier = courier
        self.shards = shards
        self.mailbox = Mailbox(carrier, courier, stall_s)
        self.listeners = Listeners()
        #: training steps done
        self.step = 0
        #: what runs now, such as `2B3`, for reports
        self.running = ""
        #: set from anywhere; all workers then stop after the same step (see Result.stop)
        self.stop_requested = False
        self._lookahead = lookahead
        self._tasks: dict[Spec, Tasks] = {}

    def tasks(self, spec: Spec) -> Tasks:
        """Return what the actions of `spec` mean here."""
        if spec not in self._tasks:
            self._tasks[spec] = Tasks(spec, self.worker, self.shards)
        return self._tasks[spec]

    def run(self, work: Work, call: Call) -> Result:
        """Do this worker's part of `work` and return what all workers know after it.

        Raises:
            Disagreement: another worker's call is not `call`.
            WorkerFailure: this worker's own work raised.
            PeerLost: another worker failed or is gone.
            Stalled: nothing arrived in time.
        """
        with self._telling_failures(), torch.set_grad_enabled(work.train):
            result = Run(self, work, self._lookahead, self.mailbox.begin(call)).complete()
            self.step += work.train
            return result

    def gather(self, name: str, value: Tree) -> list[Tree] | None:
        """Return every worker's `value`, in order of workers, on worker 0; None on the others."""
        with self._telling_failures():
            run = self.mailbox.begin(Call(self.worker, f"gather {name}"))
            if self.worker != 0:
                self.mailbox.publish(run, name, pack(value), [0])
                return None
            arrived = self.mailbox.collect(run, name, range(1, self.carrier.num_workers))
            return [value, *(unpack(arrived[worker]) for worker in sorted(arrived))]

    def barrier(self) -> None:
        """Return when every worker has called this and nobody needs anything of this one."""
        with self._telling_failures():
            run = self.mailbox.begin(Call(self.worker, "barrier"))
            others = set(range(self.carrier.num_workers)) - {self.worker}
            self.mailbox.publish(run, "barrier", Payload([], None), list(others))
            self.mailbox.collect(run, "barrier", others)
            self.mailbox.drain()

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Tell the others at once that there will be no more from here, and name the first cause."""
        self.running = ""
        try:
            yield
        except BaseException as error:
            known = error.cause if isinstance(error, PeerLost) else error
            failure = known if isinstance(known, (Disagreement, WorkerFailure)) else self._describe(error)
            self.carrier.fail(failure)
            if isinstance(error, Exception) and not isinstance(error, (Disagreement, PeerLost, Stalled, WorkerFailure)):
                raise failure from error
            raise

    def _describe(self, error: BaseException) -> WorkerFailure:
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        frames = error.__traceback__
        while frames and frames.tb_next and Path(frames.tb_frame.f_code.co_filename).parent == _HERE:
            frames = frames.tb_next  # the user's code is of interest, not how we came there
        trace = "".join(traceback.format_exception(type(error), error, frames))
        return WorkerFailure(self.worker, self.running, self.step, summary, trace)
