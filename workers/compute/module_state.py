"""What a stage's modules hold besides weights, as it was at one moment: to compare with later, and to put back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .attributes import Attributes, set_attributes
from .inner_state import Place

#: a tensor larger than this that the first forward has left unchanged is not copied for later forwards
_LARGE_BYTES = 2**20


class ModuleState:
    """What modules hold besides parameters: buffers such as running means, counters and modes, as they are now.

    Tensors are copied: which of them a forward writes cannot be seen from their versions (batch normalisation does
    not raise them), and to write values back afterwards would change in place what backward needs.

    Args:
        called: modules whose hooks count: those that only stand there for other stages' are called as well.
        constant: tensors that need no copy, with their versions.
        places: attributes that are looked into; by default all that can be.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        called: Sequence[nn.Module] | None = None,
        constant: Mapping[Tensor, int] = {},
        places: Sequence[Place] | None = None,
    ) -> None:
        self.called = modules if called is None else called
        # Scripts change nothing of themselves.
        self.modules = modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = Attributes(modules, self.called, places)
        self._buffers = [dict(module._buffers) for module in modules]
        tensors = [
            tensor
            for held in (*(attributes for _, attributes in self._attributes.held), *self._buffers)
            for tensor in held.values()
            if isinstance(tensor, Tensor) and not tensor.requires_grad
        ]
        self._shared = {tensor: constant[tensor] for tensor in tensors if constant.get(tensor) == tensor._version}
        frozen = [p for module in modules for p in module._parameters.values() if p is not None and not p.requires_grad]
        self._shared |= {parameter: parameter._version for parameter in frozen}
        self._copies = {tensor: tensor.clone() for tensor in tensors if tensor not in self._shared}
        self._versions = {tensor: tensor._version for tensor in self._copies}
        #: weights that forwards write, as they were before the first of them
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        #: buffers that updates write, too, and as the update of the step before has left them
        self._of_updates: list[Tensor] = []
        self._updated: list[tuple[Tensor, Tensor]] = []

    def leave(self, buffers: Iterable[Tensor]) -> None:
        """Leave these buffers as they are when all else is put back, until `note_weights` has held them."""
        self._of_updates = list(buffers)

    def note_weights(self, weights: Iterable[nn.Parameter]) -> None:
        """Hold what weights are now, once: the update of the step before has been made."""
        self._weights = self._weights or [(weight, weight.detach().clone()) for weight in weights]
        self._updated = self._updated or [(buffer, buffer.clone()) for buffer in self._of_updates]

    def forget_weights(self) -> None:
        """Leave weights as they are when all else is put back: another update has written them."""
        self._weights = []

    def constant(self) -> dict[Tensor, int]:
        """Return the large tensors that still are what they were, with their versions."""
        dense = [(tensor, copy) for tensor, copy in self._copies.items() if tensor.layout is torch.strided]
        large = [(tensor, copy) for tensor, copy in dense if tensor.nbytes > _LARGE_BYTES]
        return {tensor: tensor._version for tensor, copy in large if torch.equal(tensor, copy)}

    def changed(self, is_same: Callable[[Any, Any], bool] = operator.is_) -> list[nn.Module]:
        """Return the modules that hold something else now; `is_same(now, then)` judges what has been exchanged."""
        found, changed = [], self._attributes.changed(is_same)
        for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True):
            same = module not in changed and len(module._buffers) == len(buffers)
            same = same and all(is_same(module._buffers.get(name), buffer) for name, buffer in buffers.items())
            held = [v for v in (*attributes.values(), *buffers.values()) if isinstance(v, Tensor) and v in self._copies]
            if not same or not all(v.layout is torch.strided and torch.equal(v, self._copies[v]) for v in held):
                found.append(module)
        return found

    def written(self) -> list[nn.Module]:
        """Return the modules that have changed, and those whose buffers were written with what was there before."""
        changed = dict.fromkeys(self.changed())
        raised = {tensor for tensor, version in self._versions.items() if tensor._version != version}
        return [m for m in self.modules if m in changed or not raised.isdisjoint(m._buffers.values())]

    def counted_in(self, under_way: ModuleState) -> str:
        """Say what holds something else than then that the forwards under way have read; nothing is an empty text.

        Of attributes those that only count: others may be notes that nobody reads, such as the last shape.
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
        """Return a context in which the modules hold what they held then, and after which they hold what they do now.

        Raises:
            RuntimeError: a frozen parameter, or a large tensor that was constant so far, has been written.
        """
        for tensor, version in self._shared.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"a layer wrote its frozen parameter, or its buffer that the first forward left alone, of shape "
                    f"{tuple(tensor.shape)}: what a forward was computed from is gone and cannot be recomputed; make "
                    "it a buffer that is smaller or written always, or use a schedule that does not recompute"
                )
        now = self._attributes.now()
        self._attributes.put_back()
        for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True):
            set_attributes(module, self._copied(attributes) | {"_buffers": self._copied(buffers)})
        try:
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Make the modules hold what they held then."""
        for weight, before in self._weights:
            weight.data.copy_(before)  # by `data`: graphs of microbatches under way have noted the version
        left, updated = dict.fromkeys(self._of_updates), dict(self._updated)
        for tensor, copy in [(t, copy) for t, copy in self._copies.items() if t not in left] + [*updated.items()]:
            tensor.data = copy.clone()  # not written in place: other microbatches may have saved it
        self._attributes.put_back()
        for module, buffers in zip(self.modules, self._buffers, strict=True):
            module._buffers.update(buffers)

    def _copied(self, held: Mapping[str, Any]) -> dict[str, Any]:
        return {k: self._copies.get(v, v) if isinstance(v, Tensor) else v for k, v in held.items()}


def equal(some: Any, other: Any) -> bool:
    """Tell whether what an attribute holds is the same, or has the same numbers."""
    if some is other:
        return True
    if type(some) is not type(other):
        return False
    if isinstance(some, Tensor):
        dense = some.layout is torch.strided is other.layout
        return dense and some.dtype == other.dtype and some.device == other.device and torch.equal(some, other)
    return isinstance(some, (bool, int, float, str, torch.Size)) and bool(some == other)
