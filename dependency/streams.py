"""The compiled relation of all workers in few numbers: streams of like actions instead of single actions.

A stream is the actions of one kind of one shard, in the worker's order. The schedule's formulas are asked about ranges
of microbatches (`along`), so a stream is a few pieces. Within a piece the slot and the needs grow by the same from
action to action: the k-th waits until other streams have finished `threshold + k * growth` actions. If each stream runs
in its order, as is checked, only its next action can run next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from .action import Action, Kind, R, U, W, route_in
from .along import Along, ask, ends
from .order import has_slot, is_uniform, with_end
from .reductions import NO_REDUCTIONS, reduction_tree
from .spec import Spec, overrides
from .versions import microbatches_of, updates_a_step

#: distance of slots, for the actions that end a step between them
_BETWEEN = 1 << 16


class NotRegular(Exception):
    """Streams do not describe the relation."""


class Piece(NamedTuple):
    """A part of a stream: `number` actions; the k-th has `slot + k * growth` and waits for its needs."""

    number: int
    slot: int
    growth: int
    cost: float
    #: (stream, actions of it that must be finished, growth of that number)
    needs: tuple[tuple[int, int, int], ...]
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
        return sum(piece.number for piece in self.pieces)

    @property
    def last_slot(self) -> int:
        last = self.pieces[-1]
        return last.slot + last.growth * (last.number - 1)


@dataclass
class _Answer:
    """The answer about `count` microbatches of a residue, from `first` on, and where in a stream these stand."""

    first: int
    count: int
    route: int
    slot: Any
    step: int
    cost: float
    needs: list[Action]
    #: how many other workers take the payload
    takers: int
    #: 1, or -1 if the stream goes back from the last microbatch to `first`
    way: int
    stream: int = 0
    #: of the microbatch `first` in the stream
    position: int = 0


class Streams:
    """The streams of a spec.

    Args:
        fixed: whether each worker keeps to its order.

    Raises:
        NotRegular: streams do not describe the relation.
    """

    def __init__(self, spec: Spec, cost: Callable[[Action], float], *, fixed: bool) -> None:
        self.spec, self.fixed, self._cost = spec, fixed, cost
        #: how many steps follow each other
        self.steps = spec.num_steps
        parallelism, self._uniform = spec.parallelism, is_uniform(spec)
        slices = len(parallelism.slices)
        limited = any(spec.activation_limit(worker) is not None for worker in spec.workers)
        irregular = not spec.synchronous and (parallelism.zero or parallelism.replicas > 1)
        if not has_slot(spec) or spec.handovers or irregular:
            raise NotRegular
        if not fixed and (limited or slices > 1 or not self._uniform):
            raise NotRegular
        self._routes = spec.num_routes
        in_turn = not overrides(type(spec), "route")
        self._residues = slices * (self._routes if in_turn else parallelism.replicas)
        self.streams: list[ActionStream] = []
        #: payloads between workers in a step
        self.messages = 0
        self._flows: dict[tuple[int, Kind, int], tuple[list[tuple[int, Kind]], int]] = {}
        #: the answers of each residue, by their first microbatch
        self._answers: dict[tuple[int, Kind, int], tuple[list[int], list[_Answer]]] = {}
        #: streams that end a step
        self._ends: dict[Action, int] = {}
        own = [answer for asked in self._ask_all() for answer in self._put(*asked)]
        for answer in own:
            self._connect(answer)
        if not fixed:
            self._check_order()
        self._end_steps()

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

    def _every(self, kind: Kind) -> int:
        return self._residues if kind.per_microbatch else self._routes

    def _ask_all(self) -> Iterator[tuple[int, Kind, int, list[_Answer]]]:
        """Yield (stage, kind, residue, answers) of all that is in slots."""
        spec, total, every = self.spec, self.spec.total_microbatches, self._residues
        for stage in sorted(range(spec.num_stages), key=lambda each: spec.place(each, 0)):  # a worker's together
            for residue in range(min(every, total)):
                count = len(range(residue, total, every))
                actions = ask(partial(spec.actions, stage), residue, every, 1 if self._uniform else count)
                for kind in dict.fromkeys(action.kind for _, _, found in actions for action in found):
                    yield stage, kind, residue, self._ask(stage, kind, residue, every, count)
            for route in range(0 if spec.synchronous else self._routes):
                count = len([*spec.updates(stage, route)])
                yield stage, U, route, self._ask(stage, U, route, self._routes, count)

    def _ask(self, stage: int, kind: Kind, first: int, every: int, count: int) -> list[_Answer]:
        spec, in_step = self.spec, kind.per_microbatch
        per_step = spec.num_microbatches if in_step else updates_a_step(spec)

        def question(index: Any) -> tuple[int, Any, int, float, list[Action], int] | None:
            action = kind(stage, index)
            if in_step and not self._uniform and action not in spec.actions(stage, index):
                return None
            # The schedule's formulas first: most divisions of the range are theirs.
            slot, after = spec.slot(action), spec.after(action)
            # A number for the whole range, or the range is divided.
            route = (spec.route(index) if in_step else route_in(index, self._routes)).__index__()
            needs, takers = self._flow(action, route)
            cost = self._cost(action)
            cost = cost.__index__() if isinstance(cost, Along) else cost
            needs += [need for need in after if need.index >= 0]
            return route, slot, (index // per_step).__index__(), cost, needs, takers

        found = []
        for at, number, answer in ask(question, first, every, count):
            if answer is not None:
                way = -1 if ends(answer[1])[1] < 0 else 1
                found.append(_Answer(at, number, *answer, way))
        return found

    def _flow(self, action: Action, route: int) -> tuple[list[Action], int]:
        """Return what an action needs by data flow, and how many other workers take its payload."""
        spec, (stage, kind, index) = self.spec, action
        if not kind.per_microbatch:
            last = microbatches_of(spec, action)[-1:]
            needs = [each for m in last for each in spec.actions(stage, m) if each.kind.accumulates]
            return needs + ([U(stage, index - 1)] if index >= 1 else []), 0
        if not (self._uniform and spec.synchronous):
            return [*spec.data(action)], self._takers(action, spec.successors(action), route)
        if (stage, kind, route) not in self._flows:  # the same for all microbatches
            known = [(need.stage, need.kind) for need in spec.data(kind(stage, 0))]
            self._flows[stage, kind, route] = known, self._takers(action, spec.successors(kind(stage, 0)), route)
        known, takers = self._flows[stage, kind, route]
        return [Action(of, each, index) for of, each in known], takers

    def _takers(self, action: Action, users: Iterable[Action], route: int) -> int:
        at = {
            self.spec.place(user.stage, route if user.kind.per_microbatch else route_in(user.index, self._routes))
            for user in users
        }
        return len(at - {self.spec.place(action.stage, route)})

    def _put(self, stage: int, kind: Kind, residue: int, answers: list[_Answer]) -> Iterator[_Answer]:
        """Put answers into streams by route; yield them in the order of slots."""
        self._answers[stage, kind, residue] = [answer.first for answer in answers], answers
        sizes = self.spec.parallelism.slices
        for route in dict.fromkeys(answer.route for answer in answers):
            own = sorted((a for a in answers if a.route == route), key=lambda a: ends(a.slot)[0])
            way = -1 if own[0].first > own[-1].first else own[0].way
            position = 0
            for answer in own:
                answer.stream, answer.way = len(self.streams), way
                answer.position = position if way > 0 else position + answer.count - 1
                position += answer.count
                self.messages += answer.count * answer.takers * (kind not in (R, W, U))
            at = own[-1].first + (own[-1].count - 1) * (way > 0)
            last = kind(stage, residue + at * self._every(kind))
            size = sizes[residue % len(sizes)] if kind.per_microbatch else 0
            self.streams.append(ActionStream(last, self.spec.place(stage, route), route, size))
            yield from own

    def _connect(self, answer: _Answer) -> None:
        """Add the pieces of an answer to its stream, with the positions of their needs."""
        stream = self.streams[answer.stream]
        for piece in self._pieces(answer):
            begins_later = not stream.pieces or stream.last_slot < piece.slot
            if not begins_later or (piece.number > 1 and piece.growth <= 0):
                raise NotRegular
            stream.pieces.append(piece)

    def _pieces(self, answer: _Answer) -> Iterator[Piece]:
        """Yield the pieces of an answer in the stream's order: its needs may stand in several streams."""
        slot, growth = ends(answer.slot)
        slot, growth, todo = slot * _BETWEEN, growth * _BETWEEN, [(0, answer.count)]
        while todo:
            begin, count = todo.pop()
            # The first and the last of the piece; a stream that goes back begins at the other end.
            first, last = (begin, begin + count - 1)[:: answer.way]
            needs: dict[tuple[int, int], int] = {}
            for stage, kind, index in answer.needs:
                at, step = ends(index)
                stream, position = self._find(stage, kind, at + step * first)
                other, until = (stream, position) if not step else self._find(stage, kind, at + step * last)
                grows = (until > position) - (until < position)
                if stream != other or until - position != grows * (count - 1):
                    todo += [(begin + count // 2, count - count // 2), (begin, count // 2)][:: answer.way]
                    break
                needs[stream, grows] = max(needs.get((stream, grows), 0), position + 1)
            else:
                found = {(s, number, grows) for (s, grows), number in needs.items()}
                if len(dict(needs.keys())) < len(needs):
                    # A need that is met before another need of the same stream, at both ends, adds nothing.
                    found -= {
                        (s, n, grows) for s, n, grows in found for other, more, growth in found
                        if s == other and n <= more and n + grows * (count - 1) <= more + growth * (count - 1)
                        and grows != growth
                    }  # fmt: skip
                needed = tuple(sorted(found))
                yield Piece(count, slot + growth * first, growth * answer.way, answer.cost, needed, answer.step)

    def _find(self, stage: int, kind: Kind, index: int) -> tuple[int, int]:
        """Return the stream of an action and its position there."""
        every = self._every(kind)
        if (stage, kind, index % every) in self._answers:
            firsts, answers = self._answers[stage, kind, index % every]
            at = index // every
            answer = answers[bisect_right(firsts, at) - 1]
            if 0 <= at - answer.first < answer.count:
                return answer.stream, answer.position + answer.way * (at - answer.first)
        raise NotRegular

    def _check_order(self) -> None:
        """Raise NotRegular unless the actions of each stream can only run in its order."""
        self._begins = [[0, *accumulate(piece.number for piece in stream.pieces)] for stream in self.streams]
        for number, stream in enumerate(self.streams):
            if stream.last.kind.accumulates:
                continue  # each waits for the one before it
            before: dict[int, int] = {}
            for piece, done in zip(stream.pieces, self._begins[number], strict=False):
                now = piece.counts(0)
                if not (
                    all(now.get(source, 0) >= count for source, count in before.items())
                    or self._implies(now, number, done, {})
                    or all(self._implies(now, source, count, {}) for source, count in before.items())
                ) or any(grows < 0 for _, _, grows in piece.needs):
                    raise NotRegular
                before = piece.counts(piece.number - 1)

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
                done = pieces[at].counts(min(pieces[at].number, count - begins[at]) - 1)
                if self._implies(done, number, wanted, seen):
                    return True
        return False

    def _end_steps(self) -> None:
        """Add the actions that end a step: streams of one action."""
        spec, tree = self.spec, reduction_tree(self.spec, NO_REDUCTIONS)
        #: by shard, the streams that accumulate its gradients
        gradients: dict[tuple[int, int], list[int]] = {}
        for number, stream in enumerate(self.streams):
            if stream.last.kind.accumulates:
                gradients.setdefault((stream.last.stage, stream.route), []).append(number)
        lasts: dict[int, list[tuple[int, Action]]] = {}
        for numbers in gradients.values():
            stream = max((self.streams[n] for n in numbers), key=lambda each: each.last_slot)
            lasts.setdefault(stream.worker, []).append((stream.last_slot, stream.last))
        added: list[tuple[int, Action]] = []
        for worker in spec.workers:
            own = {action: slot for slot, action in sorted(lasts.get(worker, []))}
            listed = with_end(spec, worker, own, NO_REDUCTIONS) if spec.synchronous else tree.actions(worker)
            at = 0
            for action in listed:
                at = own.get(action, at + 1)
                if action not in own:
                    self._ends[action] = len(self.streams)
                    added.append((at, action))
                    self.streams.append(ActionStream(action, worker, route_in(action.index, self._routes)))
        for slot, action in added:
            shards, others = tree.needs(action)
            if action.kind.resource != "control" and action.kind is not U:
                route = route_in(action.index, self._routes)
                self.messages += self._takers(action, tree.successors(action), route)
            found = {number: self.streams[number].count for shard in shards for number in gradients.get(shard, ())}
            for need in others:
                number, position = (self._ends[need], 0) if need in self._ends else self._find(*need)
                found[number] = max(found.get(number, 0), position + 1)
            needs = tuple((number, count, 0) for number, count in found.items())
            piece = Piece(1, slot, 0, self._cost(action), needs, spec.synchronous - 1)
            self.streams[self._ends[action]].pieces.append(piece)

    def followed(self, steps: int) -> Streams:
        """Return the streams of steps that follow each other; they begin on a stage when it has been updated."""
        tree, counts = reduction_tree(self.spec, NO_REDUCTIONS), [stream.count for stream in self.streams]
        length = _BETWEEN + max(stream.last_slot for stream in self.streams)
        found = copy(self)
        found.steps, found.streams = steps, []
        for stream in self.streams:
            updates = [self._ends[action] for action in tree.earlier(stream.last) if action in self._ends]
            pieces = stream.pieces.copy()
            for step in range(1, steps):
                inherited = tuple((number, step, 0) for number in updates)
                for piece in stream.pieces:
                    needs = tuple((s, n + step * counts[s], grows) for s, n, grows in piece.needs)
                    slot = piece.slot + step * length
                    pieces.append(piece._replace(slot=slot, step=step, needs=needs + inherited))
            found.streams.append(replace(stream, pieces=pieces))
        return found
