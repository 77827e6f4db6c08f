"""Optimizer states with a mirror (`zero=1`, `mirror=True`): one more worker has the states of each owner.

The owner's sum of gradients travels to its mirror, too, so both make the same update. The sum is smaller than updated
states, and both have it when the step commits. So the rule that decides whether a step stands is that of all replicas.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dependency import Spec
from .ownership import Ownership
from .updating import Updating


class MirroredUpdating(Updating):
    """Updates the parameters that this replica owns or mirrors.

    The optimizer has all parameters, as a replica may take over more. Parameters without gradients get no state.
    """

    pieces: Ownership

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: numbers of the replicas with states here after the last update
        self.states = set(self.pieces.keeps)

    def keep(self, spec: Spec) -> None:
        """Keep the states of a placement, from the next update on."""
        self.pieces.keep(spec)
        self.owned = self.pieces.kept

    def update(self, finite: bool) -> None:
        super().update(finite)
        self.states &= self.pieces.keeps
        for name in self.parameters.keys() - self.pieces.kept:
            if self.optimizer is not None:
                self.optimizer.state.pop(self.parameters[name], None)

    def given(self, route: int) -> dict[str, dict[str, tuple[Any, bool]]]:
        """Return the states of the parameters that a replica owns, each with whether it stays on the host."""
        held = self.optimizer.state if self.optimizer is not None else {}
        return {
            name: {
                key: (each, isinstance(each, Tensor) and each.device != parameter.device) for key, each in has.items()
            }
            for name, parameter in self.pieces.parameters_of(route).items()
            if (has := held.get(parameter))
        }

    def take(self, route: int, given: dict[str, dict[str, tuple[Any, bool]]]) -> None:
        """Take the states of the parameters that a replica owns."""
        self.states.add(route)
        for name, has in given.items():
            assert self.optimizer is not None
            parameter = self.parameters[name]
            self.optimizer.state[parameter] = {
                key: each.to("cpu" if on_host else parameter.device, copy=True) if isinstance(each, Tensor) else each
                for key, (each, on_host) in has.items()
            }
