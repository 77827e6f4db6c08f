"""A simulation of streams: all workers at once, moment by moment, and repetitions only once.

The same decisions as `simulator`'s, over arrays. At each moment the actions that end then are counted, and every idle
worker chooses among the next actions of its streams. If all workers are as some moments before, but for the same growth
of every count, the moments between must repeat until a piece of a stream ends or a waiting action may begin. These
repetitions are added at once. Loads without torch.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..dependency import RESOURCES, ScheduleError
from ..dependency.streams import Streams
from .simulator import Outcome, in_time
from .span import ticks
from .stream_tables import NEVER, Tables

Array = Any


@dataclass(frozen=True)
class Priced(Outcome):
    """A simulated run without its actions."""

    peak_activations: tuple[float, ...]
    #: payloads between workers in a step
    messages: int
    num_actions: int
    #: (source, target) of workers that send to each other
    ways: frozenset[tuple[int, int]]
    #: time that was not simulated moment by moment: repetitions that were added as a multiple
    repeated: float


def run(streams: Streams, latencies: Iterable[float], latency: Callable[[int, int], float]) -> Priced:
    """Return the figures of a run.

    Args:
        latencies: all that there are.
        latency: from one worker to another.

    Raises:
        ScheduleError: the run cannot finish.
    """
    times = {*latencies, *(piece.cost for stream in streams.streams for piece in stream.pieces)}
    found = ticks(times)
    # If times are rounded, nothing can be known to repeat.
    scale, exact = found or (1, {time: time for time in times})
    tables = Tables(streams, exact, lambda source, target: exact[latency(source, target)])
    moments = _Moments(tables, found is not None)
    moments.run()
    return moments.figures(scale)


#: an earlier moment is compared with until these shares of all moments are past
_SHARES = 64, 8, 2
#: attributes that describe an earlier moment
_KEPT = "running", "until", "counts", "issued", "state", "piece", "live"


class _Moments:
    """The state of a run."""

    def __init__(self, tables: Tables, exact: bool) -> None:
        self._t, self._exact = tables, exact
        # One lane more than there are stands for none; it is always busy.
        lanes, needs, number = tables.lanes, tables.columns, np.int64 if exact else np.float64
        size = lanes * tables.width
        self.now: Any = number(0)
        self.counts: Array = np.zeros(tables.num_counts + 1, np.int64)
        self.counts[tables.always] = NEVER
        self.source = tables.source
        #: the needed counts, the slot, and the number of actions left of the piece, each of all streams; their growth
        self.rows, self.growing = np.zeros((2, size, needs + 2), np.int64)
        self.state, self.grows = self.rows.T, self.growing.T
        #: whole rows as one value each: these are written five times as fast
        self.records: Array = self.rows.view(np.dtype((np.void, self.rows[0].nbytes))).ravel()
        self.threshold, self.slot, self.left = self.state[:-2], self.state[-2], self.state[-1]
        self.flat: Array = self.rows.reshape(-1)
        #: the stream of each of these, and the lane of a stream: tables are faster than divisions
        self._place, self._lane = np.arange(self.flat.size) // (needs + 2), np.arange(size) % lanes
        self.loaded: Array
        self.loaded, self.piece = np.zeros((2, size), np.int64)
        #: by stream: how many of these counts are too small
        self.unmet: Array = np.ones(size, np.int64)
        self.cost: Array = np.zeros(size, number)
        #: the slots among which an idle worker chooses the least; their last digits say which stream of the lane
        self.flat_keys: Array = np.full(size, NEVER)
        self.keys: Array = self.flat_keys.reshape(tables.width, lanes)
        self.holds: Array = np.array([s.last.kind.keeps * s.size if s else 0 for s in tables.stream])
        self.named = np.array([bool(s) and s.last.kind.per_microbatch for s in tables.stream])
        #: by lane: the stream that runs or ran last, and the end of its action; NEVER: the lane is idle
        self.running, self.until = np.full(lanes, -1), np.full(lanes, NEVER, number)
        #: how many actions began at this moment
        self.begun = 0
        self.touched: Array = np.ones(lanes, bool)
        self.first, self.last = np.full(lanes, NEVER, number), np.zeros(lanes, number)
        self.live, self.high, self.peak = np.zeros((3, lanes), np.int64)
        self.ends = np.zeros(tables.streams.steps + 1, number)  # the last is of no step
        self.queues: list[deque[tuple[Any, Array]]] = [deque() for _ in tables.channels]
        takes_time = [any(tables.costs[piece.cost] for piece, _ in own) for own in tables.pieces]
        self.unbegun = int((takes_time | self.named).reshape(self.keys.shape).any(0).sum())
        self.repeated: Any = 0
        self._load(np.arange(size))
        self._look(np.arange(size), self.state)

    @property
    def issued(self) -> Array:
        return self.loaded - self.left

    def _load(self, streams: Array) -> None:
        """Begin the next pieces of streams; behind the last nothing is chosen."""
        at = self._t.begin[streams] + self.piece[streams]
        rows = self.rows[streams] = self._t.rows[at]
        self.growing[streams], self.cost[streams] = self._t.growing[at], self._t.cost[at]
        self.loaded[streams] += rows[:, -1]
        self.piece[streams] += rows[:, -1] > 0

    def _look(self, streams: Array, state: Array) -> None:
        """Note of streams in this state whether they have all that their next actions need."""
        short = self.counts.take(self.source.take(streams, 1)) < state[:-2]
        self.unmet[streams] = unmet = short.sum(0)
        self.flat_keys[streams] = state[-2] if self._t.streams.fixed else np.where(unmet, NEVER, state[-2])

    def run(self) -> None:
        moment = 0
        befores: list[tuple[int, SimpleNamespace]] = []
        while True:
            self._begin()
            if self._exact:
                befores = self._compared(befores, moment)
            moment += 1
            soon = self.until.min(initial=NEVER)
            for queue in self.queues:
                if queue and queue[0][0] < soon:
                    soon = queue[0][0]
            if soon == NEVER:
                break
            self.now = soon
            self._finish()
        left = sum(s.count for s in self._t.stream if s) - int(self.issued.sum())
        if left:
            raise ScheduleError(f"deadlock: {left} actions cannot run; `dependency.check_all` says why")

    def _compared(self, befores: list[tuple[int, SimpleNamespace]], moment: int) -> list[tuple[int, SimpleNamespace]]:
        """Add the repetitions since one of two earlier moments; return the moments to compare with next."""
        mark = self._mark()
        for _, before in befores:
            alike = mark == before.mark and np.array_equal(self.running, before.running)
            if alike and (times := self._repeats(before)) > 0:
                self._repeat(before, times)
                befores = []
        if not befores:
            return [(moment, self._note())] * len(_SHARES)
        return [
            (moment + max(32, moment // share), self._note()) if until <= moment else (until, before)
            for share, (until, before) in zip(_SHARES, befores, strict=True)
        ]

    def _begin(self) -> None:
        """Let idle workers choose."""
        t = self._t
        self.begun = 0
        lanes = (self.touched & (self.until == NEVER)).nonzero()[0]
        if not lanes.size:
            return
        self.touched[lanes] = False
        chosen = (self.keys.take(lanes, 1).min(0) & (t.digits - 1)) * t.lanes + lanes
        if (unmet := self.unmet.take(chosen)).any():
            lanes, chosen = lanes.compress(unmet == 0), chosen.compress(unmet == 0)
        if not lanes.size:
            return
        self.begun = lanes.size
        cost = self.cost.take(chosen)
        end = self.now + cost
        self.running[lanes], self.until[lanes] = chosen, end
        if self.unbegun:
            begun = lanes[(cost > 0) | self.named.take(chosen)]
            begun = begun[self.first.take(begun) == NEVER]
            self.first[begun] = self.now
            self.unbegun -= begun.size
        # Activations held from the begin of an action, or until its end, count at the begin: the lane is busy between.
        live = self.live[lanes] = self.live.take(lanes) + self.holds.take(chosen)
        self.high[lanes] = np.maximum(self.high.take(lanes), live)
        rows: Array = self.rows.take(chosen, 0) + self.growing.take(chosen, 0)
        self.records.put(chosen, rows.view(self.records.dtype).ravel())
        if not rows[:, -1].all():
            ended = rows[:, -1] == 0
            self._end_pieces(lanes[ended], chosen[ended], end[ended])
            rows = self.rows.take(chosen, 0)
        self._look(chosen, np.ascontiguousarray(rows.T))

    def _end_pieces(self, lanes: Array, streams: Array, end: Array) -> None:
        """Go on with the next pieces, as the last action of each begins."""
        np.maximum.at(self.ends, self._t.step[self._t.begin[streams] + self.piece[streams] - 1], end)
        lanes, end = lanes[end > self.now], end[end > self.now]
        self.last[lanes] = np.maximum(self.last[lanes], end)
        self._load(streams)

    def _finish(self) -> None:
        """Count the actions and payloads that end now."""
        lanes = (self.until == self.now).nonzero()[0]
        if lanes.size:
            ended = self.running.take(lanes)
            self.until[lanes], self.touched[lanes] = NEVER, True
            self._count(ended)
        for queue, (time, channels) in zip(self.queues, self._t.channels, strict=True):
            if lanes.size:
                sent = channels.take(ended, 1).ravel()
                queue.append((self.now + time, sent[sent < self._t.num_counts]))
            while queue and queue[0][0] == self.now:
                self._count(queue.popleft()[1])

    def _count(self, counts: Array) -> None:
        """Add 1 to these counts, and note which needs are met so."""
        grown = self.counts[counts] = self.counts.take(counts) + 1
        needs = self._t.needed.take(counts, 1)
        streams = self._place.take(needs.compress((self.flat.take(needs) == grown).ravel()))
        np.subtract.at(self.unmet, streams, 1)
        ready = streams.compress(self.unmet.take(streams) == 0)
        self.flat_keys[ready] = self.slot[ready]  # `take` would copy all slots first
        self.touched[self._lane.take(ready)] = True

    # --- the repeated period

    def _mark(self) -> tuple[int, int]:
        """Return numbers that are equal if moments are alike."""
        return self.begun, int(self.running.sum())

    def _note(self) -> SimpleNamespace:
        self.peak, self.high = np.maximum(self.peak, self.high), self.live.copy()
        kept = {name: getattr(self, name).copy() for name in _KEPT}
        return SimpleNamespace(now=self.now, mark=self._mark(), on_the_way=self._on_the_way(), **kept)

    def _on_the_way(self) -> list[tuple[Any, bytes]]:
        return [(time - self.now, sent.tobytes()) for queue in self.queues for time, sent in queue]

    def _repeats(self, before: SimpleNamespace) -> int:
        """Return how often the moments since `before` repeat, at least."""
        took, busy = self.now - before.now, self.until < NEVER
        grown = self.issued - before.issued
        moving = np.flatnonzero(grown)
        # A stream in another piece than before must have the same number left as then.
        left = before.state[-1] - grown * (self.piece == before.piece)
        same = np.array_equal(busy, before.until < NEVER) and np.array_equal(self.left[moving], left[moving])
        same = same and bool((self.until[busy] - before.until[busy] == took).all())
        if not moving.size or not same or self._on_the_way() != before.on_the_way:
            return 0
        counted = self.counts - before.counts
        # A need has grown as its waiting action has; else it is met in time, always.
        used = (self.threshold - before.state[:-2])[:, moving]
        source = self.source[:, moving]
        gained = counted[source] - used
        room = before.counts[source] - before.state[:-2, moving] - used
        if (room[gained > 0] < 0).any():
            return 0
        most = self._until_others(before, grown, counted)
        if (gained < 0).any():
            most = min(most, (room[gained < 0] // -gained[gained < 0]).min())
        for place in moving.tolist() if most > 0 else ():
            most = min(most, self._alike(place, before, grown[place], counted))
        return int(most)

    def _alike(self, place: int, before: SimpleNamespace, grown: Any, counted: Array) -> Any:
        """Return how often a stream repeats its part since `before`, by its pieces."""
        pieces, now, then = self._t.pieces[place], int(self.piece[place]), int(before.piece[place])
        if now == then:
            return (self.left[place] - 1) // grown
        shift, rest = (self.slot[place] - before.state[-2, place]) // self._t.digits, 0
        gained = counted[self.source[:, place]].tolist()
        for (piece, needs), (earlier, needed) in zip(pieces[now - 1 :], pieces[then - 1 :], strict=False):
            same = earlier._replace(slot=earlier.slot + shift, needs=piece.needs) == piece
            if not same or [(at, wanted + gained[at], grows) for at, wanted, grows in needed] != needs:
                break
            rest += piece.number if rest else int(self.left[place])
        return (rest - 1) // grown

    def _until_others(self, before: SimpleNamespace, grown: Array, counted: Array) -> Any:
        """Return for how many repetitions no stream that stands still may begin, and lanes choose as before."""
        shape = self.keys.shape
        slot, moves = self.slot.reshape(shape), (grown > 0).reshape(shape)
        by = (self.slot - before.state[-2]).reshape(shape)
        most, least, goes = np.where(moves, by, -1).max(0), np.where(moves, by, NEVER).min(0), moves.any(0)
        if (most != least)[goes].any():
            return 0
        # Until a need is met that is not met yet.
        missing, grows = self.threshold - self.counts[self.source] - 1, counted[self.source]
        waits = np.where(missing < 0, -1, np.where(grows > 0, missing // np.maximum(grows, 1), NEVER)).max(0)
        # Until the slots of the moving streams have grown to its slot.
        latest = np.where(moves, slot, -1).max(0)
        rest, overtaken = waits.reshape(shape), np.where(goes, (slot - latest - 1) // np.maximum(most, 1), -1)
        if self._t.streams.fixed:
            rest = np.where(goes, overtaken, np.where(slot == slot.min(0), rest, NEVER))
        else:
            rest = np.maximum(rest, overtaken)
        return np.where(~moves & (slot < NEVER), rest, NEVER).min()

    def _repeat(self, before: SimpleNamespace, times: int) -> None:
        """Add the repetition `times` times."""
        shift, live = times * (self.now - before.now), self.live - before.live
        pieces, state = self.piece - before.piece, self.state - before.state
        same = pieces == 0
        self.counts += times * (self.counts - before.counts)
        self.left[same] += times * state[-1, same]
        self.state[:-1] += times * state[:-1]
        for place in np.flatnonzero(pieces).tolist():
            first = int(self.piece[place])
            self.piece[place] += times * pieces[place]
            counts = [piece.number for piece, _ in self._t.pieces[place][first : int(self.piece[place])]]
            self.loaded[place] += sum(counts)
        self.until[self.until < NEVER] += shift
        self.now += shift
        self.repeated += shift
        self.queues = [deque((time + shift, sent) for time, sent in queue) for queue in self.queues]
        self.live += times * live
        self.high += times * np.maximum(live, 0)
        self._look(np.arange(self.slot.size), self.state)

    def figures(self, scale: int) -> Priced:
        t, streams = self._t, self._t.streams
        busy: list[Any] = [0] * streams.spec.num_workers
        for stream in t.stream:
            if stream and stream.last.kind.resource == RESOURCES[0]:
                busy[stream.worker] += sum(piece.number * t.costs[piece.cost] for piece in stream.pieces)
        first: dict[int, Any] = {}
        last: dict[int, Any] = {}
        peaks = [0] * streams.spec.num_workers
        held = np.maximum(self.peak, self.high).tolist()
        for worker, begin, end, most in zip(t.lane_worker, self.first.tolist(), self.last.tolist(), held, strict=False):
            first[worker] = min(first.get(worker, begin), begin)
            last[worker] = max(last.get(worker, end), end)
            peaks[worker] = max(peaks[worker], most)
        span = max((end - first[worker] for worker, end in last.items() if end), default=0)
        makespan, span, repeated = in_time([self.last.max().item(), span, int(self.repeated)], scale)
        return Priced(
            streams.spec, "fixed" if streams.fixed else "ready", in_time(busy, scale),
            in_time(self.ends[:-1].tolist(), scale), makespan, span, tuple(most / streams.spec.parts for most in peaks),
            streams.messages, streams.num_actions, streams.ways, repeated,
        )  # fmt: skip
