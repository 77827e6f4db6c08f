"""Tensors that functions of autograd take: their backward may need them, or return gradients of them."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .observation import Value
from .placeholder import storage_of, unobserved
from .trees import tensors


def is_of_function(tensor: Tensor) -> bool:
    """Return whether a function of autograd has returned a tensor."""
    return isinstance(tensor.grad_fn, BackwardCFunction)


def taken_by_functions(trees: Any, values: Collection[Value], known: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that functions of autograd take, in the graph from `trees` back to nodes that are known.

    No operator need have read them, such as the input of a straight-through estimator.

    Args:
        values: the tensors that passed between events.
        known: nodes of the graph; the nodes found here are added.
    """
    waiting = [tensor.grad_fn for tensor in tensors(trees)]
    while waiting:
        if (node := waiting.pop()) is None or node in known:
            continue
        known.add(node)
        before = [edge for edge in node.next_functions if edge[0] is not None]
        waiting += [each for each, _ in before]
        if isinstance(node, BackwardCFunction):
            made = {(value.tensor.grad_fn, value.tensor.output_nr): value.tensor for value in values}
            taken = [made.get(edge, getattr(edge[0], "variable", None)) for edge in before]
            with unobserved():  # hooks of saved tensors replace a tensor by another one on the same memory
                saved = tensors([node.saved_tensors, vars(node)])
            by_place = {_place(value.tensor): value.tensor for value in values} if saved else {}
            yield from tensors([taken, [by_place.get(_place(tensor), tensor) for tensor in saved]])


def _place(tensor: Tensor) -> Any:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return storage_of(tensor), (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_strided else id(tensor)
