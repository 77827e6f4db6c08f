"""Recomputation of a stage's activations, with its modules in the state that the first forward began with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...dependency import ConfigError
from ..transport.payload import Tree, tensors_of
from .modules.digest import sample
from .modules.module_state import ModuleState, Probe
from .result import Loss

#: how much recomputed outputs may differ, relative to the largest element: some devices sum in any order
_TOLERANCE = 1e-3

#: the state that the first run of a forward began with, and samples of its outputs
FirstRun = tuple[ModuleState, list[Tensor]]
#: output of a forward, and the loss
Found = tuple[Tree, Loss | None]


class Recomputation:
    """Runs forwards that will be recomputed, and recomputes them.

    Args:
        modules: that forwards may change.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._probe = Probe(modules)
        #: one flag on the device for each output that was recomputed: whether it differs
        self._differ: list[Tensor] = []

    def first(self, forward: Callable[[], Found]) -> tuple[Found, FirstRun]:
        """Run `forward` for the first time; its caller releases the graph, and the activations in it."""
        module_state = self._probe.before()
        found = forward()
        self._probe.note(module_state)
        return found, (module_state, _sample(found[0]))

    def again(self, noted: FirstRun, forward: Callable[[], Found]) -> None:
        """Run `forward` with the modules in the state of its first run; restore their present state after it."""
        module_state, outputs = noted
        with module_state.restored():
            found = forward()
        self._differ += _differences(outputs, _sample(found[0]))

    def forget(self) -> None:
        """Forget the comparisons of an abandoned step, because weights may have changed in between."""
        self._differ = []

    def check(self) -> None:
        """Raise if a recomputed output differed from the first one; waits for the device.

        Raises:
            ConfigError: one did.
        """
        differ, self._differ = self._differ, []
        if differ and torch.stack([each.to(differ[0].device) for each in differ]).any():
            why = "layer: a forward run once more gave other numbers: it depends on more than inputs and the module"
            raise ConfigError(f"{why}, such as a queue; take a schedule that does not recompute")


def _sample(tree: Tree) -> list[Tensor]:
    """Return some elements of each floating-point tensor of an output that is not sparse."""
    floating = [t for t in tensors_of(tree) if t.is_floating_point() and t.numel()]
    return [sample(t).clone() for t in floating if t.layout is torch.strided]


def _differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for a, b in zip(first, second, strict=True):
        tolerance = max(_TOLERANCE, 4 * torch.finfo(a.dtype).eps)
        found.append((a - b).abs().max() > tolerance * a.abs().max())
    return found
