"""What a forward leaves in the model for the next one: each stage has a copy of the model, so one stage must leave and
use it, or all must do the same.

Tensors are found by a second forward, run where the first has left its attributes: what it takes of them is carried
over. Numbers and lists are found by looking before and behind each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..workers.compute.attributes import Attributes
from ..workers.compute.inner_state import OF_TORCH, has_generator
from .hollow import NeedsField, observable
from .observation import Carried, Depends, Event, Observation
from .observer import Observer
from .skeleton import Skeleton
from .trees import mapped, tensors

_PLAIN = (bool, int, float, complex, str, bytes)


def look(observer: Observer, observation: Observation, skeleton: Skeleton, before: Attributes, given: Any) -> None:
    """Complete an observation by what its forward has left, while the model still has it.

    Args:
        before: what the modules' attributes were.
        given: (args, kwargs), untouched.
    """
    inside = {module for block in skeleton.blocks for module in block.modules()}
    observation.changed = before.changed_places()
    now_other = {module for module, _ in observation.changed}
    changed = [module for module, _ in before.held if module in now_other]
    skeleton.counting |= now_other  # a second forward may change them back
    skeleton.exchanged |= dict.fromkeys(replaced := skeleton.replaced_buffers())
    around = [module for module in changed if module not in inside] or any(m not in inside for m, _ in replaced)
    writes = any(event.depends is Depends.FIELDS and event.writes and event.buffers for event in observation.events)
    observation.to_the_end = bool(around) or writes
    inner = [f"{skeleton.name_of(module)}." for module in changed if module in inside]
    observation.renamed = [
        name for name, parameter in skeleton.parameters.items()
        if name.startswith(tuple(inner)) and skeleton.owned(name) is not parameter
    ]  # fmt: skip
    homes = _homes(observation.calls)
    drawing = [module for module, events in homes.items() if len(events) > 1 and has_generator(module)]
    names = {module: f"the generator of {skeleton.name_of(module)}" for module in drawing}
    observation.carried += [Carried(names[module], homes[module]) for module in drawing]
    counters = [module for module in changed if module not in inside or len(homes.get(module, ())) > 1]
    left = _left(observer, skeleton, changed)
    if not left and not counters:
        return
    given = mapped(given, observable)
    again = _Again(skeleton, given, left, counters)
    with suppress(Exception):  # what it used before that is known
        again.run(*mapped(given, lambda tensor: tensor))
    observation.carried += [Carried(what, [made, _first(observation, used)]) for (what, made), used in again.used]
    for module, event in again.counted:
        events = homes.get(module, []) if module in inside else observation.calls
        observation.carried.append(Carried(f"what {skeleton.name_of(module)} counts", [event, *events]))


def _first(observation: Observation, event: Event) -> Event:
    """Return what an event of the second forward was in the first one: the same call of a block, if there was one, or
    the same event, if the first went the same way so far."""
    there = observation.calls if event.is_block else observation.events
    place = event.position if event.is_block else event.index
    same = there[place] if place < len(there) else event
    alike = (same.func, same.module, same.position) == (event.func, event.module, event.position)
    return same if alike else event


def _homes(calls: Iterable[Event]) -> dict[nn.Module, list[Event]]:
    """Return by module the calls of blocks that it is a part of."""
    homes: dict[nn.Module, list[Event]] = {}
    for event in calls:
        assert event.module is not None
        for module in event.module.modules():
            homes.setdefault(module, []).append(event)
    return homes


def _left(observer: Observer, skeleton: Skeleton, changed: Iterable[nn.Module]) -> dict[int, tuple[str, Event]]:
    """Return the tensors (their ids) that the forward has left and only some stages can compute: name, and who did."""
    held = [(module, name, value) for module in changed for name, value in vars(module).items()]
    held += [(module, name, module._buffers.get(name)) for module, name in skeleton.replaced_buffers()]
    found = {}
    for module, name, value in held:
        for tensor in tensors(value) if name not in OF_TORCH else ():
            if observer.is_hollow(tensor):
                raise NeedsField(f"attribute {name} of {skeleton.name_of(module)} is made of a field")
            made = observer.made_by(tensor)
            if made is not None and made.depends is not Depends.FIELDS:
                found[id(tensor)] = f"attribute {name} of {skeleton.name_of(module)}", made
    return found


class _Again(Observer):
    """A forward behind another one.

    Args:
        left: tensors of the first, by their ids.
        counters: modules to look at before and behind each block.

    Attributes:
        used: what was taken of them, and by which event.
        counted: the modules whose numbers a block has changed, with its event.
    """

    def __init__(
        self, skeleton: Skeleton, given: Any, left: dict[int, tuple[str, Event]], counters: Sequence[nn.Module]
    ) -> None:
        super().__init__(skeleton, given)
        self._left, self._counters = left, counters
        self.used: list[tuple[tuple[str, Event], Event]] = []
        self.counted: list[tuple[nn.Module, Event]] = []

    def read(self, event: Event | None, tensor: Tensor) -> None:
        if (found := self._left.get(id(tensor))) is None:
            super().read(event, tensor)
        elif event is not None:
            self.used.append((found, event))

    def _block(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = [_numbers(counter) for counter in self._counters]
        result = super()._block(module, forward, args, kwargs)
        now = [_numbers(counter) for counter in self._counters]
        pairs = zip(self._counters, before, now, strict=True)
        self.counted += [(counter, self.calls[-1]) for counter, some, others in pairs if some != others]
        return result


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return what a module has in plain attributes."""
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name not in OF_TORCH}
