"""The compiled relation of all workers in few numbers: streams of like actions instead of single actions.

A stream is the actions of one kind of one shard, in the worker's order. The schedule's formulas are asked about ranges
of microbatches (`along`), so a stream is a few pieces. Within a piece the slot and the needs grow by the same from
action to action: the k-th waits until other streams have finished `threshold + k * growth` actions. If each stream runs
in its order, as is checked, only its next action can run next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from ..dependency import NO_REDUCTIONS, Action, G, R, S, Spec, U, W, reduction_tree
from ..dependency.indexes import route_in
from ..dependency.kinds import A, D
from ..dependency.order import has_slot, is_uniform, with_end
from ..dependency.spec import overrides
from ..dependency.versions import microbatches_of, updates_a_step
from .along import Along, ask, ends

#: distance of slots, for the actions that end a step between them
_BETWEEN = 1 << 16
#: (stream, position there, growth of the position)
_Need = tuple[int, int, int]


class NotRegular(Exception):
    """Streams do not describe the relation."""


@dataclass(frozen=True)
class Piece:
    """A part of a stream: `count` actions; the k-th has `slot + k * growth` and waits for its needs."""

    count: int
    slot: int
    growth: int
    cost: float
    #: (stream, actions of it that must be finished, growth of that number)
    needs: tuple[_Need, ...]
    step: int = 0

    def counts(self, at: int) -> dict[int, int]:
        """Return which counts of streams an action waits for."""
        found: dict[int, int] = {}
        for source, count, grows in self.needs:
            found[source] = max(found.get(source, 0), count + grows * at)
        return found


@dataclass
class ActionStream:
    """The actions of a kind of a shard."""

    last: Action
    worker: int
    route: int
    #: size of the slice that an action is
    size: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def last_slot(self) -> int:
        *_, last = self.pieces
        return last.slot + last.growth * (last.count - 1)


@dataclass(frozen=True)
class _Asked:
    """The answers about microbatches first, first + 1, ... of a residue, before positions are known."""

    first: int
    count: int
    route: int
    slot: Any
    step: int
    cost: float
    needs: list[Action]
    #: how many other workers take the payload
    takers: int


@dataclass(frozen=True)
class _InStream:
    """Where in a stream the microbatches first, first + 1, ... of a residue stand; way: 1, or -1 if they go back."""

    first: int
    count: int
    stream: int
    position: int
    way: int


class Streams:
    """The streams of a spec, for some steps.

    Raises:
        NotRegular: streams do not describe the relation.
    """

    def __init__(self, spec: Spec, cost: Callable[[Action], float], *, fixed: bool, steps: int = 1) -> None:
        self.spec, self.fixed, self.steps, self._cost = spec, fixed, steps, cost
        parallelism = spec.parallelism
        slices = len(parallelism.slices)
        limited = any(spec.activation_limit(worker) is not None for worker in spec.workers)
        irregular = not spec.synchronous and (parallelism.zero or parallelism.replicas > 1)
        if not has_slot(spec) or spec.handovers or irregular:
            raise NotRegular
        if not fixed and (limited or slices > 1 or not is_uniform(spec)):
            raise NotRegular
        self._routes = spec.num_routes
        in_turn = not overrides(type(spec), "route")
        self._residues = slices * (self._routes if in_turn else parallelism.replicas)
        self.streams: list[ActionStream] = []
        #: payloads between workers in a step
        self.messages = 0
        self._places: dict[tuple[int, Any, int], list[_InStream]] = {}
        #: streams that end a step
        self._ends: dict[Action, int] = {}
        asked = [*self._ask_all()]
        for stage, kind, residue, answers in asked:
            self._add(stage, kind, residue, answers)
        for stage, kind, residue, answers in asked:
            self._connect(self._places[stage, kind, residue], answers, self._every(kind))
        if not fixed:
            self._check_order()
        self._end_steps()
        if steps > 1:
            self._repeat()

    @property
    def num_actions(self) -> int:
        """The number of actions of microbatches."""
        return sum(stream.count for stream in self.streams if stream.last.kind.per_microbatch)

    @property
    def ways(self) -> frozenset[tuple[int, int]]:
        """(source, target) of workers that send to each other."""
        return frozenset(
            (self.streams[source].worker, stream.worker)
            for stream in self.streams for piece in stream.pieces for source, _, _ in piece.needs
            if self.streams[source].last.kind.resource != "control"
        )  # fmt: skip

    def _every(self, kind: Any) -> int:
        return self._residues if kind.per_microbatch else self._routes

    def _ask_all(self) -> Iterator[tuple[int, Any, int, list[_Asked]]]:
        """Yield (stage, kind, residue, answers) of all that is in slots."""
        spec, total, every = self.spec, self.spec.total_microbatches, self._residues
        for stage in sorted(range(spec.num_stages), key=lambda each: spec.place(each, 0)):  # a worker's together
            for residue in range(min(every, total)):
                count = len(range(residue, total, every))
                kinds = dict.fromkeys(
                    action.kind
                    for _, _, actions in (
                        ask(partial(spec.actions, stage), residue, every, 1 if is_uniform(spec) else count)
                    )
                    for action in actions
                )
                for kind in kinds:
                    yield stage, kind, residue, self._answers(stage, kind, residue, every, count)
            for route in range(0 if spec.synchronous else self._routes):
                count = len([*spec.updates(stage, route)])
                yield stage, U, route, self._answers(stage, U, route, self._routes, count)

    def _answers(self, stage: int, kind: Any, first: int, every: int, count: int) -> list[_Asked]:
        spec = self.spec

        uniform = is_uniform(spec)
        per_step = spec.num_microbatches if kind.per_microbatch else updates_a_step(spec)

        def question(index: Any) -> tuple[int, Any, int, float, list[Action], int] | None:
            action = kind(stage, index)
            if kind.per_microbatch and not uniform and action not in spec.actions(stage, index):
                return None
            # The schedule's formulas first: most divisions of the range are theirs.
            slot, after = spec.slot(action), spec.after(action)
            if kind.per_microbatch:
                needs, route = [*spec.data(action)], spec.route(index)
            else:
                route = index % self._routes
                last = microbatches_of(spec, action)[-1:]
                needs = [each for m in last for each in spec.actions(stage, m) if each.kind.accumulates]
                before = index - spec.parallelism.replicas
                needs += [U(stage, before)] if before >= 0 else []
            needs += [need for need in after if need.index >= 0]
            cost = self._cost(action)
            # A number for the whole range, or the range is divided.
            cost = cost.__index__() if isinstance(cost, Along) else cost
            route = route.__index__()
            takers = self._takers(action, spec.successors(action), route)
            return route, slot, (index // per_step).__index__(), cost, needs, takers

        return [_Asked(at, n, *answer) for at, n, answer in ask(question, first, every, count) if answer is not None]

    def _takers(self, action: Action, users: Iterable[Action], route: int) -> int:
        at = {
            self.spec.place(user.stage, route if user.kind.per_microbatch else user.index % self._routes)
            for user in users
        }
        return len(at - {self.spec.place(action.stage, route)})

    def _add(self, stage: int, kind: Any, residue: int, answers: list[_Asked]) -> None:
        """Put answers into streams by route, in the order of slots."""
        places = self._places[stage, kind, residue] = []
        sizes = self.spec.parallelism.slices
        for route in dict.fromkeys(answer.route for answer in answers):
            own = sorted((a for a in answers if a.route == route), key=lambda a: ends(a.slot)[0])
            way = -1 if own[0].first > own[-1].first or ends(own[0].slot)[1] < 0 else 1
            number, position = len(self.streams), 0
            size = sizes[residue % len(sizes)] if kind.per_microbatch else 0
            at = own[-1].first + (own[-1].count - 1) * (way > 0)
            last = kind(stage, residue + at * self._every(kind))
            self.streams.append(ActionStream(last, self.spec.place(stage, route), route, size))
            for answer in own:
                first = position if way > 0 else position + answer.count - 1
                places.append(_InStream(answer.first, answer.count, number, first, way))
                position += answer.count
                self.messages += answer.count * answer.takers * (kind not in (R, W, U))
        places.sort(key=lambda place: place.first)

    def _connect(self, places: list[_InStream], answers: list[_Asked], every: int) -> None:
        """Make the pieces of streams, with the positions of their needs."""
        for place, answer in sorted(zip(places, answers, strict=True), key=lambda pair: ends(pair[1].slot)[0]):
            slot, growth = ends(answer.slot)
            pieces = [*self._pieces(answer, slot * _BETWEEN, growth * _BETWEEN)]
            if place.way < 0:
                pieces = [
                    replace(
                        each, slot=each.slot + each.growth * (each.count - 1), growth=-each.growth,
                        needs=tuple((s, n + grows * (each.count - 1), -grows) for s, n, grows in each.needs),
                    ) for each in reversed(pieces)
                ]  # fmt: skip
            stream = self.streams[place.stream]
            for piece in pieces:
                begins_later = not stream.pieces or stream.last_slot < piece.slot
                if not begins_later or (piece.count > 1 and piece.growth <= 0):
                    raise NotRegular
                stream.pieces.append(piece)

    def _pieces(self, answer: _Asked, slot: int, growth: int) -> Iterator[Piece]:
        """Yield the pieces of an answer: its needs may stand in several streams."""
        todo = [(0, answer.count)]
        while todo:
            begin, count = todo.pop()
            needs: dict[tuple[int, int], int] = {}
            for stage, kind, index in answer.needs:
                first, step = ends(index)
                stream, position = self._find(kind(stage, first + step * begin))
                other, last = self._find(kind(stage, first + step * (begin + count - 1)))
                grows = (last > position) - (last < position)
                if stream != other or last - position != grows * (count - 1):
                    todo += [(begin + count // 2, count - count // 2), (begin, count // 2)]
                    break
                needs[stream, grows] = max(needs.get((stream, grows), 0), position + 1)
            else:
                found = {(s, number, grows) for (s, grows), number in needs.items()}
                # A need that is met before another need of the same stream, at both ends, adds nothing.
                found -= {
                    (s, n, grows) for s, n, grows in found for other, more, growth in found
                    if s == other and n <= more and n + grows * (count - 1) <= more + growth * (count - 1)
                    and grows != growth
                }  # fmt: skip
                yield Piece(count, slot + growth * begin, growth, answer.cost, tuple(sorted(found)), answer.step)

    def _find(self, action: Action) -> tuple[int, int]:
        """Return the stream of an action and its position there."""
        stage, kind, index = action
        if action in self._ends:
            return self._ends[action], 0
        every = self._every(kind)
        places, at = self._places.get((stage, kind, index % every), []), index // every
        found = bisect_right(places, at, key=lambda place: place.first) - 1
        if found < 0 or at >= places[found].first + places[found].count:
            raise NotRegular
        place = places[found]
        return place.stream, place.position + place.way * (at - place.first)

    def _check_order(self) -> None:
        """Raise NotRegular unless the actions of each stream can only run in its order."""
        self._begins = [[0, *accumulate(piece.count for piece in stream.pieces)] for stream in self.streams]
        for number, stream in enumerate(self.streams):
            if stream.last.kind.accumulates:
                continue  # each waits for the one before it
            before: dict[int, int] = {}
            for piece, done in zip(stream.pieces, self._begins[number], strict=False):
                now = piece.counts(0)
                if not (
                    self._implies(now, number, done, {})
                    or all(self._implies(now, source, count, {}) for source, count in before.items())
                ) or any(grows < 0 for _, _, grows in piece.needs):
                    raise NotRegular
                before = piece.counts(piece.count - 1)

    def _implies(self, needs: Mapping[int, int], number: int, wanted: int, seen: dict[int, int]) -> bool:
        """Return whether a stream has finished `wanted` actions if these counts are reached."""
        if needs.get(number, 0) >= wanted:
            return True
        for source, count in needs.items():
            if self.streams[source].worker != self.streams[number].worker or seen.get(source, 0) >= count:
                continue
            seen[source] = count
            pieces, begins = self.streams[source].pieces, self._begins[source]
            for at in reversed(range(bisect_left(begins, count))):
                done = pieces[at].counts(min(pieces[at].count, count - begins[at]) - 1)
                if self._implies(done, number, wanted, seen):
                    return True
        return False

    def _end_steps(self) -> None:
        """Add the actions that end a step: streams of one action."""
        spec, tree = self.spec, reduction_tree(self.spec, NO_REDUCTIONS)
        gradients: dict[tuple[int, int], list[int]] = {}
        lasts: dict[int, list[tuple[int, Action]]] = {}
        for number, stream in enumerate(self.streams):
            if stream.last.kind.accumulates:
                gradients.setdefault((stream.last.stage, stream.route), []).append(number)
        for numbers in gradients.values():
            stream = max((self.streams[n] for n in numbers), key=lambda each: each.last_slot)
            lasts.setdefault(stream.worker, []).append((stream.last_slot, stream.last))
        added: list[tuple[int, Action]] = []
        for worker in spec.workers:
            own = dict((action, slot) for slot, action in sorted(lasts.get(worker, [])))
            at = 0
            listed: Iterable[Action] = (
                with_end(spec, worker, own, NO_REDUCTIONS) if spec.synchronous else tree.actions(worker)
            )
            for action in listed:
                at = own.get(action, at + 1)
                if action not in own:
                    self._ends[action] = len(self.streams)
                    added.append((at, action))
                    self.streams.append(ActionStream(action, worker, route_in(action.index, self._routes)))
        for slot, action in added:
            shards, others = tree.needs(action)
            if action.kind.resource != "control" and action.kind is not U:
                self.messages += self._takers(action, tree.successors(action), action.index % self._routes)
            found: dict[int, int] = {}
            for shard in shards:
                found |= {number: self.streams[number].count for number in gradients.get(shard, ())}
            for need in others:
                number, position = self._find(need)
                found[number] = max(found.get(number, 0), position + 1)
            needs = tuple((number, count, 0) for number, count in found.items())
            self.streams[self._ends[action]].pieces.append(
                Piece(1, slot, 0, self._cost(action), needs, spec.synchronous - 1)
            )

    def _repeat(self) -> None:
        """Let further steps follow; they begin on a stage when it has been updated."""
        tree, steps = reduction_tree(self.spec, NO_REDUCTIONS), range(1, self.steps)
        counts = [stream.count for stream in self.streams]
        length = _BETWEEN + max(stream.last_slot for stream in self.streams)
        for stream in self.streams:
            stage, kind, _ = stream.last
            before: list[Action] = []
            if kind.takes_update:
                before = [U(stage, stream.route), A(stage, stream.route)]
            elif kind in (G, S):
                before = [U(stage, stream.route)]
            elif kind is U:
                before = [D(*tree.own[stream.worker])]
            updates = [self._ends[action] for action in before if action in self._ends]
            first = stream.pieces.copy()
            for step in steps:
                inherited = tuple((number, step, 0) for number in updates)
                stream.pieces += [
                    replace(
                        piece, slot=piece.slot + step * length, step=step,
                        needs=(*((s, n + step * counts[s], grows) for s, n, grows in piece.needs), *inherited),
                    ) for piece in first
                ]  # fmt: skip
