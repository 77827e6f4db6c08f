"""The operators of an observed forward: run on placeholders, and reported to the observer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ...workers.compute.torch_internals import OperatorMode
from .observation import Event
from .placeholder import NEEDS_NUMBERS, Placeholder, PlaceholderFactory, on_ones, on_shapes, without_masks
from .trees import tensors

_LARGE_NUMEL = 2**20


class ForwardRecord(Protocol):
    """The observer, as this module uses it."""

    #: the event that runs now
    current: Event | None

    def read(self, event: Event | None, tensor: Tensor) -> None: ...

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None: ...


class OperatorObserver(OperatorMode):
    """A dispatch mode that sees every operator, also those inside blocks."""

    def __init__(self, observer: ForwardRecord, factory: PlaceholderFactory) -> None:
        super().__init__()
        self._observer, self._placeholders = observer, factory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        observer, given = self._observer, tensors((args, kwargs))
        # The argument of lift_fresh is what `torch.tensor` has just made of Python's numbers: no input of an event.
        is_new = func is torch.ops.aten.lift_fresh.default and observer.current is not None
        for tensor in given if not is_new else ():
            observer.read(observer.current, tensor)
        try:
            result = self._run(func, args, kwargs, from_nothing=not given)
        except Exception as error:
            has_placeholder = any(isinstance(tensor, Placeholder) for tensor in given)
            if not has_placeholder or (isinstance(error, NEEDS_NUMBERS) and not self._in_block()):
                raise
            # Inside a block data may decide, and not every operator can run on shapes: ones show the output's shape.
            result = on_ones(func, args, kwargs, self._placeholders)
        observer.ran(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, *, from_nothing: bool) -> Any:
        if func is torch.ops.aten.index.Tensor and isinstance(args[0], Placeholder):
            args = (args[0], without_masks(args[1]))
        if from_nothing and self._in_block():
            result = self._placeholders.construct(func, args, kwargs)
            if sum(tensor.numel() for tensor in tensors(result)) > _LARGE_NUMEL:
                return result
        return on_shapes(func, args, kwargs)

    def _in_block(self) -> bool:
        current = self._observer.current
        return current is not None and current.is_block
