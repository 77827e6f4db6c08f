"""The gradients of parameters that several stages use, apart by stage, in one process that runs the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..model.observe.trees import mapped
from ..model.observed_partition import ObservedPartition
from ..model.partition import LayerPartition
from ..workers.compute.randomness import computing

#: where a module has a parameter: the container, the key there, the parameter's number
Place = tuple[Any, Any, int]


def places_of(modules: Iterable[nn.Module], number: Mapping[nn.Parameter, int]) -> list[Place]:
    """Return all places where modules have these parameters."""
    found: list[tuple[Any, Any, nn.Parameter | None]] = []
    for module in modules:
        found += [(module._parameters, name, parameter) for name, parameter in module._parameters.items()]
        if isinstance(module, nn.RNNBase):  # it computes with a separate list of weights
            found += [(module._flat_weights, i, weight) for i, weight in enumerate(module._flat_weights)]
    return [(container, key, number[p]) for container, key, p in found if p is not None and p in number]


class Holding:
    """A context, on this thread alone, in which modules have replaced weights, by number."""

    def __init__(self, places: Iterable[Place], weights: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        self._places, self._weights, self._own = places, weights, own

    def __enter__(self) -> None:
        computing.acquire()  # modules may be other threads' too
        try:
            self._put(self._weights)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._put(self._own)
        finally:
            computing.release()

    def _put(self, weights: Sequence[Tensor]) -> None:
        for container, key, number in self._places:
            container[key] = weights[number]


class Shares:
    """Leaves with the numbers of such parameters, one for each stage: backward adds up each stage's share separately.

    Blocks find the leaves of their stage in their modules; functions around the blocks are called with them.

    Args:
        module: the whole model.
        cut: which stages use a parameter, and where.
    """

    def __init__(self, module: nn.Module, cut: LayerPartition | ObservedPartition) -> None:
        parameters = dict(module.named_parameters())
        self._stages = {parameters[name]: stages for name, stages in cut.shared.items()}
        self._own = list(self._stages)
        self._places = places_of(module.modules(), {parameter: n for n, parameter in enumerate(self._own)})
        self._stage_of = {(call, 0): stage for stage, calls in enumerate(cut.ranges) for call in calls} | cut.uses
        self.renew()

    def renew(self) -> None:
        """Make leaves for a microbatch. The first stage has the parameters themselves."""
        self._leaves: dict[nn.Parameter, dict[int, Tensor]] = {
            p: {s: p if s == stages[0] else p.detach().requires_grad_(p.requires_grad) for s in stages}
            for p, stages in self._stages.items()
        }

    def of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the leaves of a parameter, in the order of stages."""
        return list(self._leaves.get(parameter, {0: parameter}).values())

    def within(self, call: int) -> Holding:
        """Return a context for a call of a block."""
        return Holding(self._places, self._at(call, 0), self._own)

    def given(self, call: int, number: int, arguments: Any) -> Any:
        """Return the arguments of a function's call; places as of `ObservedPartition.uses`."""
        if not self._own or (call, number) not in self._stage_of:
            return arguments
        at = self._at(call, number)
        new = {id(leaf): at[n] for n, leaves in enumerate(self._leaves.values()) for leaf in leaves.values()}
        return mapped(arguments, lambda tensor: new.get(id(tensor), tensor))

    def _at(self, call: int, number: int) -> list[Tensor]:
        stage = self._stage_of[call, number]
        return [leaves.get(stage, parameter) for parameter, leaves in self._leaves.items()]
