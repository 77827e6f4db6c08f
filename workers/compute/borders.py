"""What enters and leaves a stage: tensors that its layers may write in place, as they could inside one model.

Inside one model a layer's input is what another layer has returned. At a stage's border it is a leaf, which autograd
lets nobody write, and its memory is somebody else's: of the stage before, if that is in this process, or of the user's
batch. Only where layers write the batch it is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..transport.payload import Payload, Tree, as_leaf, is_dense, pack, span, tensors_of, unpack

#: what is smaller is copied sooner than it is shared
_SMALL_BYTES = 2**12
#: and what of a batch sooner than it is found out whether it is written
_SMALL_BATCH_BYTES = 2**16
#: attribute of a leaf
_AS_IT_CAME = "_grad_as_it_came"


class Entered(NamedTuple):
    """A payload as the layers of a stage get it."""

    tree: Tree
    #: leaves whose gradients are owed
    owing: list[Tensor]
    #: (tensor of the payload, what the layers get, version of that)
    given: list[tuple[Tensor, Tensor, int]]

    def written(self) -> bool:
        """Tell whether layers have written what they got.

        It is told to the payload's tensors too, so that a backward that needs what was there says so, as it does
        inside one model.
        """
        found = False
        for tensor, given, version in self.given:
            if not given.is_inference() and given._version != version:
                found = True
                if given.requires_grad and given.data_ptr() == tensor.data_ptr():
                    increment_version(tensor)  # without a gradient, the two have one version
        return found


def enter(payload: Payload, *, copied: bool = False) -> Entered:
    """Make a payload's tensors ones that layers may write.

    Args:
        copied: whether the layers get copies.
    """
    owing: list[Tensor] = []
    given: list[tuple[Tensor, Tensor, int]] = []

    def take(tensor: Tensor, owes_grad: bool) -> Tensor:
        free = leaf = as_leaf(copy_of(tensor) if copied else tensor, owes_grad)
        if owes_grad:
            owing.append(leaf)
            _keep_strides(leaf)
            # Neither a leaf nor a view: to autograd it is what a layer has returned. The same memory, if large.
            # A copy would not have the strides of what repeats elements or leaves some out, and so sums other orders.
            alike = leaf.layout is not torch.strided or (leaf.nbytes <= _SMALL_BYTES and is_dense(leaf))
            free = leaf.clone() if alike else torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
        given.append((tensor, free, 0 if free.is_inference() else free._version))
        return free

    return Entered(unpack(payload, take), owing, given)


def _keep_strides(leaf: Tensor) -> None:
    """Let a leaf keep its gradient as it comes, where autograd would lay it out as the leaf is."""
    this, strides = weakref.ref(leaf), leaf.stride() if leaf.layout is torch.strided else ()

    def keep(grad: Tensor) -> None:
        leaf = this()
        if leaf is not None and grad.layout is torch.strided and grad.stride() != strides:
            vars(leaf)[_AS_IT_CAME] = grad

    leaf.register_hook(keep)


def grad_of(leaf: Tensor) -> Tensor | None:
    """Return the gradient that a leaf owes, with the strides that it has inside one model: by them it is summed."""
    grad: Tensor | None = vars(leaf).get(_AS_IT_CAME, leaf.grad)
    return grad


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides: a copy without would be summed in another order."""
    if tensor.layout is not torch.strided or is_dense(tensor) or not tensor.numel():
        return tensor.clone()
    reach = span(tensor.shape, tensor.stride())
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def leaving(tree: Tree, staying: Callable[[], Iterable[Tensor]]) -> Payload:
    """Pack what leaves a stage; copied is what shares memory with something that stays and may be written.

    Args:
        staying: returns what stays; called only where a look at the tree does not tell.
    """
    payload = pack(tree)
    if all([_is_activation(tensor) for tensor in tensors_of(tree)]):
        return payload
    addresses = {_address(tensor) for tensor in staying()}
    tensors = [copy_of(tensor) if _address(tensor) in addresses else tensor for tensor in payload.tensors]
    return Payload(tensors, payload.skeleton)


def _is_activation(tensor: Tensor) -> bool:
    """Tell whether autograd has seen the tensor, or what it is a view of, being made: its memory is its own."""
    if tensor._is_view():
        return tensor._base is not None and not tensor._base.is_leaf
    return not tensor.is_leaf


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)


def copies_batch(batch: Payload, written: bool | None) -> bool:
    """Tell whether layers get copies of a batch: of a small one always, since a layer may write it by chance.

    Args:
        written: whether they have been seen to write one; None: it has not been looked at.
    """
    return written is not False or batch.num_bytes <= _SMALL_BATCH_BYTES


def starts(roots: list[Tensor], grads: Payload | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what backward starts from, and the gradients there."""
    if grads is None:
        return roots, [None] * len(roots)
    pairs = [(root, grad) for root, grad in zip(roots, unpack(grads), strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
