"""A snapshot of what a stage's modules hold besides trained weights, to compare with later and to restore."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .attributes import Attributes, set_attributes
from .inner_state import Place


class ModuleState:
    """What modules hold besides trained parameters at this moment: buffers such as running means, counters, modes.

    Tensors are copied, because their versions do not tell which of them a forward writes (batch normalisation does not
    raise them). Restoring replaces tensors; writing the old values in place would change what backward needs.

    Args:
        called: modules whose hooks are kept; also stand-ins for modules of other stages are called.
        places: attributes whose inside is kept too; by default all whose type is known.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        called: Sequence[nn.Module] | None = None,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.called = modules if called is None else called
        # The attributes of a ScriptModule cannot be replaced, and its forward does not change them.
        self.modules = modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = Attributes(modules, self.called, places)
        self._buffers = [dict(module._buffers) for module in modules]
        tensors = [
            tensor
            for held in (*(attributes for _, attributes in self._attributes.held), *self._buffers)
            for tensor in held.values()
            if isinstance(tensor, Tensor) and not tensor.requires_grad
        ]
        self._copies = {tensor: tensor.clone() for tensor in tensors}
        self._versions = {tensor: tensor._version for tensor in self._copies}
        #: (weight, copy) of weights that forwards write, from before the first of these forwards
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        #: buffers that updates write too, and copies from behind the update of the previous step
        self._of_updates: list[Tensor] = []
        self._updated: list[tuple[Tensor, Tensor]] = []

    def leave(self, buffers: Iterable[Tensor]) -> None:
        """Do not restore these buffers until `note_weights` has copied them."""
        self._of_updates = list(buffers)

    def note_weights(self, weights: Iterable[nn.Parameter]) -> None:
        """Copy these weights, and the buffers given to `leave`, once: the update of the previous step is done."""
        self._weights = self._weights or [(weight, weight.detach().clone()) for weight in weights]
        self._updated = self._updated or [(buffer, buffer.clone()) for buffer in self._of_updates]

    def forget_weights(self) -> None:
        """Do not restore weights: another update has written them."""
        self._weights = []

    def changed(self, is_same: Callable[[Any, Any], bool] = operator.is_) -> list[nn.Module]:
        """Return the modules that hold something else now; `is_same(now, then)` compares replaced objects."""
        found, changed = [], self._attributes.changed(is_same)
        for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True):
            same = module not in changed and len(module._buffers) == len(buffers)
            same = same and all(is_same(module._buffers.get(name), buffer) for name, buffer in buffers.items())
            held = [v for v in (*attributes.values(), *buffers.values()) if isinstance(v, Tensor) and v in self._copies]
            if not same or not all(v.layout is torch.strided and torch.equal(v, self._copies[v]) for v in held):
                found.append(module)
        return found

    def written(self) -> list[nn.Module]:
        """Return the modules that have changed, and those whose buffers were written, even with equal values."""
        changed = dict.fromkeys(self.changed())
        raised = {tensor for tensor, version in self._versions.items() if tensor._version != version}
        return [m for m in self.modules if m in changed or not raised.isdisjoint(m._buffers.values())]

    def counted_in(self, under_way: ModuleState) -> str:
        """Name what has changed since then although forwards under way have read it; "" if nothing has.

        Of plain attributes only growing integers count: others may be notes that nobody reads, such as the last shape.
        """
        if any(not torch.equal(weight, before) for weight, before in self._weights):
            return "a parameter"
        pairs = zip(self._attributes.held, self._buffers, under_way._attributes.held, strict=True)
        for (module, attributes), buffers, (_, theirs) in pairs:
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is not buffer or (buffer in self._copies and not torch.equal(buffer, self._copies[buffer])):
                    return f"buffer {name} of a {type(module).__name__}"
            for name, value in attributes.items():
                later = vars(module).get(name), theirs.get(name)
                if type(value) is int and all(type(each) is int and each > value for each in later):
                    return f"{name} of a {type(module).__name__}"
        return ""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which the modules have this state; on leaving it they get back the present one."""
        now = self._attributes.now()
        self._attributes.put_back()
        for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True):
            set_attributes(module, self._copied(attributes) | {"_buffers": self._copied(buffers)})
        try:
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Restore this state."""
        for weight, before in self._weights:
            weight.data.copy_(before)  # by `data`: autograd graphs of other microbatches have recorded the version
        left, updated = dict.fromkeys(self._of_updates), dict(self._updated)
        for tensor, copy in [(t, copy) for t, copy in self._copies.items() if t not in left] + [*updated.items()]:
            tensor.data = copy.clone()  # not in place: graphs of other microbatches may have saved the old memory
        self._attributes.put_back()
        for module, buffers in zip(self.modules, self._buffers, strict=True):
            module._buffers.update(buffers)

    def _copied(self, held: Mapping[str, Any]) -> dict[str, Any]:
        return {k: self._copies.get(v, v) if isinstance(v, Tensor) else v for k, v in held.items()}


def equal(some: Any, other: Any) -> bool:
    """Return whether two values of an attribute are the same object or have equal numbers."""
    if some is other:
        return True
    if type(some) is not type(other):
        return False
    if isinstance(some, Tensor):
        dense = some.layout is torch.strided is other.layout
        return dense and some.dtype == other.dtype and some.device == other.device and torch.equal(some, other)
    return isinstance(some, (bool, int, float, str, torch.Size)) and bool(some == other)
