"""Changes by hand between two steps: of weights, whether they are trained, modes, numbers and hooks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ...dependency import Kind
from .module_state import OF_TORCH
from .shard import Shard

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


class ByHand:
    """Records a shard's present state, and finds later changes. It waits for no device."""

    def __init__(self, shard: Shard) -> None:
        written = set(shard.state.weights)  # by forwards, also of an evaluation
        self._parameters = [(name, p) for name, p in shard.updating.parameters.items() if p not in written]
        self._modules = shard.slice.modules
        self._noted = self._now()

    def changed(self, has_evaluated: bool) -> str:
        """Return a sentence on the change; "" if there is none.

        Args:
            has_evaluated: whether forwards have run since, which may have written attributes.
        """
        now = self._now()
        for of, what in self._noted | now:
            if now.get((of, what)) == self._noted.get((of, what)):
                continue
            if isinstance(of, str):
                return f"{what} of parameter {of} was changed"
            if what == "training" or not has_evaluated:
                return f"{what} of a {type(of).__name__} was changed"
        return ""

    def _now(self) -> dict[tuple[nn.Module | str, str], Any]:
        """Return the values that can be changed by hand, by holder and name."""
        found: dict[tuple[nn.Module | str, str], Any] = {}
        for name, parameter in self._parameters:
            version, address, trained, hooks = OfWeight.now(parameter)
            found |= {(name, "value"): (version, address), (name, "requires_grad"): trained, (name, "hooks"): hooks}
        for module in self._modules:
            found[module, "hooks"] = sum(len(vars(module).get(name) or ()) for name in HOOKS)
            found |= {(module, what): value for what, value in fingerprint(module).items()}
        return found


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return values that differ if a module was changed by hand, by name: mode, plain attributes, and buffers."""
    held = vars(module)
    plain = {name: held[name] for name in held.keys() - OF_TORCH if type(held[name]) in PLAIN}
    buffers = (held.get("_buffers") or {}).items()
    return {"training": held.get("training")} | plain | {n: _of_buffer(b) for n, b in buffers if b is not None}


def _of_buffer(buffer: Tensor) -> tuple[int, int]:
    """Return a state that differs if a buffer was written, except through `.data` or numpy."""
    return id(buffer), -1 if buffer.is_inference() else buffer._version
