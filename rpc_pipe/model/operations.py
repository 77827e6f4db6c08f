"""The operators of one forward on shapes, as torch's dispatcher sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..workers.compute.operators import OperatorMode
from .absent import NEEDS_NUMBERS, Absent, Shapes, on_ones, on_shapes, without_masks
from .observation import Event
from .trees import tensors

_LARGE = 2**20


class Notes(Protocol):
    """Whoever keeps the record of a forward."""

    #: the event that runs now
    current: Event | None

    def read(self, event: Event | None, tensor: Tensor) -> None: ...

    def refuse_hollow(self, event: Event | None, given: Sequence[Tensor] = ()) -> None: ...

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None: ...


class Operators(OperatorMode):
    """Sees every operator below the torch functions, also inside blocks."""

    def __init__(self, observer: Notes, shapes: Shapes) -> None:
        super().__init__()
        self._observer, self._shapes = observer, shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        observer, given = self._observer, tensors((args, kwargs))
        # What `torch.tensor` has just made out of Python's numbers is nothing that an event takes.
        is_new = func is torch.ops.aten.lift_fresh.default and observer.current is not None
        for tensor in given if not is_new else ():
            observer.read(observer.current, tensor)
        try:
            result = self._run(func, args, kwargs, from_nothing=not given)
        except Exception as error:
            absent = any(isinstance(tensor, Absent) for tensor in given)
            if not absent or (isinstance(error, NEEDS_NUMBERS) and not self._in_block()):
                raise
            observer.refuse_hollow(None, given)
            # What a block does by its numbers is its own business, and not every operator knows shapes alone:
            # any numbers show the shape of its output.
            result = on_ones(func, args, kwargs, self._shapes)
        observer.ran(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, *, from_nothing: bool) -> Any:
        if func is torch.ops.aten.index.Tensor and isinstance(args[0], Absent):
            args = (args[0], without_masks(args[1]))
        if from_nothing and self._in_block():
            result = self._shapes.without_numbers(func, args, kwargs)
            if sum(tensor.numel() for tensor in tensors(result)) > _LARGE:
                return result
        return on_shapes(func, args, kwargs)

    def _in_block(self) -> bool:
        current = self._observer.current
        return current is not None and current.is_block
