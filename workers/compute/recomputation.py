"""Computing a stage's activations again, in the module_state that its forward met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...dependency import ConfigError
from ..transport.payload import Tree, tensors_of
from .batch_norm import statistics
from .digest import sample
from .inner_state import Place, places_in
from .module_state import ModuleState

#: by how much they may differ, relative to the largest: some devices add up in any order
_TOLERANCE = 1e-3


class FirstRun(NamedTuple):
    """What a forward leaves for the same forward to be run again."""

    module_state: ModuleState
    outputs: list[Tensor]


class Recomputation:
    """Runs forwards that will be run again.

    Args:
        modules: all that run in them.
        called: those, and others that are called in them.
    """

    def __init__(self, modules: Sequence[nn.Module], called: Sequence[nn.Module]) -> None:
        self._modules, self._called = modules, called
        #: large tensors that forwards do not write, with their versions; None until it has been seen
        self._constant: dict[Tensor, int] | None = None
        #: modes -> modules that a step in training has changed, or written: averages may have come to rest
        self._changing: dict[tuple[bool, ...], list[nn.Module]] = {}
        #: attributes that can be looked into; None until somebody has
        self._places: list[Place] | None = None
        #: whether forward can do without what autograd saves in it
        self._drops = True
        #: whether an output was another one when it was made again
        self._differ: list[Tensor] = []

    def before_step(self) -> ModuleState:
        """Return what the modules hold now that forwards change: all, until that has been seen."""
        changing = self._changing.get(self._modes())
        modules = (self._modules, self._called) if changing is None else (changing, changing)
        module_state = ModuleState(*modules, self._constant or {}, self._inner())
        module_state.leave(statistics(self._modules))
        return module_state

    def after_step(self, before: ModuleState) -> None:
        """Take note of what a step in training has changed."""
        self._note_constant(before)
        if (modes := self._modes()) not in self._changing:
            self._changing[modes] = before.written()

    def now(self, before: ModuleState) -> ModuleState:
        """Return what the modules of another module_state hold now."""
        module_state = ModuleState(before.modules, before.called, self._constant or {}, self._inner())
        module_state.note_weights([weight for weight, _ in before._weights])
        return module_state

    def _inner(self) -> list[Place]:
        if self._places is None:
            self._places = places_in(self._modules)
        return self._places

    def _note_constant(self, module_state: ModuleState) -> None:
        if self._constant is None:
            self._constant = module_state.constant()

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modules])

    def first(self, forward: Callable[[], Tree]) -> tuple[Tree, FirstRun]:
        """Run `forward`; return its output, which has a graph, but nothing in it to go backward with."""
        module_state = ModuleState(self._modules, self._called, self._constant or {}, self._inner())
        try:
            with saved_tensors_hooks(lambda tensor: None, _needed) if self._drops else nullcontext():
                tree = forward()
        except (_NeededError, RuntimeError, ConfigError) as error:
            if not isinstance(error, _NeededError) and "saved tensor hooks" not in str(error):
                raise
            self._drops = False
            module_state.put_back()
            tree = forward()
        self._note_constant(module_state)
        return tree, FirstRun(module_state, _sample(tree))

    def again(self, noted: FirstRun, forward: Callable[[], Tree]) -> None:
        """Run `forward` in the module_state that it met, with no effect on today's."""
        with noted.module_state.restored():
            tree = forward()
        self._differ += _differences(noted.outputs, _sample(tree))

    def forget(self) -> None:
        """Let what was run again of an abandoned step be as if it had not: weights may have changed in between."""
        self._differ = []

    def check(self) -> None:
        """Complain if what was run again has not given the same; waits for the device.

        Raises:
            RuntimeError: it has not.
        """
        differ, self._differ = self._differ, []
        if differ and torch.stack([each.to(differ[0].device) for each in differ]).any():
            raise RuntimeError(
                "recomputed activations differ from those of forward: a layer depends on something besides its inputs, "
                "parameters, buffers, attributes and random numbers, such as a file or a queue that grows; "
                "use a schedule that does not recompute"
            )


class _NeededError(Exception):
    """Forward itself asks for a gradient, and what autograd had saved for that was dropped."""


def _needed(_: None) -> NoReturn:
    raise _NeededError


def _sample(tree: Tree) -> list[Tensor]:
    """Return a part of each tensor of an output."""
    return [sample(t).clone() for t in tensors_of(tree) if t.is_floating_point() and t.numel()]


def _differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for a, b in zip(first, second, strict=True):
        tolerance = max(_TOLERANCE, 4 * torch.finfo(a.dtype).eps)
        found.append((a - b).abs().max() > tolerance * a.abs().max())
    return found
