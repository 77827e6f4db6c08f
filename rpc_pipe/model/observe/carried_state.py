"""Detection of state that one forward leaves in the model for the next.

Each stage has a copy of the model, so such state must be written and read by one stage, or by all alike. Tensors are
found by observing a second forward, which begins with the attributes that the first has left: those that it reads are
carried over.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ...workers.compute.module_state import OF_TORCH, Attributes
from .observation import CarriedState, Depends, Event, Observation
from .observer import Observer
from .skeleton import Skeleton
from .trees import mapped, tensors


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
    left = _tensors_left(observer, skeleton, changed)
    if not left:
        return
    given = mapped(given, Tensor.clone)
    again = _SecondForward(skeleton, given, left)
    with suppress(Exception):  # what it has read before the error counts
        again.run(*mapped(given, lambda tensor: tensor))
    observation.carried += [
        CarriedState(what, [made, _in_first_forward(observation, used)]) for (what, made), used in again.used
    ]


def _in_first_forward(observation: Observation, event: Event) -> Event:
    """Return the event of the first forward that corresponds to one of the second.

    It is the same call of a block, or the same event if both forwards were equal so far; otherwise `event` itself.
    """
    there = observation.calls if event.is_block else observation.events
    place = event.position if event.is_block else event.index
    same = there[place] if place < len(there) else event
    alike = (same.func, same.module, same.position) == (event.func, event.module, event.position)
    return same if alike else event


def _tensors_left(observer: Observer, skeleton: Skeleton, changed: Iterable[nn.Module]) -> dict[int, tuple[str, Event]]:
    """Return the tensors that the forward has left and not every stage computes: by id, (name, event that made it)."""
    held = [(module, name, value) for module in changed for name, value in vars(module).items()]
    held += [(module, name, module._buffers.get(name)) for module, name in skeleton.replaced_buffers()]
    found = {}
    for module, name, value in held:
        for tensor in tensors(value) if name not in OF_TORCH else ():
            made = observer.made_by(tensor)
            if made is not None and made.depends is not Depends.FIELDS:
                found[id(tensor)] = f"attribute {name} of {skeleton.name_of(module)}", made
    return found


class _SecondForward(Observer):
    """The observation of a second forward.

    Args:
        left: tensors that the first has left, by their ids.

    Attributes:
        used: the tensors that were read, with the reading events.
    """

    def __init__(self, skeleton: Skeleton, given: Any, left: dict[int, tuple[str, Event]]) -> None:
        super().__init__(skeleton, given)
        self._left = left
        self.used: list[tuple[tuple[str, Event], Event]] = []

    def read(self, event: Event | None, tensor: Tensor) -> None:
        if (found := self._left.get(id(tensor))) is None:
            super().read(event, tensor)
        elif event is not None:
            self.used.append((found, event))
