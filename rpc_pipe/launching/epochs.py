"""Epochs of an elastic job: the launcher sees processes end, and decides which take part. Loads without torch.

launcher ──"e" and a line of JSON──> worker     another epoch begins: its number and the workers without which
launcher ──"p"──> worker                        rest with all workers after a step, until another epoch begins
launcher <──"ready"── worker                    from here on it can continue without dead workers; its stages
launcher <──"caught up"── newcomer              it has made the calls of the script so far, and can take part
launcher <──"evicted"── worker                  it was sent SIGTERM, and leaves when all rest
launcher <──"cut"── worker                      it has lost the connection to a worker, and no epoch begins
launcher <──"rests"── worker                    it has reached the end of the step
launcher <──"shape"── worker                    the same one: the new stages and replicas
launcher <──"resumed"── worker                  the lowest live one: the workers continue
launcher <──"left"── worker                     it needs no other worker more
launcher <──"word"── worker                     a record for all workers of several hosts, such as an address
launcher ──"w" and a line of JSON──> worker     the record
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..dependency import EpochEnds, PipeError
from . import STOP
from .shape_changes import ShapeChanges

if TYPE_CHECKING:
    from .hosts import RemoteWorker
    from .worker_process import WorkerProcess

#: why a worker leaves on request
_SIGTERM = "SIGTERM"
#: orders of the launcher: another epoch begins, with a line of JSON; all workers rest after a step; a record follows
EPOCH, REST, WORD = b"e", b"p", b"w"
#: messages of a worker
READY, CAUGHT_UP, EVICTED, RESTS, RESUMED, LEFT = "ready", "caught up", "evicted", "rests", "resumed", "left"
LEAVES_WORD, CUT, SHAPE = "word", "cut", "shape"
#: most newcomers in a row that die early; steps that count as early. Each starts after twice the pause of the last one
_MOST_SHORT, _SHORT_STEPS = 5, 2
#: seconds that the launcher may take to see the end of a process, which breaks connections at once
_WORD_S = 10.0


class Roster(NamedTuple):
    """The workers of an epoch, a period with a fixed roster; the first epoch is 0 and has all workers."""

    number: int
    gone: frozenset[int] = frozenset()
    #: whether the workers rest between two steps when it begins, and none of the epoch before has died
    planned: bool = False
    #: number of workers that stages and replicas are chosen for; 0: they stay
    places: int = 0

    def order(self) -> bytes:
        """Return the launcher's line."""
        return EPOCH + json.dumps([self.number, sorted(self.gone), self.planned, self.places]).encode() + b"\n"


# --- in the launcher


class Epochs:
    """The epochs of a job, as its launcher counts them.

    Args:
        workers: the processes of the job.
        tell: function that shows the user a line, which may be a warning.
        start: starts a process in the place of a dead one, also in `workers`, and returns whether its host is there;
            None: the job continues without.
    """

    def __init__(
        self,
        num_processes: int,
        workers: Sequence[WorkerProcess | RemoteWorker],
        tell: Callable[[str, bool], None],
        start: Callable[[int], bool] | None = None,
    ) -> None:
        self._num_processes, self._workers, self._tell, self._start = num_processes, workers, tell, start
        self._now = Roster(0)
        #: workers that need no other worker more, or have ended
        self._left: set[int] = set()
        #: workers that have ended by an error, or are about to be killed
        self._ended: set[int] = set()
        #: newcomers that do not take part yet, and the newcomers that could
        self._newcomers: set[int] = set()
        self._caught_up: set[int] = set()
        #: workers that rest, workers that leave and why, and the time since the last step
        self._resting: set[int] = set()
        self._evicted: dict[int, str] = {}
        self._since = 0.0
        self._shapes = ShapeChanges(num_processes)
        #: the stages of each worker
        self._stages: dict[int, list[int]] = {}
        #: by place: the step before which its newcomer joined; number of early deaths in a row; start of the next one
        self._came: dict[int, int] = {}
        self._short: dict[int, int] = {}
        self._later: dict[int, float] = {}
        #: workers that have joined, or died, since the workers continued last
        self._back: set[int] = set()
        self._died: set[int] = set()
        #: a line on each epoch, the cause of the present one first
        self._history: list[str] = []
        self._cause = ""

    @property
    def summary(self) -> str:
        """Lines on the epochs after the first, and on newcomers that were too late; "" if there are none."""
        late = [f"the newcomer for worker {rank} had not taken part when the job ended" for rank in self._newcomers]
        return "\n".join([*self._history, *sorted(late)])

    @property
    def vacant(self) -> list[int]:
        """The workers without a process; processes may be started in their places."""
        return sorted(self._now.gone - self._newcomers)

    def comes(self, rank: int) -> None:
        """Note that a process has been started in the place of a worker."""
        self._newcomers.add(rank)
        self._tell(f"a newcomer for worker {rank} has started, and takes part when it has what it needs", False)

    def takes(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Take a message of a worker; return whether it is none for the rest of the launcher."""
        kind = message["kind"]
        if kind == RESUMED:
            self._resumes(message["step"])
        elif kind == SHAPE:
            self._cause += f": {message['text']}"
            self._shapes.changed(message["live"], message["placed"])
            self._tell(f"epoch {self._now.number}: {self._cause}", False)
        elif kind == READY:
            self._stages[rank], self._shapes.places = message["stages"], message.get("places", [])
            return False
        elif kind == LEFT:
            self._leaves(rank)
        elif kind == RESTS:
            self._rests(rank, message["goes"])
        elif kind == EVICTED:
            self._evicted[rank] = _SIGTERM
            self._order_rest()
        elif kind == LEAVES_WORD:
            for worker in self._workers:
                worker.order(WORD + json.dumps([message["name"], message["word"]]).encode() + b"\n")
        elif kind == CUT:
            self._part({rank, message["peer"]})
        elif kind == CAUGHT_UP:
            self._caught_up.add(rank)
            if self._coming():
                self._order_rest()
        elif rank in self._newcomers and kind in ("failure", "wrong input"):
            self._tell(f"worker {rank}, a newcomer, fails: {message['text'].strip().splitlines()[-1]}", True)
        else:
            return rank in self._newcomers and "text" not in message
        return True

    def survives(self, ranks: Collection[int], code: int, come: Mapping[int, str], what: str = "") -> bool:
        """Let the other workers continue without workers that have ended with `code`; return whether they can.

        Args:
            what: the subject that has ended, if it is more than a worker.
        """
        dead = {rank for rank in ranks if not self._goes(rank)}
        self._ended |= dead
        self._died |= dead
        # A worker that raises has failed; one that a signal kills has not.
        if not dead or code >= 0 or list(come.values()) != [READY] * self._num_processes:
            return not dead
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        self._evicted = {rank: why for rank, why in self._evicted.items() if rank not in dead}
        self._cause = what or f"worker {min(dead)} is gone ({name})"
        self._since = time.monotonic()
        for worker in self._workers:
            if worker.rank in dead:
                worker.kill()  # with all that it has started
        self._begin(self._now.gone | dead, planned=False)
        for rank in dead:
            self._replace(rank)
        return True

    def _goes(self, rank: int) -> bool:
        """Note the end of a worker's process; return whether no other worker needs it."""
        if rank in self._newcomers:
            self._newcomers.remove(rank)
            self._caught_up.discard(rank)
        elif rank in self._now.gone:  # it was evicted
            self._replace(rank)
        elif rank in self._left or len(self._left | self._now.gone | {rank}) == self._num_processes:
            self._leaves(rank)
        else:
            return False
        return True

    def _begin(self, gone: frozenset[int], planned: bool, places: int = 0) -> None:
        """Begin the epoch without `gone`; a live worker that leaves now gets the order, too."""
        told, before = gone & self._now.gone, self._now
        self._now = Roster(before.number + 1, gone, planned, places)
        self._resting.clear()
        dies = {each for each in gone - before.gone if self._evicted.get(each, _SIGTERM) == _SIGTERM}
        self._shapes.begins(dies, gone, planned, places)
        self._stages = {} if places else self._stages
        without = f" without {sorted(gone)}" if gone else ""
        self._tell(f"{self._cause}: epoch {self._now.number}{without}", not planned)
        for worker in self._workers:
            if worker.rank not in told:
                worker.order(self._now.order())

    def _part(self, pair: set[int]) -> None:
        """Kill one of two workers without a connection to each other, if both live."""
        for rank in sorted(pair, reverse=True) if pair.isdisjoint(self._now.gone | self._left | self._ended) else ():
            if not self._loses_a_stage(self._now.gone | {rank}):
                self._ended.add(rank)
                self._tell(f"workers {sorted(pair)} live without a connection: worker {rank} is killed", True)
                return next(worker for worker in self._workers if worker.rank == rank).kill()

    def _replace(self, rank: int) -> None:
        """Start a newcomer in the place of a worker, later if the last ones have died soon."""
        if short := self._short.get(rank, 0):
            self._later[rank] = time.monotonic() + 2**short
        elif self._start is not None and self._start(rank):
            self.comes(rank)

    def _start_late(self, rank: int) -> None:
        """Start a newcomer after a pause, unless too many have died soon."""
        if self._short[rank] >= _MOST_SHORT:
            said = f"{self._short[rank]} newcomers for worker {rank} have died within {_SHORT_STEPS} steps"
            self._tell(f"{said}: its place stays empty", True)
        elif len(self._left | self._now.gone) < self._num_processes and self._start is not None and self._start(rank):
            self.comes(rank)

    def _order_rest(self) -> None:
        for worker in self._workers:
            if worker.rank not in self._now.gone:
                worker.order(REST)

    def tick(self) -> None:
        """Let all rest for another shape where workers have been missing for long."""
        if self._shapes.falls_due(self._now.gone):
            self._order_rest()
        for rank in [rank for rank, at in self._later.items() if time.monotonic() > at]:
            del self._later[rank]
            self._start_late(rank)

    def _coming(self) -> set[int]:
        """Return the newcomers that could take part now."""
        return self._shapes.useful(self._caught_up & self._newcomers, self._now.gone)

    def _rests(self, rank: int, goes: str) -> None:
        """A worker rests; when all do, the next epoch begins.

        Args:
            goes: why it leaves then; "": it stays.
        """
        self._since = time.monotonic() if not self._resting else self._since
        self._resting.add(rank)
        self._evicted |= {rank: goes} if goes else {}
        if len(self._resting | self._now.gone) < self._num_processes:
            return
        comes, goes_now = self._coming(), {each for each in self._evicted if each not in self._now.gone}
        lines = [f"worker {each} is back" for each in sorted(comes)]
        waits: dict[int, str] = {}
        if self._loses_a_stage(self._now.gone | goes_now):  # newcomers have no state yet
            lines += [f"worker {each} is to go (SIGTERM)" for each in sorted(goes_now)]
            if self._loses_a_stage((self._now.gone - comes) | goes_now):
                lines.append("a stage would have no worker, so all stop after a step")
                for worker in self._workers:
                    worker.order(STOP)
            else:
                waits = {each: self._evicted[each] for each in goes_now}
            goes_now = set()
        gone = (self._now.gone - comes) | goes_now
        places, why = self._shapes.chosen(comes, gone)
        leave = [f"worker {each} goes ({self._evicted[each]})" for each in sorted(goes_now)]
        self._cause = ", ".join(lines + why + leave)
        self._newcomers -= comes
        self._back |= comes
        self._ended -= comes
        self._caught_up -= comes
        self._begin(gone, planned=True, places=places)
        self._evicted = waits

    def _loses_a_stage(self, gone: Collection[int]) -> bool:
        """Return whether no worker but `gone` has a stage."""
        live = {stage for rank, stages in self._stages.items() if rank not in gone for stage in stages}
        return any(not live.issuperset(stages) for stages in self._stages.values())

    def _resumes(self, step: int) -> None:
        """The workers continue with a step."""
        took, why = f"{time.monotonic() - self._since:.2f} s", "rest" if self._now.planned else "death"
        self._tell(f"epoch {self._now.number}: goes on with step {step}, {took} after the {why}", False)
        how = "no step repeated" if self._now.planned else "what had begun was repeated"
        self._history.append(f"epoch {self._now.number}: {self._cause} after step {step - 1}: {took}, {how}")
        for rank in self._died:
            is_short = step - self._came.pop(rank, -_SHORT_STEPS) < _SHORT_STEPS
            self._short[rank] = self._short.get(rank, 0) + 1 if is_short else 0
        self._came |= dict.fromkeys(self._back - self._died, step)
        self._back, self._died = set(), set()
        if self._coming() or self._evicted or self._shapes.is_due:
            self._order_rest()

    def _leaves(self, rank: int) -> None:
        """A worker has reached the end of its script; when all have, newcomers have no work left."""
        self._left.add(rank)
        if len(self._left | self._now.gone) == self._num_processes:
            for worker in self._workers:
                if worker.rank in self._newcomers:
                    worker.kill()


# --- in a worker


_begun: queue.SimpleQueue[Roster] = queue.SimpleQueue()
_newest = 0
#: records of all workers by name
words: dict[str, str] = {}
word_came = threading.Condition()


def follow(order: bytes, descriptor: int, actors: Iterable[Any]) -> None:
    """Follow an order of the launcher, which ends a worker's wait where another worker has died.

    Called by the thread that reads the launcher's lines.
    """
    global _newest
    if order == REST:
        for actor in actors:
            actor.rest_requested = True
    elif not (line := _line(descriptor)):
        return
    elif order == WORD:
        with word_came:
            words.update([json.loads(line)])
            word_came.notify_all()
    else:
        _newest, gone, planned, places = json.loads(line)
        _begun.put(Roster(_newest, frozenset(gone), planned, places))
        for actor in () if planned else actors:
            actor.carrier.fault(EpochEnds(f"epoch {_newest} begins without workers {gone}"))


def _line(descriptor: int) -> bytes:
    """Return the launcher's next line; an empty one if the launcher has ended."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(descriptor, 1)):
            return b""
        line += more
    return line


def has_begun() -> bool:
    """Return whether the launcher has begun an epoch that this process does not know of."""
    return not _begun.empty()


def next_epoch(error: PipeError, timeout_s: float = _WORD_S) -> Roster:
    """Return the newest epoch that the launcher has begun; wait for it.

    Raises:
        PipeError: `error`, if the launcher begins none: then no process has ended.
    """
    try:
        found = _begun.get(timeout=timeout_s)
        while not _begun.empty():
            found = _begun.get()
    except queue.Empty:
        raise error from None
    return found


def refuse_old(number: int) -> None:
    """Raise EpochEnds if the launcher has begun another epoch than `number`."""
    if _newest > number:
        raise EpochEnds(f"epoch {number} ends before its workers have met")
