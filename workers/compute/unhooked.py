"""Forwards that save for a split backward, and layers that torch lets save in no way but its own.

Inside `torch.func` (grad, vjp, jacrev, hessian) torch allows nobody to look at what is saved. Such a stage keeps the
graph as it is, and makes all gradients in the first half of backward, the weights' as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ...dependency import ConfigError
from ..transport.payload import Tree
from .module_state import ModuleState

_TORCH_SAYS = "saved tensor hooks"


class Unhooked:
    """Finds out, by the first forward, whether a stage has such layers.

    Args:
        modules: all that compute.
        called: those, and others that are called.
    """

    def __init__(self, modules: Sequence[nn.Module], called: Sequence[nn.Module]) -> None:
        self._modules, self._called = modules, called
        #: whether it has; None until it has been seen
        self.known: bool | None = None

    def run(self, forward: Callable[..., Tree], ended: Callable[[], None], *, again: bool = False) -> Tree:
        """Run a forward that saves for a split backward.

        Args:
            forward: runs it; `spared`: and leaves what it is given as it is.
            ended: called when it has failed, before it is run once more.
            again: whether `forward` is run as one that will be run again.

        Raises:
            ConfigError: it has such layers, which the first forward did not run.
        """
        if self.known:
            return forward(again=again)
        first = self.known is None
        module_state = ModuleState(self._modules, self._called) if first else None
        try:
            tree = forward(again=again, spared=first)
        except (RuntimeError, ConfigError) as error:
            if _TORCH_SAYS not in str(error):
                raise
            if module_state is None:
                raise ConfigError(
                    "a layer calls torch.func (grad, vjp, jacrev, hessian) in its forward, and did not in its "
                    "first: torch does not allow that where backward is split; use a schedule that does not split it"
                ) from error
        else:
            self.known = False if first else self.known
            return tree
        ended()
        module_state.put_back()
        self.known = True
        return forward(again=again, spared=True)
