"""The spec that the listings of all workers make together, so that a run can be simulated without its code.

A watcher does not have the class of the user's schedule and must not run the user's script. Each worker writes its part
of the relation (`own_boards.list_program`); the parts of all workers are the whole relation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..dependency import Action, Spec, updates_a_step
from ..dependency.indexes import split_step
from ..dependency.parallelism import Parallelism


def spec_of_listings(listings: Sequence[Mapping[str, Any]], num_microbatches: int | None = None) -> Spec:
    """Return the spec of the listings of all workers, in order of workers.

    Args:
        num_microbatches: of a smaller batch; later microbatches are left out.
    """
    count: int = num_microbatches or listings[0]["microbatches"]
    cls: type[ListedRelation] = type(listings[0]["schedule"], (ListedRelation,), _relation(listings, count))
    return cls(num_workers=len(listings), num_microbatches=count)


def _relation(listings: Sequence[Mapping[str, Any]], num_microbatches: int) -> dict[str, Any]:
    """Return the declarations of the spec's class."""
    needs: dict[Action, list[tuple[int, Action]]] = {}
    slots: dict[Action, int] = {}
    for listing in listings:
        earlier = listing.get("earlier") or [()] * len(listing["program"])
        listed = zip(listing.get("slots") or range(len(earlier)), listing["program"], earlier, strict=True)
        for slot, (name, *own), before in listed:
            action = Action.parse(name)
            if action.index < num_microbatches:
                slots[action] = slot
                parsed = [(back, Action.parse(need)) for back, need in [*((0, need) for need in own), *before]]
                needs[action] = [(back, need) for back, need in parsed if need.index < num_microbatches]
    at = {Action.parse(name): worker for worker, each in enumerate(listings) for name, *_ in each["program"]}
    handovers = [tuple(map(Action.parse, each)) for each in listings[0].get("handovers", ())]
    at |= {hand: at[last] for last, hand, _ in handovers}
    done: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in sorted(slots, key=slots.__getitem__):
        done[action.stage, action.index].append(action)
    first = listings[0]
    hosts = {(stage, route): worker for worker, own in enumerate(listings) for stage, route in own["shards"]}
    return {
        "needs_of": needs,
        "slots": slots,
        "done": {at: tuple(a for a in actions if a.kind.per_microbatch) for at, actions in done.items()},
        "hosts": hosts,
        "at": at,
        "handovers": tuple(handovers),
        "num_stages": 1 + max(stage for stage, _ in hosts),
        "num_routes": 1 + max(route for _, route in hosts),
        "routes": first["routes"],
        "order": first["order"],
        "period": first.get("period", 0),
        "synchronous": "period" not in first,
        "update_every": first.get("update_every", Spec.update_every),
        "parallelism": Parallelism(replicas=first.get("replicas", 1), slices=tuple(first.get("slices", (1,)))),
    }


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
    period: ClassVar[int]

    def place(self, stage: int, route: int) -> int:
        return self.hosts[stage, route]

    def worker(self, action: Action) -> int:
        found = self.at.get(self._within(action)[1])
        return super().worker(action) if found is None else found

    def own_actions(self, worker: int) -> Iterator[Action]:
        if not self.synchronous:
            return super().own_actions(worker)
        return (action for action in self.slots if self.at[action] == worker)

    def route(self, microbatch: int) -> int:
        return self.routes[split_step(microbatch, self.num_microbatches)[1]] if self.routes else 0

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        step, m = split_step(microbatch, self.num_microbatches)
        done = self.done[stage, m]
        return tuple([self._of(step, action) for action in done]) if step else done

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
