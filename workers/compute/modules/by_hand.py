"""Values that differ where a weight or a module was changed by hand. No number is read, and no device waited for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ....dependency import Kind
from .module_state import OF_TORCH

#: types of attributes that are changed by hand
PLAIN = frozenset((bool, int, float, str))
#: where a module has the hooks of its calls
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OfWeight(NamedTuple):
    """A value that differs if a weight was changed, except through `.data`."""

    version: int
    address: int
    trained: bool
    #: how many its gradient has
    hooks: int

    @classmethod
    def now(cls, weight: Tensor) -> OfWeight:
        hooks = len(weight._backward_hooks or ()) + len(getattr(weight, "_post_accumulate_grad_hooks", None) or ())
        return cls(weight._version, weight.data_ptr() * Kind.stay, weight.requires_grad, hooks)


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return values that differ if a module was changed by hand, by name: mode, plain attributes, and buffers."""
    held = vars(module)
    plain = {name: held[name] for name in held.keys() - OF_TORCH if type(held[name]) in PLAIN}
    buffers = (held.get("_buffers") or {}).items()
    return {"training": held.get("training")} | plain | {n: _of_buffer(b) for n, b in buffers if b is not None}


def _of_buffer(buffer: Tensor) -> tuple[int, int]:
    """Return a state that differs if a buffer was written, except through `.data` or numpy."""
    return id(buffer), -1 if buffer.is_inference() else buffer._version
