"""Training continues without workers that die (`rpc-pipe run --elastic`), with the bits of the undisturbed run.

    death ── launcher: epoch n without w ──> survivors: meet again ── report complete steps ── take over ── repeat

`T` of a step exists only when every worker holds all that its updates need, and no update runs before it. So if no live
worker knows `T`, none has updated, and the step is undone and repeated; if one knows it, all complete their updates.
Newcomers join, and evicted workers leave, between two steps: all rest after the same one, and none is repeated.
Any other call (an evaluation, a gather) returns when all workers have made it. So a call that one worker has not made
is made once more by all, where each worker stands in its script.

If a replica dies with gradients of steps since the last update, workers compute all of them again.
"""

import signal
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..boards.own_boards import renew
from ..checkpoints.newcomer import Journal, Repetition
from ..dependency import EpochEnds, PeerLost, PipeError, StageLost, Stalled, ends_epoch
from ..launching import epochs
from ..launching import launcher_link as link
from ..launching.ending import heed
from ..launching.job import Job
from ..launching.meeting_place import drop, join, place_of, root_of
from ..model.batches.microbatches import Microbatches
from ..model.shard_maker import ShardMaker
from ..session import Session
from ..system.at_exit import at_exit
from ..workers.actor import WorkerActor
from ..workers.compute.result import Result
from ..workers.step import StepInput
from ..workers.surviving import completed
from .heir import Heir, Shapes


class Accumulated:
    """The batches of the steps since the last update.

    Args:
        updates: returns whether a step, counted from 0, ends with an update.
    """

    def __init__(self, updates: Callable[[int], bool]) -> None:
        self._updates = updates
        self._batches: dict[int, Microbatches] = {}

    def first(self, step: int) -> int:
        """Return the first step since the last update, when `step` steps are complete."""
        while step and not self._updates(step - 1):
            step -= 1
        return step

    def begin(self, step: int, batch: Microbatches) -> None:
        """Keep the batch of a step that begins."""
        first = self.first(step)
        self._batches = {number: kept for number, kept in self._batches.items() if number >= first} | {step: batch}

    def compute(self, actor: WorkerActor, make: Callable[[Microbatches], StepInput]) -> None:
        """Compute the gradients of complete steps since the last update once more; all workers do.

        Args:
            make: makes the input of the worker's next step.

        Raises:
            StageLost: a batch is not there any more.
        """
        step = actor.step
        first = self.first(step)
        for number in range(first, step):
            batch = self._batches.get(number)
            if batch is None or (batch.now is not None and batch.now() != batch.described):
                raise StageLost(f"step {number + 1}: its gradients have died, and its batch is gone; use a checkpoint")
        for shard in actor.shards.values() if first < step else ():
            shard.updating.held, shard.updating.weight = {}, 0.0
            shard.go_on_at(first, shard.updating.count)
            shard.abandon()
        actor.step = actor.next_step = first
        try:
            for number in range(first, step):
                actor.run(make(self._batches[number]))
        except PipeError:
            actor.abandon_broken()
            raise
        finally:
            actor.step = actor.next_step = step


R = TypeVar("R")


def _next_epoch(error: PipeError) -> epochs.Roster:
    """Return the next epoch, or ask for one: a connection has broken, and no process has ended."""
    try:
        return epochs.next_epoch(error)
    except PeerLost as lost:
        link.tell(kind=epochs.CUT, peer=lost.peer)
        return epochs.next_epoch(error)


def _heed_eviction() -> None:
    """Let this worker leave after the step when it is sent SIGTERM."""

    def tell(number: int) -> None:
        threading.Thread(target=link.tell, kwargs={"kind": epochs.EVICTED}, daemon=True).start()  # it has a lock

    heed({signal.SIGTERM: signal.SIG_DFL}, tell)


class Recovery:
    """Makes the calls of a process's worker, and lets it continue in another epoch where a worker has died.

    Args:
        session: with shards that have been made.
        maker: that has made them.

    Attributes:
        accumulated: the batches of the steps since the last update.
        journal: of the results of calls; None: no newcomer joins.

    Raises:
        ConfigError: replicas of the model differ.
    """

    def __init__(self, job: Job, session: Session, maker: ShardMaker) -> None:
        self._session, self._actor = session, session.actors[0]
        self._heir = Heir(session, maker)
        if job.shapes is not None:
            self._heir.shapes = Shapes(self._heir, job.shapes, session)
        self._root, self._place = root_of(job), place_of(job)
        self.accumulated = Accumulated(session.end.updates)
        #: calls since the last complete training step: made here, and known to be made by all workers
        self._made = self._ended = 0
        #: whether all workers have made the call under way, by the reports after a death
        self._all_made = False
        #: the facts of that step's result, and the epoch when it came
        self._known: Any = None
        self._noted_in = -1
        self._told_caught_up = self._is_gone = False
        self.journal = Journal(self._root.folder()) if job.newcomer or job.rejoins or not job.one_host else None
        actor = self._actor
        actor.elastic = actor.recovers = actor.keeps_broken = True
        at_exit(self._leave)
        if job.newcomer and self.journal is not None:
            session.results.repetition = Repetition(self.journal, self._take_part, self._look)
            session.process = actor.worker or -1  # a newcomer does not log again
            return
        self._heir.tell_ready()
        _heed_eviction()

    def begin(self) -> None:
        """Wait until all workers are ready; a death meanwhile finds the pipeline made, with the options of its script.

        And a peer without a message would count as one that has left.
        """
        if not self.repeats:
            self.call(lambda actor: actor.exchange("elastic", None))

    @property
    def repeats(self) -> bool:
        """Whether this process is a newcomer that does not take part yet."""
        repetition = self._session.results.repetition
        return repetition is not None and repetition.goes_on

    def call(self, call: Callable[[WorkerActor], R], *, trains: bool = False) -> R:
        """Return the result of `call` on the worker, which makes it again where a worker has died meanwhile.

        Args:
            trains: whether it is a training step, or the next one of a stream, and gives its result.
        """
        while True:
            if self._is_gone:
                raise SystemExit(0)
            try:
                done: Any = call(self._actor)
                if trains:
                    if done is not None:  # the end of a stream gives none
                        self._note(done)
                    return done  # type: ignore[no-any-return]
                self._made += 1
                self._actor.exchange("made", None)
                self._ended += 1
                return done  # type: ignore[no-any-return]
            except PipeError as error:
                if not ends_epoch(error):
                    raise
                self._all_made = False
                stood = self._go_on(error)
                if trains and stood is not None:
                    return stood  # type: ignore[return-value]
                if self._all_made:
                    return done  # type: ignore[no-any-return]

    def write_down(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Write the values of an evaluation down for newcomers."""
        if self.journal is not None:
            self.journal.write(found)

    def _note(self, result: Result) -> None:
        """Remember a training step that is complete here; other workers may need its result."""
        assert result.loss is not None
        self._known, self._made, self._ended = result.known, 0, 0
        self._session.end.observe_result(result)
        self._noted_in = self._session.epoch
        if self.journal is not None:
            self.journal.write((self._actor.step, result.loss, result.norm))
        self._heir.refuse_changing()

    def _go_on(self, error: PipeError, epoch: epochs.Roster | None = None) -> Result | None:
        """Go on in the next epoch; return the result of the training step under way if it stands, else None."""
        actor, stood = self._actor, None
        while True:
            epoch = epoch or _next_epoch(error)
            try:
                stood = self._complete() or stood
                self._meet(epoch)
                step = -1 if self.repeats else actor.step
                own = step, self._made, self._ended, self._heir.changes, self._known, self._session.facts
                told = actor.exchange("epoch", [*own])
                top, *_, known, facts = max(told, key=lambda each: int(each[0]))
                if top < 0:
                    raise StageLost("no live worker has weights: go on from a checkpoint (--max-restarts does)")
                comes = {who for who, each in zip(sorted(actor.carrier.workers), told, strict=True) if each[0] < 0}
                if actor.worker in comes:
                    self._begin_at(top, known, facts)
                elif step < top:
                    stood = self._complete(known) or stood
                else:
                    # A worker that is behind in training has made no call since.
                    self._settle([(made, ended) if step == top else (0, 0) for step, made, ended, *_ in told])
                self._begin_with(epoch, comes, any(each[3] for each in told))
                return stood
            except PipeError as another:
                if not ends_epoch(another):
                    raise
                error, epoch = another, None

    def _settle(self, told: list[tuple[int, int]]) -> None:
        """Decide whether the call that has been made here was made by all live workers, or is made once more.

        Args:
            told: of each live worker, the number of calls that it has made, and of calls that it knows all have made.
        """
        if self._made > self._ended:
            all_made = max(min(made for made, _ in told), max(ended for _, ended in told))
            self._all_made = self._made <= all_made
            self._made = self._ended = self._made if self._all_made else self._ended

    def _complete(self, known: Any = None) -> Result | None:
        """Complete the training step under way if it stands, and return its result.

        Args:
            known: facts of its result, from another worker; None: as far as this worker knows.
        """
        broken = self._actor.broken
        result = None if broken is None else completed(broken, known)
        if result is not None:
            self._note(result)
        return result

    def _meet(self, epoch: epochs.Roster) -> None:
        """Meet the workers of an epoch, by a new carrier, so that nothing of an old epoch arrives."""
        drop(self._place)
        place = self._root.sub(f"epoch {epoch.number}", self._root.workers - epoch.gone)
        self._actor.begin_epoch(join(place, partial(epochs.refuse_old, epoch.number)))
        self._actor.rest_requested = False  # before workers continue: the launcher then asks once more
        self._place = place

    def _begin_with(self, epoch: epochs.Roster, comes: Collection[int], changes: bool) -> None:
        """Go on with the placement of an epoch, when begun steps are undone; `changes`: forwards change buffers."""
        session, actor, shapes = self._session, self._actor, self._heir.shapes
        if shapes is not None:
            comes = shapes.begin(epoch, comes)
            if shapes.leaving:
                return  # all rest once more
        actor.resume(actor.carrier, actor.step)
        self._heir.take_over(epoch.gone, comes, changes)
        session.epoch = epoch.number
        self.accumulated.compute(actor, lambda batch: session.inputs_now(batch, actor, train=True))
        session.process = 0 if actor.worker == min(session.spec.workers) else actor.worker
        self._heir.refuse_changing()
        renew(epoch.number)
        if session.process == 0:
            link.tell(kind=epochs.RESUMED, step=actor.step + 1)

    # --- joining and leaving between two steps

    def rest(self) -> None:
        """Rest after a step with all workers, until the launcher begins another epoch."""
        if self.accumulated.first(self._actor.step) >= self._actor.step:  # else a newcomer would lack gradients
            if self._session.epoch == self._noted_in:
                self._session.settle()
            if self._session.epoch == self._noted_in:  # else a worker has died since the step
                self._rest("")
        self._part()

    def _part(self) -> None:
        """Rest until workers without a place have gone."""
        while self._heir.shapes is not None and (leaving := self._heir.shapes.leaving):
            self._rest("it has no place" if self._actor.worker in leaving else "")

    def _rest(self, goes: str) -> None:
        """Rest; `goes`: why this worker takes no part afterwards, if the launcher agrees."""
        self._made = self._ended = 0
        link.tell(kind=epochs.RESTS, goes=goes)
        late = Stalled(f"worker {self._actor.worker} rests after step {self._actor.step}, and another one does not")
        epoch = epochs.next_epoch(late, self._actor.stall_s)  # until then peers may need payloads of this worker
        if self._actor.worker in epoch.gone:
            drop(self._place)
            self._is_gone, self._session.process = True, -1
            raise SystemExit(0)
        self._go_on(late, epoch)

    def _take_part(self) -> bool:
        """Take part if the launcher has begun an epoch with this newcomer; return whether it does."""
        if not self._told_caught_up:
            self._told_caught_up = True
            link.tell(kind=epochs.CAUGHT_UP)
        if not epochs.has_begun() or (self.journal is not None and self.journal.read() is not None):
            return False
        self._made = self._ended = 0
        self._go_on(EpochEnds("a newcomer comes"))
        _heed_eviction()
        self._part()
        return True

    def _begin_at(self, step: int, known: tuple[Any, ...], facts: dict[str, Any]) -> None:
        """Begin after a step that other workers have made."""
        parts, norm, finite = known
        result = Result(parts, {})
        result.norm_tensor, result.finite_tensor = norm, finite
        self._known, self._session.results.stopped = known, result.stop
        self._session.facts.update(facts)
        self._session.end.observe_result(result)
        self._actor.go_on_at(step, 0)

    def _look(self) -> None:
        """End a newcomer that is asked to stop before it takes part."""
        if self._actor.stop_requested:
            raise SystemExit(0)

    def _leave(self) -> None:
        """Leave when all workers have reached the end of their scripts, and so have all that they need of this one."""
        if self._is_gone or self.repeats:
            return
        with suppress(PipeError):  # which is known already, or a consequence of it
            if not self._actor.carrier.broken:
                self.call(lambda actor: actor.exchange("end", None))
                link.tell(kind=epochs.LEFT)
