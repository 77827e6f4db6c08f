"""Refusal of layers of a list that hand tensors on beside what they return, which layers of other stages do not get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.module_state import OF_TORCH
from .separate import mentioned, modules_in

_NO_HOLDERS = (nn.Module, Tensor, torch.Generator, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Holder(NamedTuple):
    """A list, a dict or an object that a layer can put something into."""

    layer: int
    name: str
    #: a module that the loss function refers to is given by the dict of its attributes
    held: Any


def shared_holders(layers: Sequence[Any], stages: Sequence[range], loss_fn: Any) -> list[list[Holder]]:
    """Return, by stage, what its layers hold and layers of other stages too, or the loss function on the last."""
    users: dict[int, set[int]] = defaultdict(set)
    found: list[list[Holder]] = []
    for stage, indices in enumerate(stages):
        parts = [(i, part) for i in indices if isinstance(layers[i], nn.Module) for part in layers[i].modules()]
        holders = [Holder(index, *each) for index, part in parts for each in _holders(part)]
        for holder in holders:
            users[id(holder.held)].add(stage)
        # a module's own attributes count where the loss function refers to the module
        found.append(holders + [Holder(i, f"an attribute of {type(part).__name__}", vars(part)) for i, part in parts])
    values = list(mentioned(loss_fn).values())
    for each in (*values, *[vars(part) for module in modules_in(values, 3) for part in module.modules()]):
        users[id(each)].add(len(stages) - 1)
    return [[holder for holder in of_stage if users[id(holder.held)] - {stage}] for stage, of_stage in enumerate(found)]


def refuse_handed_on(holders: Sequence[Holder]) -> None:
    """Refuse a tensor with a graph in what other stages hold too, after a forward of the stage.

    Raises:
        ModelError: there is one.
    """
    for layer, name, held in holders:
        if any(tensor.grad_fn is not None for tensor in _tensors(held, 3)):
            raise ModelError(
                f"model: layer {layer} leaves a tensor in {name}, which layers of other stages or the loss function "
                "use too: only what layers return reaches other stages; return it beside the output, as in (x, extra), "
                "detach() it if it is only looked at, or keep its users on one stage (split=)"
            )


def _holders(part: nn.Module) -> Iterator[tuple[str, Any]]:
    values = {name: value for name, value in vars(part).items() if name not in OF_TORCH}
    if not type(part).__module__.startswith("torch."):
        values |= mentioned(part.forward)
    for name, value in values.items():
        if isinstance(value, (list, dict)) or (hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS)):
            yield name, value


def _tensors(held: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif depth and isinstance(held, (list, tuple, dict)):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors(each, depth - 1)
    elif depth == 3:
        yield from _tensors(vars(held), depth - 1)
