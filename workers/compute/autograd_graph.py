"""Walks through the graph that autograd has made, and looks at what its nodes have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ...dependency import ConfigError

_names: dict[type, list[str]] = {}


def saved_by(node: Node) -> Iterator[Any]:
    """Yield all that `node` has saved; `data` is what stands for a tensor, without unpacking it."""
    kind = type(node)
    if kind not in _names:
        _names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _names[kind]:
        raw = getattr(node, name)
        yield from raw if isinstance(raw, tuple) else (raw,)


def packed(node: Node) -> Iterator[Any]:
    """Yield what stands for each tensor that `node` has saved."""
    return (saved.data for saved in saved_by(node))


def refuse_held_graphs(nodes: Iterable[Node]) -> None:
    """Refuse saved-tensor hooks of a layer's own that hold what has a graph: with its node it would never be freed.

    Raises:
        ConfigError: there are such hooks.
    """
    held = (part for node in nodes for each in packed(node) for part in _inside(each))
    if any(tensor.grad_fn is not None for tensor in held):
        raise ConfigError(
            "a layer's saved-tensor hooks pack a tensor with its graph (as save_on_cpu() does of one on the "
            "CPU), which a backward in two parts could never free: let `pack` return tensor.detach(), or take a "
            "schedule that does not split backward, such as 1f1b"
        )


def _inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that hooks have packed."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _inside(each)


def children_first(roots: Iterable[Node]) -> list[Node]:
    """Return all nodes from `roots` on, each after those it leads to."""
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
