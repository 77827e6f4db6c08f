"""A worker: owns its shards, one thread that computes, one outbox.

    other workers ──(transport's threads)──> mailbox ──┐
                                                       v
         outbox <── publish ── compute thread: event -> state -> instruction -> shard

The caller's thread is the compute thread: between runs nothing happens here, and the outbox is served by
the carrier's threads alone.
"""

import contextlib
import signal
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from torch import Tensor, distributed
from torch.nn.modules import module

from ..dependency import Action, Disagreement, NotFinite, Part, PeerLost, PipeError, Stalled, WorkerFailure, ends_epoch
from ..dependency.errors import leading_to_user
from ..dependency.pipeline_options import Options
from ..system.allocator import keep_freed_memory
from .compute.devices.device import DeviceBackend
from .compute.modules.module_state import may_count
from .compute.result import Result
from .compute.shard import Shard
from .mailbox import Mailbox
from .run import Stream
from .step import Bound, Context, StepInput
from .tasks import bound, refuse_collectives, refuse_disorder
from .transport.call import Call
from .transport.carrier import Carrier
from .transport.payload import Tree, map_tensors, pack, shapes_in, unpack

_HERE = Path(__file__).parent
#: files with the frames between a caller and a module or context manager
_CALLERS = Path(module.__file__), Path(contextlib.__file__)

#: the options of a pipeline without any
USUAL = Options()
#: compiled parts that are kept
MOST_PARTS = 64


class WorkerActor(Context):
    """Runs its part of every step. All workers make the same calls in the same order.

    Args:
        shards: by (stage, route).
        max_grad_norm: the limit for the norm of all gradients of the model, which clipping enforces.
        options: of the pipeline.
    """

    def __init__(
        self,
        carrier: Carrier,
        backend: DeviceBackend,
        shards: dict[tuple[int, int], Shard],
        *,
        max_grad_norm: float | None = None,
        options: Options = USUAL,
    ) -> None:
        super().__init__(carrier.worker, backend, Mailbox(carrier, backend, options.stall_s), shards, max_grad_norm)
        self.carrier = carrier
        #: the shards that end their steps here, each on one worker alone
        self.homes = self.shards
        self.options, self.stall_s = options, options.stall_s
        #: names the hanging worker, where no launcher does
        self.roll_call: Callable[[], str] | None = None
        self._bound: dict[Part, Bound] = {}
        #: streams that have not ended
        self._streams: list[Stream] = []
        #: whether a stream that an error breaks off stays as it is, to be looked at, until `abandon_broken`
        self.keeps_broken = False
        #: whether training continues without workers that die, so that no failure is reported here
        self.elastic = False
        self.broken: Stream | None = None

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors; if members share them, whole ones on the first member, and none on the rest."""
        return tensors if self.members is None else self.members.whole(tensors)

    def run(self, batch: StepInput) -> Result:
        """Do this worker's part of `batch` and return the result, which all workers share: a stream of length one.

        Raises:
            Disagreement: another worker makes another call.
            WorkerFailure: this worker's work raised.
            PeerLost: another worker failed or is gone.
            Stalled: nothing arrived in time.
        """
        if self.running:
            raise PipeError(f"pipeline: called from within {self.running}: layers, losses and hooks cannot call it")
        stream = self._begin(batch, iter([batch]))
        try:
            with self._telling_failures(stream):
                result = stream.next()
        finally:
            self._end(stream)
        assert result is not None
        return result

    def stream(self, batches: Iterator[StepInput]) -> Generator[Result, None, None]:
        """Do this worker's part of one batch after the other; as `run`, but the next may begin before one has ended."""
        first = next(batches, None)
        if first is None:
            return
        stream = self._begin(first, chain([first], batches))
        try:
            while True:
                with self._telling_failures(stream):
                    self.backend.use()
                    result = stream.next()
                if result is None:
                    return
                yield result
        finally:
            self._end(stream)

    def _begin(self, first: StepInput, batches: Iterator[StepInput]) -> Stream:
        if self.backend.in_step:
            keep_freed_memory()
        overlap = None
        if first.train and not first.spec.synchronous:
            from .overlap import Overlap

            overlap = Overlap(self)
        self.backend.use()
        self._streams.append(Stream(self, batches, self._bound_for, overlap))
        return self._streams[-1]

    def _end(self, stream: Stream) -> None:
        """A stream is complete or left, so it is abandoned; or it has broken off."""
        self._streams.remove(stream)
        if stream is not self.broken:
            stream.abandon()

    def abandon_broken(self) -> None:
        """Undo the begun steps of a stream that has broken off."""
        broken, self.broken = self.broken, None
        if broken is not None:
            broken.abandon()

    def abandon(self) -> None:
        """Undo all that has been begun of steps that are not complete, also where a stream rests between two steps."""
        self.abandon_broken()  # the newest first: an evaluation has begun with modules in other modes
        for stream in self._streams:
            stream.abandon()

    def begin_epoch(self, carrier: Carrier) -> None:
        """Use another carrier from now on; steps that have begun stay."""
        self.carrier, self.mailbox = carrier, Mailbox(carrier, self.backend, self.stall_s)

    def host(self, shards: dict[tuple[int, int], Shard], homes: Collection[tuple[int, int]]) -> None:
        """Have these shards from now on; the shards of `homes` end their steps here."""
        self.shards, self.homes = shards, {place: shards[place] for place in homes}
        self._bound.clear()

    def flush(self) -> None:
        """Complete the begun steps of streams that overlap; their results are given next."""
        with self._telling_failures():
            for stream in self._streams:
                stream.flush()

    def resume(self, carrier: Carrier, step: int) -> None:
        """Forget begun steps and continue, over another carrier, after `step` complete steps."""
        self.abandon()
        self.begin_epoch(carrier)
        self.running, self.step, self.next_step = "", step, step
        for shard in self.shards.values():
            shard.abandon()
        self.listeners.tell("idle", step)

    def _bound_for(self, batch: StepInput) -> Bound:
        if batch.part not in self._bound:
            if len(self._bound) >= MOST_PARTS:
                self._bound.clear()
            if self.members is None and distributed.is_available() and distributed.is_initialized():
                refuse_collectives(batch.part, batch.order, self.shards.values())
            refuse_disorder(batch.part, self.shards)
            self._bound[batch.part] = bound(batch.part, self.shards, self.members, batch.reductions)
        return self._bound[batch.part]

    def gather(self, name: str, value: Tree) -> list[Tree] | None:
        """Return every worker's `value`, in order of workers, on the first worker; None on any other."""
        return self.hand(f"gather {name}", value, self.carrier.workers, [min(self.carrier.workers)])

    def exchange(self, name: str, value: Tree) -> list[Tree]:
        """Return every worker's `value`, in order of workers, on every worker."""
        values = self.hand(name, value, self.carrier.workers, self.carrier.workers)
        assert values is not None
        return values

    def hand(self, name: str, value: Tree, senders: Collection[int], takers: Collection[int]) -> list[Tree] | None:
        """Return the `value`s of the workers `senders`, in order, on the workers `takers`; None on any other.

        They travel from worker to worker, and are on the host of all takers alike. All workers call this alike.
        """
        with self._telling_failures():
            if not self.backend.in_step:  # not by pinned memory: a whole model may be too large for it
                value = map_tensors(value, Tensor.cpu)
            run = self.mailbox.begin(Call(self.worker, name))
            values: dict[int, Tree] = {self.worker: value} if self.worker in senders else {}
            others = [worker for worker in takers if worker != self.worker]
            payload = pack(value) if values and others else None
            if payload is not None:
                self.mailbox.publish(run, name, payload, others)
            if self.worker in takers:
                arrived = self.mailbox.collect(run, name, set(senders) - {self.worker})
                values |= {worker: unpack(one) for worker, one in arrived.items()}
            if payload is not None and payload.num_bytes:  # the caller may write weights while peers read them
                self.carrier.wait_taken(run + 1, self.stall_s, since=run)
            self.carrier.end(run)
        return [values[worker] for worker in sorted(senders)] if self.worker in takers else None

    def barrier(self) -> None:
        """Return when every worker has called this and no peer needs a payload of this one."""
        self.exchange("barrier", None)
        with self._telling_failures():
            self.carrier.wait_taken(None, self.stall_s)

    def chained(self) -> set[int]:
        """Return the stages with forwards that may write state which later ones read."""
        shards = self.shards.items()
        return {stage for (stage, _), shard in shards if shard.stateful or any(map(may_count, shard.slice.own))}

    def go_on_at(self, step: int, updates: int) -> None:
        """Count from here as after a number of training steps and updates."""
        self.step = self.next_step = step
        for shard in self.shards.values():
            shard.go_on_at(step, updates)

    @contextmanager
    def _telling_failures(self, stream: Stream | None = None) -> Iterator[None]:
        """Inform the peers at once that this worker sends no more, with the first cause."""
        self.running = ""
        try:
            yield
        except BaseException as error:
            if self.keeps_broken and stream is not None:
                self.broken = stream
            if self.elastic and ends_epoch(error):
                self.running = ""
                raise
            if self.members is not None and self.members.has_lost_one(error):
                lost = PeerLost(self.worker, self.worker, f"another of its members is gone: {error}")
                self.carrier.fail(self._describe(lost))
                raise lost from error
            if isinstance(error, Stalled) and self.roll_call is not None:
                error.args = ("\n".join(filter(None, [str(error), self.roll_call()])),)
            known = error.cause if isinstance(error, PeerLost) else error
            failure = known if isinstance(known, (Disagreement, NotFinite, WorkerFailure)) else self._describe(error)
            self.carrier.fail(failure)
            if self._is_own(error):
                # contextlib takes a RuntimeError caused by a StopIteration for one that the interpreter has made.
                raise failure from None if isinstance(error, StopIteration) else error
            raise

    def _is_own(self, error: BaseException) -> bool:
        """Return whether this worker's work raised; a model may call `sys.exit` too."""
        if isinstance(error, (Disagreement, NotFinite, PeerLost, Stalled, WorkerFailure)):
            return False
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            return False  # the user's, perhaps
        return isinstance(error, Exception) or bool(self.running)

    def _describe(self, error: BaseException) -> WorkerFailure:
        step = self.running_step if self.running else self.step + 1
        error.__traceback__ = leading_to_user(error, _is_ours)
        return WorkerFailure(self.worker, self.running, step, *_told(error), self._place())

    def _place(self) -> str:
        """Return a line on the running action: stage, microbatch, types and shapes of its arguments."""
        if not self.running:
            return ""
        action = Action.parse(self.running)
        index = f", microbatch {action.index}" if action.kind.per_microbatch else ""
        if self.given is None or not (tensors := self.given.tensors):
            return f"stage {action.stage}{index}"
        single = all(tensor.shape[:1] == (1,) for tensor in tensors)  # too few for a batch norm, for instance
        more = ": 1 row; fewer microbatches (num_microbatches) have more" * single
        return f"stage {action.stage}{index}, given {shapes_in(tensors)}{more}"


def _is_ours(file: str) -> bool:
    return _HERE.parent in Path(file).parents or Path(file) in _CALLERS


def _told(error: BaseException) -> tuple[str, str]:
    """Return an error in one line, and its traceback: none for a refusal of this project without foreign frames."""
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, PipeError) and all(_HERE.parent in file.parents for file in files):
        return str(error), ""
    summary = ", ".join(line.strip() for line in traceback.format_exception_only(type(error), error))
    return summary, "".join(traceback.format_exception(error))
