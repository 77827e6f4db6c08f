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
_PART = 32

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
    #: by pass: its place in `Times.flat`, the places of its needs, its line there, its worker
    places: Array
    needs: Array
    lines: Array
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
        #: distances in `flat` of a line, a worker's passes of a kind, and a pass
        self.strides = 2 * count + 1, (workers + 2) * (2 * count + 1)

    def own(self, each: int) -> Array:
        """Return the slots of a pass, by worker and number."""
        return self.of[each, 1:-1, 1 : 1 + self.count * (1 + (each == WEIGHTS))]

    def rows(self, passes: int) -> Array:
        """Return the pass in each slot of each worker, of the first `passes` passes."""
        length = 1 + max(int(self.own(each).max()) for each in range(passes))
        rows = np.full((self.workers, length), IDLE, np.uint8)
        for each in range(passes):
            rows[np.arange(self.workers)[:, None], self.own(each)] = each
        return rows

    def with_weights(self) -> tuple[Array, Array, Array]:
        """Return rows without W, and how many W wait and are done after each slot. List W where one is done.

        An idle slot does a W as soon as there is one to do; the rows are as long as that takes.
        """
        rows = self.rows(WEIGHTS)
        small, inputs = np.min_scalar_type(-rows.shape[1]), (rows == I_UP) | (rows == I_DOWN)
        wait = waiting(inputs, rows == IDLE, small)
        rest = wait[:, -1:] - np.arange(1, int(wait[:, -1].max()) + 3, dtype=small)
        behind = (0, 0), (0, rest.shape[1])
        done = np.pad(np.cumsum(inputs, 1, small), behind, "edge")
        wait = np.concatenate([wait, np.maximum(rest, 0)], 1)
        done -= wait
        more = done > np.pad(done[:, :-1], ((0, 0), (1, 0)))
        self.own(WEIGHTS)[:] = np.nonzero(more)[1].reshape(self.workers, -1)
        return np.pad(rows, behind, constant_values=IDLE), wait, done

    def columns(self, passes: int, begin: int = 0) -> Iterator[Column]:
        """Yield those of the first passes in each slot from `begin` on."""
        line, each = self.strides
        length = 1 + max(int(self.own(each).max()) for each in range(passes))
        table = np.zeros((length, self.workers), np.min_scalar_type(-self.flat.size))
        worker, counts = np.arange(self.workers)[:, None], np.zeros((IDLE, length), np.intp)
        for number in range(passes):
            slots = self.own(number)
            table[slots, worker] = number * each + (worker + 1) * line + np.arange(1, slots.shape[1] + 1)
            counts[number] = np.bincount(slots.ravel(), minlength=length)
        table.sort(1)  # by pass
        end, ends, table = int(counts[:, :begin].sum()), np.cumsum(counts, 0).T.tolist(), table[table > 0]
        # The pass before; the one of the same microbatch before it; the one on the worker that does it before.
        apart = [[-1] * IDLE, [-1, -each, -each, -each, each], [-line, line, -line, line, -1]]
        distances, owners = np.repeat(apart, self.workers + 2, 1), np.tile(np.arange(-1, self.workers + 1), IDLE)
        for first in range(begin, length, _PART):
            part = ends[first : first + _PART]
            places = table[end : end + sum(total for *_, total in part)].astype(np.intp)
            lines, end, at = places // line, end + len(places), 0
            needs, workers = places + distances.take(lines, 1), owners.take(lines)
            for slot, (_, forwards, _, before, total) in enumerate(part, first):
                if total:
                    here = slice(at, at := at + total)
                    yield Column(slot, forwards, before, places[here], needs[:, here], lines[here], workers[here])


def squeezed(times: Times) -> Times:
    """Run everything as early as data flow and each worker's order allow, in slots of equal length."""
    found = Times(times.workers, times.count)
    found.of[_INPUTS] = -1
    flat, last = found.flat, np.full(times.workers, -1)
    for *_, places, needs, _, workers in times.columns(IDLE):
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

    def __init__(self, times: Times, holes: _Holes, allowed: int) -> None:
        self._times, self._holes, self._allowed, P = times, holes, allowed, times.workers + 2
        lines = np.arange(IDLE * P)
        #: by line: those of the two others of F down, F up and W
        self._others = lines + P * np.array([[1, -1, 0, 0, -4], [4, 3, 0, 0, -3]])[:, lines // P]
        #: by line, places: how many of each other are before its last pass, and of it before the last of each other
        self._own, self._their = self._others // P * len(lines) + lines, lines // P * len(lines) + self._others
        self._before = np.zeros(IDLE * len(lines), np.intp)
        #: by line: how many passes there are, and the slot of the last
        self._number, self._last = np.zeros(len(lines), np.intp), np.full(len(lines), -1)
        #: how many forwards are to come; by worker, how many I there are
        self._left, self._inputs = 2 * times.count * times.workers, np.zeros(times.workers, np.intp)
        self._width = 2 * times.count + max(times.count, allowed) + 1
        self._behind: Array = np.full(2 * P * self._width, -1, np.int32)

    def moved(self, now: Column, first: Array) -> Array:
        """Return the first holes of passes from these slots on; their slots now if there are none."""
        if count := now.forwards:
            first[:count] = np.maximum(first[:count], self._earliest(now.places[:count], now.lines[:count]))
        return self._holes.first(now.workers, first)

    def _earliest(self, places: Array, lines: Array) -> Array:
        """Return the first slots where memory allows these forwards."""
        number = places % self._times.strides[0] - 1
        (other, weights), (others, done) = self._others.take(lines, 1), self._before.take(self._own.take(lines, 1))
        least = self._behind.take(self._excess(other, self._allowed - number))
        if (full := number + others - done >= self._allowed).any():
            least = np.where(full, np.maximum(least, self._slots(weights, done)), least)
        return least + 1

    def _excess(self, lines: Array, excess: Array) -> Array:
        """Return the places of forwards in the table."""
        return lines * self._width + 2 * self._times.count + excess

    def _slots(self, lines: Array, numbers: Array) -> Array:
        return self._times.flat.take(lines * self._times.strides[0] + 1 + numbers)

    def note(self, now: Column, slots: Array) -> None:
        """Note that passes are in these slots."""
        forwards = now.forwards
        if now.before > forwards:
            self._note_inputs(now.workers[forwards : now.before], slots[forwards : now.before])
        self._left -= forwards
        if not self._left:
            return
        places, lines, slots = (
            np.concatenate([each[:forwards], each[now.before :]]) for each in (now.places, now.lines, slots)
        )
        number, others, own = places % self._times.strides[0], self._others.take(lines, 1), self._own.take(lines, 1)
        self._last[lines], self._number[lines] = slots, number
        later = slots < self._last.take(others)
        self._before[self._their.take(lines, 1)] += later
        before = self._before[own] = self._passed(others, np.where(later, self._before.take(own), _FAR), slots)
        # The first W behind forwards: behind these forwards, and these W behind the last forwards before them.
        weights = before[1, :forwards]
        behind = self._slots(others[1, :forwards], weights)
        known = behind < _FAR
        self._behind[self._excess(lines[:forwards], number[:forwards] - weights)[known]] = behind[known]
        at = self._excess(others[:, forwards:], before[:, forwards:] - number[forwards:] + 1)
        self._behind[at] = slots[forwards:]

    def _passed(self, lines: Array, numbers: Array, slots: Array) -> Array:
        """Return how many passes are before these slots: at least `numbers`."""
        step, more, total = 1, True, self._number.take(lines)
        numbers = np.minimum(numbers, total)
        while step:  # which doubles as long as there are more, and is halved then
            later = np.minimum(numbers + step, total)
            passed = (later == numbers + step) & (self._slots(lines, later - 1) < slots)
            numbers = numbers + step * passed
            more = more and bool(passed.any())
            step = step * 2 if more else step // 2
        return numbers

    def _note_inputs(self, workers: Array, slots: Array) -> None:
        """Sort I in among those of their workers."""
        flat, (line, stride) = self._times.flat, self._times.strides
        at = _INPUTS * stride + (workers + 1) * line + 1 + self._inputs.take(workers)
        self._inputs[workers] += 1
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
        slots, todo = self._holes.first(workers, first), np.arange(len(first))
        while todo.size:
            todo = todo[slots[todo] < start]
            row = workers[todo] * self._length
            self._rows[row + start], self._rows[row + slots[todo]] = IDLE, passes[todo]
            todo = todo[slots[todo] <= self._safe[workers[todo]]]
            wrong = self._note(workers[todo], slots[todo], start)
            todo, wrong = todo[wrong >= 0], wrong[wrong >= 0]
            row = workers[todo] * self._length
            self._rows[row + slots[todo]], self._rows[row + start] = IDLE, passes[todo]
            self._note(workers[todo], slots[todo], start)
            slots[todo] = self._holes.first(workers[todo], np.minimum(wrong + 1, start))
        return slots

    def _note(self, workers: Array, begin: Array, end: int) -> Array:
        """Note what changes behind slots `begin`, after moves from `end`; return where too many are held, or -1."""
        row, live, wrong = workers * self._length, np.arange(len(begin)), np.full(len(begin), -1)
        now, at = np.where(begin, self._after[:, row + begin - 1], 0), row + begin
        while live.size:
            each = self._rows.take(at)
            each[(each == IDLE) & (now[0] > 0)] = IDLE + 1
            now = now + self._CHANGE[:, each]
            slot, bad, safe = at - row[live], now[1] > self._allowed, now[2] >= self._enough
            same = (slot >= end) & (slot <= self._safe[workers[live]]) & (now == self._after[:, at]).all(0)
            self._after[:, at] = now
            wrong[live[bad]], self._safe[workers[live[safe]]] = slot[bad], slot[safe]
            more = ~(bad | safe | same)
            live, at, now = live[more], at[more] + 1, now[:, more]
        return wrong


def reordered(times: Times, listed: bool) -> Times:
    """Move passes into earlier holes where no worker then holds more than the maximum of the given rows.

    The steady state between the first I down on worker 0 and its last F stays; without listed W, so do the passes
    before.
    """
    rows, wait, done = times.with_weights()
    held = np.cumsum(rows <= F_UP, 1, done.dtype) - done
    steady, lasts = int(times.of[I_DOWN, 1, 1]), times.of[F_DOWN, 1:-1, times.count]
    lasts = np.where(lasts >= steady, lasts, _FAR)
    end, until = int(lasts.min()), int(lasts.argmin())
    found, begin = Times(times.workers, times.count), 0 if listed else end
    holes = _Holes(rows, begin)
    if listed:
        holding: _HeldByForward | _HeldBySlot = _HeldByForward(found, holes, int(held.max()))
    else:
        np.copyto(found.of, times.of, where=times.of < end)
        holding = _HeldBySlot(times, holes, rows, np.array([wait, held, done]))
    del wait, held, done
    for now in times.columns(IDLE if listed else WEIGHTS, begin):
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
