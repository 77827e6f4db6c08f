"""Walks through the graph that autograd has made, and reads the saved tensors of its nodes."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from ...dependency import ConfigError

_names: dict[type, list[str]] = {}


def packed(node: Node) -> Iterator[Any]:
    """Yield the entry of each tensor that `node` has saved, without unpacking it."""
    kind = type(node)
    if kind not in _names:
        _names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _names[kind]:
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            yield saved.data


def children_first(roots: Iterable[Node]) -> list[Node]:
    """Return all nodes from `roots` on, each after its successors."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def refuse_unowned(loss: Tensor, own: Iterable[Tensor]) -> None:
    """Raise if the loss depends on parameters that no layer of the stage has, such as a loss function's.

    Each replica of a stage would have a copy, and no replica scales, clips, divides or stores them.

    Args:
        own: the parameters of this stage that an optimizer has, or could have.

    Raises:
        ConfigError: there is one.
    """
    known = {key for tensor in own for key in (id(tensor), tensor.data_ptr())}  # versions are other objects
    for node in children_first([] if loss.grad_fn is None else [loss.grad_fn]):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and known.isdisjoint((id(leaf), leaf.data_ptr())):
            why = f"loss: depends here on a parameter of shape {tuple(leaf.shape)} that no layer of this stage has"
            fix = "put one of the loss function into the last layer; leave a penalty on all weights to weight_decay"
            raise ConfigError(f"{why}, so no optimizer would use its gradient: {fix}")
