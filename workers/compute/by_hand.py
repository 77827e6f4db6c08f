"""What a user changes by hand between two steps: weights, whether they are trained, modes, numbers and hooks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from .module_state import OF_TORCH
from .shard import Shard

#: types of attributes that are changed by hand
PLAIN = frozenset((bool, int, float, str))
#: where a module has the hooks of its calls
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OfWeight(NamedTuple):
    """What tells whether a weight was changed, but for what is written through `.data`."""

    version: int
    address: int
    trained: bool
    #: how many its gradient has
    hooks: int

    @classmethod
    def now(cls, weight: Tensor) -> OfWeight:
        hooks = len(weight._backward_hooks or ()) + len(getattr(weight, "_post_accumulate_grad_hooks", None) or ())
        return cls(weight._version, weight.data_ptr(), weight.requires_grad, hooks)


class ByHand:
    """Takes note of a shard as it is, and says what has been changed since. It waits for no device."""

    def __init__(self, shard: Shard) -> None:
        written = set(shard.written_weights)
        self._parameters = [
            (name, p, OfWeight.now(p))
            for name, p in shard.updating.parameters.items()
            if p not in written  # by forwards, those of an evaluation too
        ]
        self._modules = [(module, module.training, _held(module)) for module in shard.slice.modules]

    def changed(self, has_evaluated: bool) -> str:
        """Say what has been changed, or nothing.

        Args:
            has_evaluated: whether forwards have run since, which may have written notes of their own.
        """
        for name, parameter, before in self._parameters:
            weight = OfWeight.now(parameter)
            if weight[:2] != before[:2]:
                return f"parameter {name} was changed"
            if weight.trained != before.trained:
                return f"requires_grad of parameter {name} was changed"
            if weight.hooks != before.hooks:
                return f"a hook of parameter {name} was registered or removed"
        for module, training, numbers in self._modules:
            kind = type(module).__name__
            if module.training != training:
                return f"the mode of a {kind} was changed"
            now = {} if has_evaluated else _held(module)
            if not has_evaluated and now != numbers:
                names = sorted(name for name in now.keys() | numbers.keys() if now.get(name) != numbers.get(name))
                return f"{names[0]} of a {kind} was changed"
        return ""


def _held(module: nn.Module) -> dict[str, Any]:
    """Return the numbers of a module, and what tells whether its buffers were changed."""
    buffers = [(name, buffer) for name, buffer in vars(module).get("_buffers", {}).items() if buffer is not None]
    versions = {name: (id(buffer), -1 if buffer.is_inference() else buffer._version) for name, buffer in buffers}
    return versions | numbers_of(module)


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, and how many hooks of its calls it has."""
    held = vars(module)
    found = {name: value for name, value in held.items() if type(value) in PLAIN and name not in OF_TORCH}
    found["hooks"] = sum([len(held.get(name) or ()) for name in HOOKS])
    return found
