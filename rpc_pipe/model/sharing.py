"""Objects that layers of a list share across a cut: parameters (tied weights), and objects that pass tensors on.

Each stage has a copy of a tied weight by the parameter's first name in the unsplit model. The copies' gradients are
summed before every update, so the copies stay equal. Tensors that layers pass on beside their return values do not
reach the layers of other stages, so these are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.module_state import OF_TORCH
from .detachable_blocks import mentioned
from .observe.closures import modules_in
from .observe.trees import tensors
from .parameter_hooks import refuse_hooks
from .weight_views import refuse_parted


class Ties:
    """Objects that the layers of a list share across a cut.

    Args:
        layers: modules are searched; layers that callables build share nothing.
        ranges: the layers of each stage.

    Attributes:
        names: `<layer>.<name>` of a parameter -> its first name in the unsplit model, if that differs.
        shared: parameter that several stages hold -> these stages.

    Raises:
        ModelError: a module with buffers is in several stages, or a hook would see a part of a gradient.
    """

    def __init__(self, layers: Sequence[object], ranges: Sequence[range]) -> None:
        self.names: dict[str, str] = {}
        self.shared: dict[str, list[int]] = {}
        first: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        held: dict[str, set[int]] = {}
        buffers: dict[int, tuple[int, int]] = {}
        for stage, i in ((stage, i) for stage, own in enumerate(ranges) for i in own):
            layer = layers[i]
            if not isinstance(layer, nn.Module):
                continue
            for name, parameter in layer.named_parameters(f"{i}", remove_duplicate=False):
                known = first.setdefault(id(parameter), name)
                parameters[known] = parameter
                held.setdefault(known, set()).add(stage)
                if known != name:
                    self.names[name] = known
            for name, buffer in layer.named_buffers():
                other, other_stage = buffers.setdefault(id(buffer), (i, stage))
                if other_stage != stage:
                    raise ModelError(
                        f"model: layers {other} and {i} of stages {other_stage} and {stage} share the buffer {name}; "
                        "choose a split that keeps them together"
                    )
        self.shared = {name: sorted(stages) for name, stages in held.items() if len(stages) > 1}
        refuse_parted(parameters, held)
        for name, stages in self.shared.items():
            refuse_hooks(parameters[name], name, stages)

    def copied(self, stage: int, layers: Iterable[tuple[int, nn.Module]]) -> tuple[list[nn.Module], set[int]]:
        """Return the layers of a stage that share parameters with an earlier stage, and the ids of these parameters.

        Args:
            layers: the layers with their indices in the whole model.
        """
        earlier = {name for name, stages in self.shared.items() if min(stages) < stage}
        found: list[nn.Module] = []
        parameters: set[int] = set()
        for i, layer in layers:
            for name, parameter in layer.named_parameters(f"{i}", remove_duplicate=False):
                if self.names.get(name) in earlier:
                    parameters.add(id(parameter))
                    found.append(layer)
        return list(dict.fromkeys(found)), parameters


_NO_HOLDERS = (nn.Module, Tensor, torch.Generator, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Holder(NamedTuple):
    """A list, a dict or an object that a layer can put something into."""

    layer: int
    name: str
    #: a module that the loss function refers to is given by the dict of its attributes
    held: Any


def shared_holders(layers: Sequence[Any], stages: Sequence[range], loss_fn: Any) -> list[list[Holder]]:
    """Return, by stage, objects of its layers that other stages, or the loss function on the last, hold too."""
    users: dict[int, set[int]] = defaultdict(set)
    found: list[list[Holder]] = []
    for stage, indices in enumerate(stages):
        parts = [(i, part) for i in indices if isinstance(layers[i], nn.Module) for part in layers[i].modules()]
        holders = [Holder(index, *each) for index, part in parts for each in _holders(part)]
        for holder in holders:
            users[id(holder.held)].add(stage)
        # a module's attributes count where the loss function refers to the module
        found.append(holders + [Holder(i, f"an attribute of {type(part).__name__}", vars(part)) for i, part in parts])
    values = list(mentioned(loss_fn).values())
    for each in (*values, *[vars(part) for module in modules_in(values, 3) for part in module.modules()]):
        users[id(each)].add(len(stages) - 1)
    return [[holder for holder in of_stage if users[id(holder.held)] - {stage}] for stage, of_stage in enumerate(found)]


def refuse_handed_on(holders: Sequence[Holder]) -> None:
    """Raise if an object that other stages hold too has a tensor with a graph, after a forward of the stage.

    Raises:
        ModelError: there is one.
    """
    for layer, name, held in holders:
        if any(tensor.grad_fn is not None for tensor in tensors(held)):
            raise ModelError(
                f"model: layer {layer} leaves a tensor in {name}, which layers of other stages or the loss function "
                "use too: return it beside the output, as in (x, extra), detach() it, or cut elsewhere (split=)"
            )


def _holders(part: nn.Module) -> Iterator[tuple[str, Any]]:
    values = {name: value for name, value in vars(part).items() if name not in OF_TORCH}
    if not type(part).__module__.startswith("torch."):
        values |= mentioned(part.forward)
    for name, value in values.items():
        if isinstance(value, (list, dict)) or (hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS)):
            yield name, value
