"""The spec that the listings of all workers make together, so that a run can be simulated without its code.

A watcher does not have the class of the user's schedule and must not run the user's script. Each worker writes its part
of the relation (`own_boards.list_program`); the parts of all workers are the whole relation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..dependency import Action, Spec, updates_a_step
from ..dependency.action import split_step
from ..dependency.declared import Parallelism


def spec_of_listings(listings: Sequence[Mapping[str, Any]], num_microbatches: int | None = None) -> Spec:
    """Return the spec of the listings of all workers, in order of workers.

    Args:
        num_microbatches: of a smaller batch; later microbatches are left out.
    """
    first = listings[0]
    count: int = num_microbatches or first["microbatches"]
    hosts = {(stage, route): worker for worker, own in enumerate(listings) for stage, route in own["shards"]}
    stream = {name: first[name] for name in ("period", "update_every") if name in first}
    own = _nodes(listings, count) | stream | {
        "hosts": hosts,
        "num_stages": 1 + max(stage for stage, _ in hosts),
        "num_routes": 1 + max(route for _, route in hosts),
        "routes": first["routes"],
        "order": first["order"],
        "synchronous": not stream,
        "parallelism": Parallelism(replicas=first["replicas"], slices=tuple(first["slices"])),
    }  # fmt: skip
    cls: type[ListedRelation] = type(first["schedule"], (ListedRelation,), own)
    return cls(num_workers=len(listings), num_microbatches=count)


def _nodes(listings: Sequence[Mapping[str, Any]], num_microbatches: int) -> dict[str, Any]:
    """Return the actions of a step with their needs, slots and workers."""
    needs, slots, at = dict[Action, list[tuple[int, Action]]](), dict[Action, int](), dict[Action, int]()
    for worker, listing in enumerate(listings):
        earlier = listing.get("earlier") or [()] * len(listing["program"])
        numbered = listing.get("slots") or range(len(earlier))
        for slot, (name, *own), before in zip(numbered, listing["program"], earlier, strict=True):
            at[action := Action.parse(name)] = worker
            if action.index < num_microbatches:
                slots[action] = slot
                parsed = [(back, Action.parse(need)) for back, need in [*((0, need) for need in own), *before]]
                needs[action] = [(back, need) for back, need in parsed if need.index < num_microbatches]
    handovers = tuple(tuple(map(Action.parse, each)) for each in listings[0].get("handovers", ()))
    done: dict[tuple[int, int], tuple[Action, ...]] = defaultdict(tuple)
    for action in sorted((a for a in slots if a.kind.per_microbatch), key=slots.__getitem__):
        done[action.stage, action.index] += (action,)
    at |= {hand: at[last] for last, hand, _ in handovers}
    return {"needs_of": needs, "slots": slots, "at": at, "done": done, "handovers": handovers}


class ListedRelation(Spec):
    """A schedule with a relation that is listed action by action."""

    #: (number of steps before, action)
    needs_of: ClassVar[Mapping[Action, Sequence[tuple[int, Action]]]]
    slots: ClassVar[Mapping[Action, int]]
    #: the actions by (stage, microbatch of a step), in order
    done: ClassVar[Mapping[tuple[int, int], tuple[Action, ...]]]
    #: worker by (stage, route)
    hosts: ClassVar[Mapping[tuple[int, int], int]]
    #: worker by action: several may share the microbatches of one that has died
    at: ClassVar[Mapping[Action, int]]
    #: by microbatch, if there are several
    routes: ClassVar[Sequence[int]]
    #: of a stream of overlapping steps: growth of slots from step to step
    period: ClassVar[int] = 0

    def place(self, stage: int, route: int) -> int:
        return self.hosts[stage, route]

    def worker(self, action: Action) -> int:
        found = self.at.get(self._within(action)[1])
        return super().worker(action) if found is None else found

    def own_actions(self, worker: int) -> Iterator[Action]:
        if self.period:
            return super().own_actions(worker)
        return (action for action in self.slots if self.at[action] == worker)

    def route(self, microbatch: int) -> int:
        return self.routes[split_step(microbatch, self.num_microbatches)[1]] if self.routes else 0

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        step, m = split_step(microbatch, self.num_microbatches)
        return tuple([self._of(step, action) for action in self.done[stage, m]]) if step else self.done[stage, m]

    def after(self, action: Action) -> Iterable[Action]:
        step, own = self._within(action)
        found = self.needs_of.get(own, ())
        return [self._of(step - back, need) for back, need in found if self.orders(need) and step >= back]

    def slot(self, action: Action) -> int:
        step, own = self._within(action)
        return self.slots[own] + step * self.period

    def version(self, stage: int, microbatch: int) -> int:
        return 0  # it is in the listed needs

    def _within(self, action: Action) -> tuple[int, Action]:
        """Return the step of an action of a stream, and the action within that step."""
        step, index = split_step(action.index, self._per_step(action))
        return step, action._replace(index=index)

    def _of(self, step: int, action: Action) -> Action:
        return action._replace(index=action.index + step * self._per_step(action))

    def _per_step(self, action: Action) -> int:
        return self.num_microbatches if action.kind.per_microbatch else updates_a_step(self)
