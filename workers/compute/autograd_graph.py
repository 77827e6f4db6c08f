"""Walks through the graph that autograd has made, and looks at what its nodes have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import Node

from ...dependency import ConfigError

_names: dict[type, list[str]] = {}


def packed(node: Node) -> Iterator[Any]:
    """Yield what stands for each tensor that `node` has saved, without unpacking it."""
    kind = type(node)
    if kind not in _names:
        _names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _names[kind]:
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            yield saved.data


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


class UnownedParameters:
    """Refuses parameters that the loss depends on and no layer of the stage has, such as a loss function's own.

    Each replica of a stage would have its own, and none scales, clips, divides or stores them.
    """

    def __init__(self) -> None:
        #: None until a forward has been seen; weak, as a forward may make some that end with it
        self._found: list[ref[nn.Parameter]] | None = None

    def look(self, loss: Tensor, own: Iterable[Tensor]) -> None:
        """Find them by the graph of the first forward.

        Args:
            own: what an optimizer of this stage has, or could have.
        """
        if self._found is None:
            known = {key for tensor in own for key in (id(tensor), tensor.data_ptr())}  # versions are other objects
            nodes = children_first([] if loss.grad_fn is None else [loss.grad_fn])
            leaves = (getattr(node, "variable", None) for node in nodes)
            found = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
            self._found = [ref(leaf) for leaf in found if known.isdisjoint((id(leaf), leaf.data_ptr()))]

    def check(self) -> None:
        """Look, before the first update, whether there are any.

        Raises:
            ConfigError: there is one.
        """
        for parameter in (found() for found in self._found or ()):
            # Whether it has a gradient now says nothing: where stages are threads its own may have taken that already.
            if parameter is not None:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient of the loss here, and no layer of "
                    "this stage has it, so no optimizer would use that gradient: if the parameter is the loss "
                    "function's own, put it into the last layer; if another stage's layer has it, as with a penalty on "
                    "all weights, let the optimizer do that (weight_decay), or that layer"
                )
        self._found = self._found and []
