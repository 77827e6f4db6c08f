"""Buffers, weights and attributes that a forward may write, saved so that a forward that diverges can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...dependency import ModelError
from ...workers.compute.borders import version_of
from ...workers.compute.digest import few, sample
from ...workers.compute.module_state import Attributes
from ...workers.compute.sharing import address

_T = TypeVar("_T")
#: module and name of a buffer, the buffer, its version, its memory, and a copy
_Buffer = tuple[nn.Module, str, Tensor, int, Tensor, Tensor]
#: a weight, its version, its memory, and a copy of it or of a sample
_Weight = tuple[Tensor, int, Tensor, Tensor]


class ForwardWrites:
    """The buffers and weights that forwards write, found by the first forward in each mode and by observations.

    Args:
        modules: the modules of the stage.
        weights: returns all weights that its forwards use.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Callable[[], list[tuple[str, nn.Parameter]]]) -> None:
        self._modules, self._weights = modules, weights
        #: modes -> buffers and weights
        self._known: dict[Any, tuple[list[tuple[nn.Module, str]], list[Tensor]]] = {}
        #: buffers that have been written in any mode
        self.buffers: set[tuple[nn.Module, str]] = set()
        #: buffers and weights that observed forwards have written
        self.observed: tuple[list[tuple[nn.Module, str]], list[Tensor]] = [], []

    def expect(self, buffers: Iterable[tuple[nn.Module, str]], weights: Iterable[Tensor]) -> None:
        """Record what an observed forward has written: a real one may write equal values through `.data`, unnoticed."""
        self.observed = _joined(self.observed[0], buffers), _joined(self.observed[1], weights)
        self.buffers.update(self.observed[0])

    def before(self, modes: Any, counting: Iterable[nn.Module]) -> StateBefore:
        """Return the state that a forward in these modes may write.

        Args:
            counting: modules whose attributes change.
        """
        if (known := self._known.get(modes)) is not None:
            buffers, written = _joined(known[0], self.observed[0]), _joined(known[1], self.observed[1])
            return StateBefore(buffers, written, True, counting)
        places = [(module, name) for module in self._modules for name in module._buffers]
        weights = [weight for _, weight in self._weights()]
        return StateBefore(places, weights, few(weights), counting)

    def note(self, modes: Any, before: StateBefore) -> None:
        """Record what a completed forward has written."""
        if modes not in self._known:
            buffers = [(module, name) for module, name, *_ in before.changed_buffers()]
            self.buffers.update(buffers)
            weights = [weight for weight, *_ in before.changed_weights()]
            self._known[modes] = buffers, weights


def _joined(some: Iterable[_T], others: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys((*some, *others)))


class StateBefore:
    """Buffers, weights and attributes as they were before a forward.

    Args:
        in_full: whether weights are copied, so that they can be put back.
    """

    def __init__(
        self,
        places: Iterable[tuple[nn.Module, str]],
        weights: Iterable[Tensor],
        in_full: bool,
        counting: Iterable[nn.Module],
    ) -> None:
        held = [(module, name, module._buffers.get(name)) for module, name in places]
        there = [(m, name, b) for m, name, b in held if b is not None]
        self._buffers: list[_Buffer] = [(m, name, b, version_of(b), b.data, b.clone()) for m, name, b in there]
        self._in_full = in_full
        self._weights: list[_Weight] = [(w, version_of(w), w.data, self._part(w).clone()) for w in weights]
        self._attributes = Attributes(counting)

    def put_back(self) -> None:
        """Restore this state in the same memory, by whose addresses later checks know the tensors.

        Raises:
            ModelError: a weight was written of which only a sample was kept.
        """
        with torch.no_grad():
            for module, name, buffer, _, memory, before in self.changed_buffers():
                buffer.data = memory
                module._buffers[name] = buffer.copy_(before)
        for weight, _, memory, before in self.changed_weights():
            if not self._in_full:
                raise ModelError(
                    f"model: a block writes its weight of shape {tuple(weight.shape)} in a forward that goes another "
                    f"way than was observed and has to be run again; make it a buffer"
                )
            weight.data = memory
            weight.data.copy_(before)
        self._attributes.put_back()

    def changed_buffers(self) -> list[_Buffer]:
        """Return the buffers that have been written, even with equal values, or replaced."""
        held = self._buffers
        return [each for each in held if each[0]._buffers.get(each[1]) is not each[2] or _differ(*each[2:], each[2])]

    def changed_weights(self) -> list[_Weight]:
        """Return the weights that have been written, even with equal values, or moved to other memory."""
        return [held for held in self._weights if _differ(*held, self._part(held[0]))]

    def _part(self, weight: Tensor) -> Tensor:
        return weight.data if self._in_full else sample(weight)  # .data, so that autograd does not see the restoring


def _differ(tensor: Tensor, version: int, memory: Tensor, before: Tensor, compared: Tensor) -> bool:
    if version_of(tensor) != version or address(tensor) != address(memory):
        return True
    with torch.no_grad():
        return not torch.equal(compared, before)
