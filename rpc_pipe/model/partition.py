"""Cut a model into stages. A layer is the unit of cutting, of initial weights and of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ..dependency import ConfigError
from ..workers.compute.randomness import Randomness
from .cut import cut

#: one layer: a module, or a callable that builds it
LayerLike = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Stage:
    """What a builder is told about the stage to build."""

    index: int
    num_stages: int
    #: indices of the stage's layers in the whole model; empty if the builder has no `num_layers`
    layers: range


class Builder(Protocol):
    """A picklable object that builds a stage where it lives: `builder(stage)`.

    With an attribute `num_layers` the cut is made here, `stage.layers` says which layers to build, and they
    are returned in a list of that length (of modules, or of callables: then initial weights do not depend on
    the cut). Without it the builder decides what a stage is, and a stage counts as one layer.
    """

    def __call__(self, stage: Stage) -> nn.Module | Sequence[LayerLike]: ...


Model = nn.Sequential | Sequence[LayerLike] | Builder


class Partition:
    """A model and its cut.

    Args:
        split: number of layers of each stage; evenly by default.
    """

    def __init__(self, model: Model, num_stages: int, split: Sequence[int] | None = None) -> None:
        self._model = model
        self._num_stages = num_stages
        if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
            raise ConfigError(
                f"model is a {type(model).__name__}: pass an nn.Sequential, a list of modules or a builder "
                f"called with the stage; for example nn.Sequential(*model.children())"
            )
        self._is_list = isinstance(model, (nn.Sequential, Sequence))
        if isinstance(model, (nn.Sequential, Sequence)):
            self.num_layers: int = len(model)
        else:
            self.num_layers = getattr(model, "num_layers", num_stages)
        self._counted = self._is_list or hasattr(model, "num_layers")
        self.ranges = cut(self.num_layers, num_stages, split)
        self._refuse_cut_ties()

    def _refuse_cut_ties(self) -> None:
        """Two stages with one parameter would train two: an error, not a silent divergence."""
        if not isinstance(self._model, (nn.Sequential, Sequence)):
            return
        seen: dict[nn.Parameter, tuple[int, int]] = {}
        for stage, layers in enumerate(self.ranges):
            for i in layers:
                layer = self._model[i]
                for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                    other, other_stage = seen.setdefault(parameter, (i, stage))
                    if other_stage != stage:
                        raise ConfigError(
                            f"model: layers {other} and {i} share a parameter but are cut apart into stages "
                            f"{other_stage} and {stage}; choose a split that keeps them together"
                        )

    def build(self, stage: int, randomness: Randomness) -> list[tuple[int, nn.Module]]:
        """Build the layers of `stage`, and only those; return them with their index in the whole model."""
        layers = self.ranges[stage]
        if isinstance(self._model, (nn.Sequential, Sequence)):
            return [(i, _realize(self._model[i], i, randomness)) for i in layers]
        with randomness.initial(layers.start):
            built = self._model(Stage(stage, self._num_stages, layers if self._counted else range(0)))
        if not self._counted:
            return [(stage, built if isinstance(built, nn.Module) else nn.Sequential(*map(_module, built)))]
        children = list(built) if isinstance(built, (nn.Sequential, Sequence)) else [built]
        if len(children) != len(layers):
            raise ConfigError(
                f"model: the builder returned {len(children)} layers for stage {stage}, "
                f"which has {len(layers)} (layers {layers.start} to {layers.stop - 1})"
            )
        return [(i, _realize(child, i, randomness)) for i, child in zip(layers, children, strict=True)]


def _realize(layer: LayerLike, index: int, randomness: Randomness) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with randomness.initial(index):
        return layer()


def _module(layer: LayerLike) -> nn.Module:
    return layer if isinstance(layer, nn.Module) else layer()
