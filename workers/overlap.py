"""A stream of steps that overlap as deep as the schedule asks: no barrier and no drain between them.

    step k      F F F F . . B U B U B U B U
    step k+1            F F F F . . B U B U ...      at most `most_open` steps are open
    step k+2                    F F F F ...

All workers open the same steps before they give the result of one. An update waits for the whole end of the step
before, so when a result is given every worker has the parameters of that step's last update: the caller may evaluate
and save. State that forwards write, such as running means, is shown as it was after the step's forwards, and put back
afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..dependency import Entry, Spec, updates_a_step
from ..dependency.earlier_steps import most_open, period
from .compute.result import Result
from .state import WorkerState
from .step import Context, Offsets, Step, StepInput


class Overlap:
    """Opens the steps of a stream by a schedule that is not synchronous, and chooses between their actions.

    Batches of the same number of microbatches are one stream of the schedule's; one of another number waits until all
    before are complete, and begins another.
    """

    def __init__(self, worker: Context) -> None:
        self._shards = worker.shards
        self._spec: Spec | None = None
        self._most_open, self._period = 1, 0
        #: of the schedule's stream, how many steps it has had
        self._num_begun = 0
        self._next_batch: StepInput | None = None
        self._ended = False
        #: whether no more steps are opened until the open ones are complete: at all, and behind the newest
        self._holds = self._drains = False

    def open_next(
        self, batches: Iterator[StepInput], steps: dict[int, Step],
        begin: Callable[[StepInput, Sequence[WorkerState], int], Step],
    ) -> None:  # fmt: skip
        """Open steps until as many are open as may be.

        Args:
            begin: begins a step after open ones, the newest first, of which as many are open at most.
        """
        self._drains &= bool(steps)
        while not (self._ended or self._holds or self._drains or len(steps) == self._most_open):
            if self._next_batch is None:
                self._next_batch = next(batches, None)
            batch = self._next_batch
            if batch is None:
                self._ended = True
                return
            if not steps:
                self._begin(batch.spec)
            if batch.spec != self._spec:
                return
            self._next_batch, self._drains = None, batch.last
            step = begin(batch, [step.state for step in reversed(steps.values())], self._most_open)
            per_step = batch.spec.num_microbatches, updates_a_step(batch.spec), self._period
            step.offsets = Offsets(*(self._num_begun * each for each in per_step))
            self._num_begun += 1

    def flush(self, complete: Callable[[], Result | None], steps: Mapping[int, Step], to: deque[Result]) -> None:
        """Complete the steps that are open, and put their results in a queue, from which they are given next."""
        self._holds, results = True, list[Result]()
        try:
            while steps:
                result = complete()
                assert result is not None, "there are steps"
                results.append(result)
        finally:
            self._holds = False
            to.extend(results)

    def abandon(self) -> None:
        """Forget versions for microbatches that will not arrive, where no step is open that is undone."""
        for shard in self._shards.values():
            shard.abandon()

    def _begin(self, spec: Spec) -> None:
        """Begin a stream of `spec`: version 0 is the present parameters."""
        self._spec, self._num_begun = spec, 0
        self._most_open, self._period = most_open(spec), period(spec)
        for (stage, route), shard in self._shards.items():
            first = self._shards[stage, route - route % spec.num_separate]
            assert shard.versions is not None and first.versions is not None
            shard.versions.begin(spec, route, first.versions)

    def choose(self, steps: Mapping[int, Step]) -> tuple[Step, Entry] | None:
        """Return the first in the order of slots of all open steps that may run now, or is the next, if it may."""
        first, least = None, 0
        for step in steps.values():
            slot = step.state.next_slot
            if slot is not None and (first is None or slot + step.offsets.slot < least):
                first, least = step, slot + step.offsets.slot
        entry = None if first is None else first.state.take()
        return None if first is None or entry is None else (first, entry)
