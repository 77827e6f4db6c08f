"""A model run in one process as a pipeline runs it: random draws are keyed by their places in the model.

The gradients of parameters that several stages use are kept apart by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..model.observe.placeholder import draws_at_random
from ..model.observe.skeleton import MARK, is_mark, wrap
from ..model.observe.trees import mapped
from ..model.observed_partition import ObservedPartition
from ..model.partition import LayerPartition
from ..workers.compute.modules.randomness import computing, python_too
from ..workers.compute.modules.torch_internals import OperatorMode, is_current, without_torch_function
from ..workers.compute.sequences.slices import plain_name

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


@contextmanager
def holding(places: Sequence[Place], weights: Sequence[Tensor], own: Sequence[Tensor]) -> Iterator[None]:
    """Return a context that replaces weights of modules, by number; no other thread computes during it."""
    with computing:  # modules may be other threads' too
        try:
            for container, key, number in places:
                container[key] = weights[number]
            yield
        finally:
            for container, key, number in places:
                container[key] = own[number]


class Shares:
    """Leaves with the numbers of such parameters, one for each stage: backward adds up each stage's share separately.

    Blocks find the leaves of their stage in their modules; functions around the blocks are called with them.

    Args:
        module: the whole model.
        cut: which stages use a parameter, and where.
    """

    def __init__(self, module: nn.Module, cut: LayerPartition | ObservedPartition) -> None:
        parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
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

    def within(self, call: int) -> AbstractContextManager[None]:
        """Return a context for a call of a block."""
        return holding(self._places, self._at(call, 0), self._own)

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


class Keyed(TorchFunctionMode):
    """Lets a model draw its random numbers by the place where it draws: (calls of blocks before, number of the draw).

    Args:
        blocks: names of the blocks; the inside of a block is one place.
        seed: called with the place before numbers are drawn; number 0 is the block.
        shares: the parameters that several stages use.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], seed: Callable[[int, int], None], shares: Shares | None = None
    ) -> None:
        super().__init__()
        self._seed, self._shares, self._marked = seed, shares, MARK in blocks
        self._blocks = list(dict.fromkeys(model.get_submodule(name) for name in blocks if name != MARK))
        self._position = self._number = self._called = 0
        self._inside = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Keyed:
        self._undo = [wrap(block, self._block) for block in self._blocks]
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()
        # The loss function draws on from where the model has stopped.

    def _begin(self) -> None:
        """Begin a place: Python's and numpy's generators follow torch's."""
        python_too(self._seed)(self._position, 0)

    def _block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._inside = True
        own = is_current(self)
        if own:  # under a mode torch leaves its fast paths: attention in evaluation has other bits
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            with nullcontext() if self._shares is None else self._shares.within(self._position):
                result = forward(*args, **kwargs)
        finally:
            self._inside = False
            if own:
                super().__enter__()  # type: ignore[no-untyped-call]
        self._advance()
        return result

    def _advance(self) -> None:
        self._position, self._number, self._called = self._position + 1, 0, 0
        with without_torch_function():
            self._begin()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        if self._marked and is_mark(func):
            return self._advance()
        self._called += 1
        if self._shares is not None:
            args, kwargs = self._shares.given(self._position, self._called, (args, kwargs))
        self._seed(self._position, self._number + 1)
        with _Draws() as draws:
            result = func(*args, **(kwargs or {}))
        if draws.seen:
            self._number += 1
            self._begin()
        self._seed(self._position, 0)
        return result


class _Draws(OperatorMode):
    """Sees whether an operator may draw random numbers, as the observed forward does: by its numbers it need not."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= draws_at_random(func, kwargs or {})
        return func(*args, **(kwargs or {}))
