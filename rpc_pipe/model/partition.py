"""The partition of a list of layers. A layer is the unit of cutting, of initial weights and of random numbers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from torch import nn

from ..dependency import BatchError, ModelError
from ..dependency.errors import first_sentence
from ..workers.compute.modules.randomness import Randomness
from ..workers.compute.sequences.slices import Divide, Layers, Slice, plain_name
from ..workers.compute.shard import LossFn
from ..workers.transport.payload import Tree
from .module_copies import ModuleCopies, paired, structure, unnamed_parts
from .observe.model_kinds import refuse_lazy
from .sharding import cut

if TYPE_CHECKING:
    from .common_objects import Holder
    from .ties import Ties

#: one layer: a module, or a callable that builds it
LayerLike = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class StageToBuild:
    """The stage that a builder shall build."""

    index: int
    num_stages: int
    #: indices of the stage's layers in the whole model; empty if the builder has no `num_layers`
    layers: range


class Builder(Protocol):
    """A picklable object that builds a stage where it lives: `builder(stage)`.

    With an attribute `num_layers` the cut is made here. `stage.layers` lists the layers to build, and the builder
    returns a list of that length, of modules or of callables; with callables, initial weights do not depend on the
    cut. Without it the builder decides on the contents of a stage, and a stage counts as one layer.
    """

    def __call__(self, stage: StageToBuild) -> nn.Module | Sequence[LayerLike]: ...


Layered = nn.Sequential | Sequence[LayerLike] | Builder


def as_pair(batch: Tree) -> tuple[Tree, Tree]:
    """Return a batch of a list of layers as (inputs, targets).

    Raises:
        BatchError: it is no pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise BatchError(f"batch is a {type(batch).__name__}{length}: must be (inputs, targets), trees of tensors")
    return batch[0], batch[1]


class LayerPartition:
    """A list of layers (or a builder of stages), and its cut.

    Args:
        split: number of layers of each stage; None: as evenly as possible.
        loss_fn: the loss function, which the last stage computes.
    """

    config = whole = None
    other_names: frozenset[str] = frozenset()
    loss_is_inside = False
    adds_means = True
    #: none: peft adapts whole models
    adapters: frozenset[str] = frozenset()
    pair = pair_for_metric = staticmethod(as_pair)
    #: two containers of one form may be one batch, (inputs, targets); the first layer may take any tree
    could_be_one = staticmethod(lambda given: len(given) == 2)
    could_be_input = staticmethod(lambda given: True)
    #: a batch without targets, and an output in the type that the model returns
    only_inputs = staticmethod(lambda inputs: (inputs, None))
    output = staticmethod(lambda tree: tree)

    def __init__(
        self, model: Layered, num_stages: int, split: Sequence[int] | None = None, loss_fn: LossFn | None = None
    ) -> None:
        self.loss_fn = loss_fn
        self._model: Layered | None = model
        #: modules that have been built; a replica must not get the same objects
        self._made: set[nn.Module] = set()
        #: layers of the stage that the members of a worker have divided, and the parameters that were whole before
        self._divided: set[nn.Module] = set()
        self._replaced: dict[int, ref[nn.Parameter]] = {}
        self.module_copies = ModuleCopies()
        if isinstance(model, nn.Sequential):
            self.module_copies.watch(model, structure)
        self._num_stages = num_stages
        layers = list(model) if isinstance(model, (nn.Sequential, Sequence)) else []
        is_list = isinstance(model, (nn.Sequential, Sequence))
        num_layers: int = len(layers) if is_list else getattr(model, "num_layers", num_stages)
        self._counted = is_list or hasattr(model, "num_layers")
        self.ranges = cut(num_layers, num_stages, split)
        #: parameters that several stages hold -> their stages
        self.shared: dict[str, list[int]] = {}
        #: None: one stage has all layers, so no object is in two stages
        self._ties: Ties | None = None
        self._holders: Sequence[list[Holder]] = [[]] * num_stages
        if is_list and num_stages > 1:
            from .common_objects import shared_holders
            from .ties import Ties

            self._ties, self._holders = Ties(layers, self.ranges), shared_holders(layers, self.ranges, loss_fn)
            self.shared = {plain_name(name): stages for name, stages in self._ties.shared.items()}
        self.block_names = [str(layer) for layer in range(num_layers)]
        #: none: all parameters are inside layers
        self.uses: dict[tuple[int, int], int] = {}

    def slice(self, stage: int, randomness: Randomness, route: int = 0, divide: Divide | None = None) -> Slice:
        """Return a stage's slice of the model, on the device of `randomness`. Arguments as of `build`."""
        layers = self.build(stage, randomness, route, divide)
        for number, module in layers:
            if any(tensor.is_meta for tensor in module.parameters()):
                raise ModelError(f"layer {number}: is on the meta device, without numbers; pass a function for it")
            module.to(randomness.device)
        shared = {name: held for name, held in self.shared.items() if stage in held}
        found = Layers(layers, {} if self._ties is None else self._ties.names, shared)
        if holders := self._holders[stage]:
            from .common_objects import look

            found.look = partial(look, holders)
        if divide is not None:
            from ..workers.compute.parts.dividing import divide_layers

            divide_layers(found, divide, self._divided)
        return found

    def build(
        self, stage: int, randomness: Randomness, route: int = 0, divide: Divide | None = None
    ) -> list[tuple[int, nn.Module]]:
        """Build the layers of `stage` only; return them with their indices in the whole model.

        Args:
            route: 0 for the first replica in this process; other routes get copies of the user's layers.
            divide: divides a layer among the members of a worker; of layers that callables make, one is whole at once.
        """
        layers, built = self._layers(stage, randomness)
        made: list[nn.Module] = []
        self._divided.clear()
        for i, layer in zip(layers, built, strict=True):
            module = _realize(layer, i, randomness)
            if divide is not None and not isinstance(layer, nn.Module) and not self._was_made(module, route=1):
                module = self._divided_at_once(module.to(randomness.device), divide)
            made.append(module)
        # A callable may return a module that the user has made, or one that it has returned before, whole or as a part.
        pairs = list(zip(built, made, strict=True))
        given = [(layer, module) for layer, module in pairs if module not in self._divided]
        taken = [module for layer, module in given if (route > 0 if layer is module else self._was_made(module, route))]
        self._made.update(part for module in made for part in module.modules())
        ties = self._ties if route == 0 else None
        tied, shared = ([], set()) if ties is None else ties.copied(stage, zip(layers, made, strict=True))
        copies: dict[nn.Module, nn.Module] = {}
        if taken or tied:
            from .layer_copies import copies_of

            copies = dict(zip([*taken, *tied], [*copies_of(taken), *copies_of(tied, shared)], strict=True))
        for module, copy_of in copies.items():
            self.module_copies.add(paired(module, copy_of), runs=True)
        for module in {module for layer, module in pairs if layer is module} - copies.keys():
            for part in module.modules():
                self.module_copies.watch(part, unnamed_parts)
        return [(i, copies.get(module, module)) for i, module in zip(layers, made, strict=True)]

    def _divided_at_once(self, module: nn.Module, divide: Divide) -> nn.Module:
        self._made.update(module.modules())
        before = list(module.parameters())
        if any(id(p) in self._replaced and self._replaced[id(p)]() is p for p in before):
            raise ModelError("members: two layers made by callables share a parameter; put both into one layer")
        found: nn.Module = divide(module, "", module) or module
        kept = set(found.parameters())
        self._replaced |= {id(parameter): ref(parameter) for parameter in before if parameter not in kept}
        self._divided.add(found)
        return found

    def _was_made(self, module: nn.Module, route: int) -> bool:
        """Return whether a module has been built before, or at a second replica any module in it."""
        return any(part in self._made for part in (module.modules() if route > 0 else [module]))

    def _layers(self, stage: int, randomness: Randomness) -> tuple[Sequence[int], list[LayerLike]]:
        """Return the indices of the stage's layers, and the layers."""
        layers = self.ranges[stage]
        assert self._model is not None, "released"
        if isinstance(self._model, (nn.Sequential, Sequence)):
            return layers, [self._model[i] for i in layers]
        with randomness.initial(layers.start):
            built = self._model(StageToBuild(stage, self._num_stages, layers if self._counted else range(0)))
        if not self._counted:
            if not isinstance(built, nn.Module):
                built = nn.Sequential(*(each if isinstance(each, nn.Module) else each() for each in built))
            return [stage], [built]
        children = list(built) if isinstance(built, (nn.Sequential, Sequence)) else [built]
        if len(children) != len(layers):
            raise ModelError(f"model: the builder returned {len(children)} layers for stage {stage}, of {len(layers)}")
        return layers, children

    def anew(self, num_stages: int) -> LayerPartition:
        """Return the same model with another cut, before it is released.

        Raises:
            ModelError: its builder makes stages as it likes.
        """
        assert self._model is not None, "released"
        if not self._counted and num_stages != self._num_stages:
            raise ModelError("model: the builder has no num_layers, so its stages cannot be cut anew; give it one")
        return LayerPartition(self._model, num_stages, None, self.loss_fn)

    @property
    def given(self) -> Any:
        """The user's model, until it is released."""
        return self._model

    @property
    def name(self) -> str:
        """The name of the model, until it is released."""
        return getattr(self._model, "__qualname__", type(self._model).__name__)

    def release(self) -> None:
        """Drop the reference to the model, so that layers of other processes can be freed."""
        self._model = None
        self._made.clear()
        self._divided.clear()

    def observe(self, inputs: Tree, *, trained: bool) -> None:
        """Do nothing: layers are cut without a batch."""

    def begin(self, stage: int, randomness: Randomness, route: int = 0) -> None:
        """Do nothing: layers are divided one by one."""

    def first_stage_of(self, parameter: str) -> int:
        """Return the stage that holds a parameter."""
        layer = int(parameter.partition(".")[0])
        return next(stage for stage, layers in enumerate(self.ranges) if layer in layers)

    def place_of(self, name: str) -> Any:
        """Return a sort key that orders tensors as the model does."""
        layer, _, rest = name.partition(".")
        return int(layer), rest


def refuse_no_layer(layer: object, index: int) -> None:
    """Refuse an item that is neither a module nor a callable.

    Raises:
        ModelError: it is neither.
    """
    if not isinstance(layer, nn.Module) and not callable(layer):
        raise ModelError(f"model: layer {index} is a {type(layer).__name__}; must be a module, or make one")


def _realize(layer: LayerLike, index: int, randomness: Randomness) -> nn.Module:
    if isinstance(layer, nn.Module):
        refuse_lazy(layer, f"layer {index}")
        return layer
    refuse_no_layer(layer, index)
    with randomness.initial(index):
        try:
            made = layer()
        except TypeError as error:
            *callers, at = traceback.extract_tb(error.__traceback__)
            where = f" (line {at.lineno} of {at.filename})" if callers else ""  # else the call here fitted no signature
            what = f"{type(error).__name__}: {first_sentence(error)}{where}"
            raise ModelError(f"model: layer {index} could not be made: {what}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"model: layer {index} made a {type(made).__name__}, which is no module")
    refuse_lazy(made, f"layer {index}")
    return made
