"""A worker's program as data, and a spec made of the programs of all: what ran can be simulated without its code.

A watcher cannot have the user's schedule class, and must not run the user's script to get it. Each worker writes the
relation that it derived; together they are the whole relation again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..dependency import Action, ConfigError, Entry, I, Order, R, Spec
from ..schedules import SCHEDULES

_NAMES = {cls: name for name, cls in SCHEDULES.items()}


def name_of(spec: Spec) -> str:
    """Return the schedule's name as it is typed, or that of its class."""
    return _NAMES.get(type(spec), type(spec).__name__)


def list_program(spec: Spec, worker: int, order: Order, program: Iterable[Entry]) -> dict[str, Any]:
    """Return the listing of what `worker` runs in a step, in its order, and what each action needs, for JSON."""
    entries = [entry for entry in program if entry.action.kind.per_microbatch]
    return {
        "schedule": name_of(spec),
        "worker": worker,
        "microbatches": spec.num_microbatches,
        "order": order,
        "shards": spec.hosted(worker),
        "routes": [spec.route(m) for m in range(spec.num_microbatches)] if spec.num_routes > 1 else [],
        "program": [
            [str(entry.action), *map(str, entry.own), *(str(need.action) for need in entry.pulled)]
            for entry in entries
        ],
    }  # fmt: skip


def spec_of_listings(listings: Sequence[Mapping[str, Any]], num_microbatches: int | None = None) -> Spec:
    """Return the spec that the listings of all workers, in order, are of.

    Args:
        num_microbatches: leave out all microbatches from this one on, as a batch of fewer rows does.

    Raises:
        ConfigError: they do not fit together.
    """
    try:
        relation = _Relation(listings, num_microbatches)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"listing: cannot be read: {error}") from error
    cls: type[Listed] = type(listings[0]["schedule"], (Listed,), {"relation": relation})
    return cls(num_workers=len(listings), num_microbatches=relation.num_microbatches)


class _Relation:
    def __init__(self, listings: Sequence[Mapping[str, Any]], num_microbatches: int | None) -> None:
        self.order: Order = listings[0]["order"]
        self.num_microbatches: int = num_microbatches or listings[0]["microbatches"]
        self.routes: list[int] = listings[0]["routes"]
        self.place: dict[tuple[int, int], int] = {
            (stage, route): worker for worker, own in enumerate(listings) for stage, route in own["shards"]
        }
        self.needs: dict[Action, list[Action]] = {}
        self.slots: dict[Action, int] = {}
        for listing in listings:
            for slot, (name, *needs) in enumerate(listing["program"]):
                action = Action.parse(name)
                if action.microbatch < self.num_microbatches:
                    self.slots[action] = slot
                    parsed = map(Action.parse, needs)
                    self.needs[action] = [need for need in parsed if need.microbatch < self.num_microbatches]
        self.num_stages: int = 1 + max(stage for stage, _ in self.place)
        self.num_routes: int = 1 + max(route for _, route in self.place)

    @cached_property
    def recomputed(self) -> set[int]:
        return {action.stage for action in self.slots if action.kind is R}


class Listed(Spec):
    """A schedule whose relation is written down action by action."""

    relation: ClassVar[_Relation]

    @property
    def num_stages(self) -> int:
        return self.relation.num_stages

    @property
    def num_routes(self) -> int:
        return self.relation.num_routes

    @property
    def order(self) -> Order:
        return self.relation.order

    def place(self, stage: int, route: int) -> int:
        return self.relation.place[stage, route]

    def route(self, microbatch: int) -> int:
        return self.relation.routes[microbatch] if self.relation.routes else 0

    def splits(self, stage: int, microbatch: int) -> bool:
        return I(stage, microbatch) in self.relation.slots

    def recomputes(self, stage: int) -> bool:
        return stage in self.relation.recomputed

    def after(self, action: Action) -> Iterable[Action]:
        return [need for need in self.relation.needs.get(action, ()) if need.kind.per_microbatch]

    def slot(self, action: Action) -> int:
        return self.relation.slots[action]
