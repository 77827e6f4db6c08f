"""Parameters that forwards compute by and that belong to no layer of the stage, such as those of a loss function."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor, nn

from ...dependency import ConfigError
from .split_backward import children_first


class Foreign:
    """Says so where nobody trains them: the optimizer of a stage has the parameters of its layers."""

    def __init__(self) -> None:
        #: None until a forward has been seen
        self._found: list[ref[nn.Parameter]] | None = None
        self._updates = 0

    def look(self, loss: Tensor, own: Iterable[Tensor], updates: int) -> None:
        """Find them by the graph of the first forward.

        Args:
            own: what the optimizer has, or could have.
            updates: so far.
        """
        if self._found is None:
            known = {id(tensor) for tensor in own}
            nodes = children_first([] if loss.grad_fn is None else [loss.grad_fn])
            leaves = (getattr(node, "variable", None) for node in nodes)
            self._found = [ref(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]
            self._updates = updates

    def check(self, updates: int) -> None:
        """Look, after the first update, whether somebody has taken their gradients.

        Raises:
            ConfigError: nobody has.
        """
        if not self._found or updates == self._updates:
            return
        for parameter in (found() for found in self._found):
            if parameter is not None and parameter.grad is not None and bool(parameter.grad.abs().sum() > 0):
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to no layer, such as one of the loss "
                    "function, and no optimizer has taken its gradient of the step before: put it into the last layer, "
                    "or let an optimizer of your own step, and zero its gradient, after every step"
                )
        self._found = []
