"""How V-Half and V-Min fill the holes of a repeated building block: all workers at once, slot by slot.

Passes move into earlier holes where the memory allows it, and the holes that stay are squeezed out. Passes are taken
by their slots in the given timetable: the needs of a pass have smaller slots, and a worker does one pass in a slot. So
passes of one slot are independent, and each step below is one of arrays, of all workers that do something then.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

#: the passes of a microbatch on a worker, in order of data flow; weights' gradients come after them
F_DOWN, F_UP, I_UP, I_DOWN, WEIGHTS, IDLE = range(6)
#: behind the passes: the I of a worker in the order of their slots; the k-th W follows the k-th of them
_INPUTS = 5
#: a slot that is not known yet
_FAR = 1 << 30
#: how many slots are looked up at once
_PART = 64

Array = Any


def waiting(inputs: Array, free: Array, number: Any = np.intp) -> Array:
    """Return how many W wait after each slot, if a free slot does one as soon as there is one to do."""
    found: Array = np.cumsum(inputs.astype(np.int8) - free, -1, number)
    return found - np.minimum(np.minimum.accumulate(found, -1), 0)  # a new minimum is a slot without a W to do


class Column(NamedTuple):
    """The passes in a slot, in order of passes."""

    slot: int
    #: how many forwards there are, and how many passes before W
    forwards: int
    before: int
    #: by pass: its place in `Times.flat`, the places of its needs, its worker
    places: Array
    needs: Array
    workers: Array


class Times:
    """The slot of each microbatch's pass, by pass, worker and number.

    Workers and numbers have a border of -1, so each pass finds its needs at fixed distances.
    """

    def __init__(self, workers: int, count: int) -> None:
        self.workers, self.count = workers, count
        self.of: Array = np.full((_INPUTS + 1, workers + 2, 2 * count + 1), -1, np.int32)
        self.of[:, 1:-1, 1:] = _FAR
        self.flat: Array = self.of.reshape(-1)
        #: distances in `flat` of a worker and a pass
        self.strides = 2 * count + 1, (workers + 2) * (2 * count + 1)

    def _length(self, passes: int) -> int:
        return int(self.of[:passes].max(initial=0, where=self.of[:passes] < _FAR)) + 1

    def rows(self, passes: int) -> Array:
        """Return the pass in each slot of each worker, of the first `passes` passes."""
        rows = np.full((self.workers, self._length(passes)), IDLE, np.uint8)
        for each, slots in enumerate(self.of[:passes, 1:-1, 1:]):
            count = self.count * (1 + (each == WEIGHTS))
            rows[np.arange(self.workers)[:, None], slots[:, :count]] = each
        return rows

    def held(self) -> tuple[Array, Array]:
        """Return rows without W, and how many W wait, passes are held and W are done after each of their slots.

        An idle slot does a W as soon as there is one to do; the rows are as long as that takes.
        """
        rows = self.rows(WEIGHTS)
        small, inputs = np.min_scalar_type(-rows.shape[1]), (rows == I_UP) | (rows == I_DOWN)
        wait = waiting(inputs, rows == IDLE, small)
        rest = wait[:, -1:] - np.arange(1, int(wait[:, -1].max()) + 3, dtype=small)
        behind = (0, 0), (0, rest.shape[1])
        done = np.pad(np.cumsum(inputs, 1, small), behind, "edge")
        rows, wait = np.pad(rows, behind, constant_values=IDLE), np.concatenate([wait, np.maximum(rest, 0)], 1)
        done -= wait
        return rows, np.array([wait, np.cumsum(rows <= F_UP, 1, small) - done, done])

    def list_weights(self, done: Array) -> None:
        """List W in the slots behind which more are done."""
        more = done > np.pad(done[:, :-1], ((0, 0), (1, 0)))
        self.of[WEIGHTS, 1:-1, 1:] = np.nonzero(more)[1].reshape(self.workers, -1)

    def columns(self, begin: int = 0) -> Iterator[Column]:
        """Yield the passes of each slot from `begin` on."""
        worker, each = self.strides
        length = self._length(IDLE)
        table, counts = np.zeros((length, self.workers), np.int32), np.zeros((IDLE, length), np.intp)
        for number, own in enumerate(self.of[:IDLE, 1:-1, 1:]):
            of, m = np.nonzero((own >= begin) & (own < _FAR))
            slots = own[of, m]
            table[slots, of] = number * each + (of + 1) * worker + m + 1
            counts[number] = np.bincount(slots, minlength=length)
        table.sort(1)  # by pass
        ends = np.cumsum(counts, 0).T.tolist()
        # The pass before; the one of the same microbatch before it; the one on the worker that does it before.
        apart = [[-1] * IDLE, [-1, -each, -each, -each, each], [-worker, worker, -worker, worker, -1]]
        distances = np.array(apart, np.int32)
        for first in range(begin, len(table), _PART):
            part = table[first : first + _PART]
            needs = (part + distances[:, part // each]).astype(np.intp)
            workers = (part // worker % (self.workers + 2) - 1).astype(np.intp)
            part = part.astype(np.intp)
            for at, (_, forwards, _, before, total) in enumerate(ends[first : first + _PART]):
                if total:
                    a = self.workers - total
                    yield Column(first + at, forwards, before, part[at, a:], needs[:, at, a:], workers[at, a:])


def squeezed(times: Times) -> Times:
    """Run everything as early as data flow and each worker's order allow, in slots of equal length."""
    found = Times(times.workers, times.count)
    found.of[_INPUTS] = -1
    flat, last = found.flat, np.full(times.workers, -1)
    for _, _, _, places, needs, workers in times.columns():
        slots = np.maximum(flat.take(needs).max(0), last.take(workers)) + 1
        flat[places] = last[workers] = slots
    return found


class _Holes:
    """The idle slots of workers: each slot names one that is not behind the next idle one."""

    def __init__(self, rows: Array, begin: int) -> None:
        idle = rows == IDLE
        idle[:, begin:] = True
        slots = np.where(idle, np.arange(rows.shape[1], dtype=np.int32), np.int32(_FAR))
        np.minimum.accumulate(slots[:, ::-1], 1, out=slots[:, ::-1])
        self._next: Array = slots.reshape(-1)
        self.length = rows.shape[1]

    def first(self, workers: Array, slots: Array) -> Array:
        """Return the first idle slots of workers from these slots on."""
        row = workers * self.length
        asked, found = row + slots, self._next.take(row + slots)
        while (found != slots).any():
            slots, found = found, self._next.take(row + found)
        self._next[asked] = found
        return found

    def fill(self, workers: Array, slots: Array) -> None:
        self._next[workers * self.length + slots] = slots + 1


class _HeldByForward:
    """Which holes a forward may take, if every W is listed: a worker may hold `allowed` passes after each forward.

    A pass moved to a hole is held by all forwards behind it. So the hole must be behind the last forward after which
    `allowed` are held, and behind the W that follows it. Forwards of a kind keep their order, as W do. So only the
    forwards of the other kind stand behind the hole, and the worker's last one of the same kind is before it. Then a
    forward of the other kind holds all of the same kind, and its excess, its number without the W before it, stays as
    it is: a table by excess has the W behind the last forward of each.
    """

    #: the passes of three kinds, down, up and W; the kind of a pass; the other two
    _PASS, _KIND = np.array([F_DOWN, F_UP, WEIGHTS]), np.array([0, 1, 0, 0, 2])
    _OTHERS = np.array([[1, 0, 0], [2, 2, 1]])

    def __init__(self, times: Times, holes: _Holes, allowed: int) -> None:
        self._times, self._holes, self._allowed, P = times, holes, allowed, times.workers
        #: by kind and worker: how many there are, and the slot of the last; how many of a kind are before it
        self._number, self._last = np.zeros(3 * P, np.intp), np.full(3 * P, -1)
        self._before = np.zeros(9 * P, np.intp)
        #: how many forwards are to come; by worker, how many I there are
        self._left = 2 * times.count * P
        self._listed = np.zeros(P, np.intp)
        self._width = 2 * times.count + max(times.count, allowed) + 1
        self._behind: Array = np.full(2 * P * self._width, -1, np.int32)

    def moved(self, now: Column, first: Array) -> Array:
        """Return the first holes of passes from these slots on; their slots now if there are none."""
        if count := now.forwards:
            first[:count] = np.maximum(first[:count], self._earliest(now.places[:count], now.workers[:count]))
        return self._holes.first(now.workers, first)

    def _earliest(self, places: Array, workers: Array) -> Array:
        """Return the first slots where memory allows these forwards."""
        (worker, stride), P = self._times.strides, self._times.workers
        number, kind = places % worker - 1, places // stride
        least = self._behind.take(self._excess(1 - kind, workers, self._allowed - number))
        up, weights = self._before.take([(3 - 2 * kind) * P + workers, (6 + kind) * P + workers])
        if (full := number + up - weights >= self._allowed).any():
            least = np.where(full, np.maximum(least, self._slots(2, workers, weights)), least)
        return least + 1

    def _excess(self, kind: Any, workers: Array, excess: Array) -> Array:
        """Return the places of forwards in the table."""
        return (kind * self._times.workers + workers) * self._width + 2 * self._times.count + excess

    def _slots(self, kind: Any, workers: Array, numbers: Array) -> Array:
        """Return the slots of passes of a kind."""
        worker, stride = self._times.strides
        return self._times.flat.take(self._PASS.take(kind) * stride + (workers + 1) * worker + 1 + numbers)

    def note(self, now: Column, slots: Array) -> None:
        """Note that passes are in these slots."""
        if now.before > now.forwards:
            self._note_inputs(now.workers[now.forwards : now.before], slots[now.forwards : now.before])
        (worker, stride), P, forwards = self._times.strides, self._times.workers, now.forwards
        self._left -= forwards
        if not self._left:
            return
        places, workers, slots = (
            np.concatenate([each[:forwards], each[now.before :]]) for each in (now.places, now.workers, slots)
        )
        number, kind = places % worker, self._KIND.take(places // stride)
        others, own = self._OTHERS[:, kind], kind * P + workers
        self._last[own], self._number[own] = slots, number
        self._before[(kind * 3 + others) * P + workers] += slots < self._last.take(others * P + workers)
        pair = (others * 3 + kind) * P + workers
        before = self._before[pair] = self._passed(others, workers, self._before.take(pair), slots)
        # The first W behind forwards: behind these forwards, and these W behind the last forwards before them.
        weights = before[1, :forwards]
        behind = self._slots(2, workers[:forwards], weights)
        known = behind < _FAR
        at = self._excess(kind[:forwards], workers[:forwards], number[:forwards] - weights)
        self._behind[at[known]] = behind[known]
        at = self._excess(others[:, forwards:], workers[forwards:], before[:, forwards:] - number[forwards:] + 1)
        self._behind[at] = slots[forwards:]

    def _passed(self, kind: Array, workers: Array, numbers: Array, slots: Array) -> Array:
        """Return how many passes of a kind are before these slots: at least `numbers`."""
        own, step, more = kind * self._times.workers + workers, 1, True
        total = self._number.take(own)
        numbers = np.where(self._last.take(own) < slots, total, numbers)
        while step:  # which doubles as long as there are more, and is halved then
            later = np.minimum(numbers + step, total)
            passed = (later == numbers + step) & (self._slots(kind, workers, later - 1) < slots)
            numbers = numbers + step * passed
            more = more and bool(passed.any())
            step = step * 2 if more else step // 2
        return numbers

    def _note_inputs(self, workers: Array, slots: Array) -> None:
        """Sort I in among those of their workers."""
        flat, (worker, stride) = self._times.flat, self._times.strides
        at = _INPUTS * stride + (workers + 1) * worker + 1 + self._listed.take(workers)
        self._listed[workers] += 1
        while (later := flat.take(at - 1) > slots).any():
            flat[at[later]] = flat[at[later] - 1]
            at = at - later
        flat[at] = slots


class _HeldBySlot:
    """Which holes a pass may take, if an idle slot does a W that waits."""

    #: by pass, and last for an idle slot with a W: how many wait, are held, and are done more
    _CHANGE = np.array([[0, 0, 1, 1, 0, 0, -1], [1, 1, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 0, 1]], np.int32)

    def __init__(self, times: Times, holes: _Holes, rows: Array, after: Array) -> None:
        self._stride, self._holes, self._rows, self._length = times.strides[1], holes, rows.reshape(-1), rows.shape[1]
        self._allowed = int(after[1].max())
        #: with so many W done a worker cannot hold more than allowed
        self._enough = 2 * times.count - self._allowed
        #: by worker, the slot where so many are done: memory allows all that is behind it, and is not noted there
        self._safe = (after[2] < self._enough).sum(1)
        self._after = after.reshape(3, -1)

    def note(self, now: Column, slots: Array) -> None:
        pass

    def moved(self, now: Column, first: Array) -> Array:
        """Return the first holes of passes from these slots on; their slots now if there are none. Note them."""
        start, workers, passes = now.slot, now.workers, now.places // self._stride
        slots = self._holes.first(workers, first)
        todo = ((slots < start) & (slots <= self._safe.take(workers))).nonzero()[0]
        while todo.size:
            wrong = self._wrong(passes[todo], workers[todo], slots[todo], start)
            todo, wrong = todo[wrong >= 0], wrong[wrong >= 0]
            slots[todo] = self._holes.first(workers[todo], np.minimum(wrong + 1, start))
            todo = todo[(slots[todo] < start) & (slots[todo] <= self._safe[workers[todo]])]
        moved = slots < start
        row = workers[moved] * self._length
        self._rows[row + start] = IDLE
        self._rows[row + slots[moved]] = passes[moved]
        return slots

    def _wrong(self, passes: Array, workers: Array, begin: Array, end: int) -> Array:
        """Return the first slots with too many held, if passes move from `end` to `begin`; note those with -1: none."""
        row = workers * self._length
        self._rows[row + begin], self._rows[row + end] = passes, IDLE
        now = np.where(begin, self._after[:, row + begin - 1], 0)
        wrong, live, at, trail = np.full(len(row), -1), np.arange(len(row)), row + begin, list[Any]()
        while live.size:
            each = self._rows.take(at)
            each[(each == IDLE) & (now[0] > 0)] = IDLE + 1
            now = now + self._CHANGE[:, each]
            trail.append((live, at, now))
            slot, bad = at - row[live], now[1] > self._allowed
            wrong[live[bad]] = slot[bad]
            safe = now[2] >= self._enough
            same = (slot >= end) & (slot <= self._safe[workers[live]]) & (now == self._after[:, at]).all(0)
            keep = ~(bad | safe | same)
            trail[-1] = live, at, now, safe
            live, at, now = live[keep], at[keep] + 1, now[:, keep]
        for live, at, now, safe in trail:
            good = wrong[live] < 0
            self._after[:, at[good]] = now[:, good]
            good &= safe
            self._safe[workers[live[good]]] = at[good] - row[live[good]]
        row, begin, passes = row[wrong >= 0], begin[wrong >= 0], passes[wrong >= 0]
        self._rows[row + begin], self._rows[row + end] = IDLE, passes
        return wrong


def reordered(times: Times, listed: bool) -> Times:
    """Move passes into earlier holes where no worker then holds more than the maximum of the given rows.

    The steady state between the first I down on worker 0 and its last F stays; without listed W, so do the passes
    before.
    """
    rows, after = times.held()
    steady, lasts = int(times.of[I_DOWN, 1, 1]), times.of[F_DOWN, 1:-1, times.count]
    lasts = np.where(lasts >= steady, lasts, _FAR)
    end, until = int(lasts.min()), int(lasts.argmin())
    found = Times(times.workers, times.count)
    holes = _Holes(rows, 0 if listed else end)
    if listed:
        times.list_weights(after[2])
        holding: _HeldByForward | _HeldBySlot = _HeldByForward(found, holes, int(after[1].max()))
        del after
    else:
        times.of[WEIGHTS, 1:-1, 1:] = _FAR
        np.copyto(found.of, times.of, where=times.of < end)
        holding = _HeldBySlot(times, holes, rows, after)
    for now in times.columns(0 if listed else end):
        if now.slot >= end or (listed and now.slot < steady):
            first = found.flat.take(now.needs).max(0) + 1
            if now.slot == end:
                first[now.workers <= until] = end
            slots = holding.moved(now, first)
        else:
            slots = np.full(len(now.places), now.slot)
        holes.fill(now.workers, slots)
        found.flat[now.places] = slots
        holding.note(now, slots)
    return found
