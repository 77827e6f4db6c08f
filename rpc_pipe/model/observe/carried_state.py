"""Detection of state that one forward leaves in the model for the next.

Each stage has a copy of the model, so such state must be written and read by one stage, or by all alike. Tensors are
found by observing a second forward, which begins with the attributes that the first has left: those that it reads are
carried over. Numbers and lists are found by comparing attributes before and behind each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ...workers.compute.attributes import Attributes
from ...workers.compute.inner_state import OF_TORCH, has_generator
from .observation import CarriedState, Depends, Event, Observation
from .observer import Observer
from .skeleton import Skeleton
from .trees import mapped, tensors
from .unread_fields import FieldNeeded, observable

_PLAIN = (bool, int, float, complex, str, bytes)


def find_carried_state(
    observer: Observer, observation: Observation, skeleton: Skeleton, before: Attributes, given: Any
) -> None:
    """Complete an observation with the state that its forward has left, while the model still has it.

    Args:
        before: the modules' attributes before the forward.
        given: (args, kwargs) before the forward.
    """
    inside = {module for block in skeleton.blocks for module in block.modules()}
    observation.changed = before.changed_places()
    now_other = {module for module, _ in observation.changed}
    changed = [module for module, _ in before.held if module in now_other]
    skeleton.counting |= now_other  # a second forward may restore them
    skeleton.exchanged |= dict.fromkeys(replaced := skeleton.replaced_buffers())
    around = [module for module in changed if module not in inside] or any(m not in inside for m, _ in replaced)
    writes = any(event.depends is Depends.FIELDS and event.writes and event.buffers for event in observation.events)
    observation.to_the_end = bool(around) or writes
    inner = [f"{skeleton.name_of(module)}." for module in changed if module in inside]
    observation.renamed = [
        name for name, parameter in skeleton.parameters.items()
        if name.startswith(tuple(inner)) and skeleton.owned(name) is not parameter
    ]  # fmt: skip
    calls_of = _calls_by_module(observation.calls)
    drawing = [module for module, events in calls_of.items() if len(events) > 1 and has_generator(module)]
    names = {module: f"the generator of {skeleton.name_of(module)}" for module in drawing}
    observation.carried += [CarriedState(names[module], calls_of[module]) for module in drawing]
    counters = [module for module in changed if module not in inside or len(calls_of.get(module, ())) > 1]
    left = _tensors_left(observer, skeleton, changed)
    if not left and not counters:
        return
    given = mapped(given, observable)
    again = _SecondForward(skeleton, given, left, counters)
    with suppress(Exception):  # what it has read before the error counts
        again.run(*mapped(given, lambda tensor: tensor))
    observation.carried += [
        CarriedState(what, [made, _in_first_forward(observation, used)]) for (what, made), used in again.used
    ]
    for module, event in again.counted:
        events = calls_of.get(module, []) if module in inside else observation.calls
        observation.carried.append(CarriedState(f"what {skeleton.name_of(module)} counts", [event, *events]))


def _in_first_forward(observation: Observation, event: Event) -> Event:
    """Return the event of the first forward that corresponds to one of the second.

    It is the same call of a block, or the same event if both forwards were equal so far; otherwise `event` itself.
    """
    there = observation.calls if event.is_block else observation.events
    place = event.position if event.is_block else event.index
    same = there[place] if place < len(there) else event
    alike = (same.func, same.module, same.position) == (event.func, event.module, event.position)
    return same if alike else event


def _calls_by_module(calls: Iterable[Event]) -> dict[nn.Module, list[Event]]:
    """Return, by module, the calls of the blocks that contain it."""
    calls_of: dict[nn.Module, list[Event]] = {}
    for event in calls:
        assert event.module is not None
        for module in event.module.modules():
            calls_of.setdefault(module, []).append(event)
    return calls_of


def _tensors_left(observer: Observer, skeleton: Skeleton, changed: Iterable[nn.Module]) -> dict[int, tuple[str, Event]]:
    """Return the tensors that the forward has left and not every stage computes: by id, (name, event that made it)."""
    held = [(module, name, value) for module in changed for name, value in vars(module).items()]
    held += [(module, name, module._buffers.get(name)) for module, name in skeleton.replaced_buffers()]
    found = {}
    for module, name, value in held:
        for tensor in tensors(value) if name not in OF_TORCH else ():
            if observer.is_unread(tensor):
                raise FieldNeeded(f"attribute {name} of {skeleton.name_of(module)} is made of a field")
            made = observer.made_by(tensor)
            if made is not None and made.depends is not Depends.FIELDS:
                found[id(tensor)] = f"attribute {name} of {skeleton.name_of(module)}", made
    return found


class _SecondForward(Observer):
    """The observation of a second forward.

    Args:
        left: tensors that the first has left, by their ids.
        counters: modules whose attributes are compared before and behind each block.

    Attributes:
        used: the tensors that were read, with the reading events.
        counted: the modules whose attributes a block has changed, with its event.
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
    """Return the plain attributes of a module."""
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name not in OF_TORCH}
