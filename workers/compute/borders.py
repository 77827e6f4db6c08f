"""What enters and leaves a stage: tensors that its layers may write in place, as they could inside one model.

Inside one model a layer's input is what another layer has returned. At a stage's border it is a leaf, which autograd
lets nobody write, and its memory is somebody else's: of the stage before, if that is in this process, or of the user's
batch. Only where layers write the batch it is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..transport.payload import Payload, Tree, as_leaf, is_dense, pack, span, tensors_of, unpack
from .sharing import Keepers, Sharing, address, refuse, told

logger = logging.getLogger(__name__)
#: what is smaller is copied sooner than it is shared
_SMALL_BYTES = 2**12
#: and what of a batch sooner than it is found out whether it is written
_SMALL_BATCH_BYTES = 2**16


class Entered(NamedTuple):
    """A payload as the layers of a stage get it."""

    tree: Tree
    #: leaves whose gradients are owed
    owing: list[Tensor]
    #: (tensor of the payload, what the layers get, version of that; -1: it has none)
    given: list[tuple[Tensor, Tensor, int]]
    #: numbers of those that overlapped in the stage before
    groups: tuple[tuple[int, ...], ...] = ()

    def written(self) -> bool:
        """Tell whether layers have written what they got.

        It is told to the payload's tensors too, so that a backward that needs what was there says so, as it does
        inside one model.

        Raises:
            RuntimeError: it overlapped with something else, which it does no longer.
        """
        found = [n for n, (_, given, version) in enumerate(self.given) if version >= 0 and given._version != version]
        if not found:
            return False
        for number in found:
            tensor, given, _ = self.given[number]
            if given.requires_grad and given.data_ptr() == tensor.data_ptr():
                increment_version(tensor)  # without a gradient, the two have one version
        refuse(self.groups, found)
        return True


class Owed:
    """Gradients that leaves owe, as backward brings them: autograd would lay them out as the leaves are.

    The hooks serve all microbatches, and are set as `Tensor.register_hook` does: to make one for each leaf takes longer
    than all else that is done with it.
    """

    def __init__(self) -> None:
        self._hooks: list[dict[int, Callable[[Tensor], Tensor | None]]] = []
        #: of the leaves that backward runs for, and gradients that have others
        self._strides: list[tuple[int, ...]] = []
        self._came: dict[int, Tensor] = {}

    def watch(self, leaves: Sequence[Tensor]) -> None:
        """Look at the gradients of the leaves of a microbatch."""
        for number, leaf in enumerate(leaves):
            if number == len(self._hooks):
                self._hooks.append({0: partial(self._look, number)})
            leaf._backward_hooks = self._hooks[number]

    def expect(self, leaves: Sequence[Tensor]) -> None:
        """Backward begins, for these leaves; one before may have failed on its way."""
        self._strides = [leaf.stride() if leaf.layout is torch.strided else () for leaf in leaves]
        self._came = {}

    def taken(self, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Backward is over: return the gradients, with the strides that they have inside one model."""
        found = tuple([self._came.get(number, leaf.grad) for number, leaf in enumerate(leaves)])
        self._strides, self._came = [], {}
        return found

    def _look(self, number: int, grad: Tensor) -> Tensor | None:
        # Held is only what will be needed: of a gradient that somebody holds autograd makes a copy.
        if grad.layout is torch.strided and number < len(self._strides) and grad.stride() != self._strides[number]:
            self._came[number] = grad
        return None


def enter(payload: Payload, *, copied: bool = False) -> Entered:
    """Make a payload's tensors ones that layers may write.

    Args:
        copied: whether the layers get copies.
    """
    owing: list[Tensor] = []
    given: list[tuple[Tensor, Tensor, int]] = []
    views = payload.skeleton.views if type(payload.skeleton) is Sharing else ()

    def take(tensor: Tensor, owes_grad: bool) -> Tensor:
        own = copy_of(tensor) if copied else tensor
        free = leaf = own if copied and not owes_grad else as_leaf(own, owes_grad)
        if owes_grad:
            owing.append(leaf)
            # No leaf, and a view if it was one: to autograd it is what a layer has returned. The same memory, if large.
            # A copy would not have the strides of what repeats elements or leaves some out, and so sums other orders.
            alike = leaf.layout is not torch.strided or (leaf.nbytes <= _SMALL_BYTES and is_dense(leaf))
            free = leaf.clone() if alike else torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
            if len(given) in views:  # to whoever writes it, too
                free = torch.ops.aten.alias.default(free)
        given.append((tensor, free, -1 if free.is_inference() else free._version))
        return free

    tree = unpack(payload, take)
    if type(tree) is not Sharing:
        return Entered(tree, owing, given)
    return Entered(tree.tree, owing, given, tree.groups)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides: a copy without would be summed in another order."""
    if tensor.layout is not torch.strided or is_dense(tensor) or not tensor.numel():
        return tensor.clone()
    reach = span(tensor.shape, tensor.stride())
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def leaving(tree: Tree, staying: Callable[[], Iterable[Tensor]], keepers: Keepers) -> Payload:
    """Pack what leaves a stage; copied is what shares memory with something that stays and may be written.

    Args:
        staying: returns what stays; called only where a look at the tree does not tell.
        keepers: know what layers keep of it.
    """
    payload = pack(tree)
    payload = told(payload, tree, keepers.kept(payload))
    if all([_is_activation(tensor) for tensor in tensors_of(tree)]):
        return payload
    addresses = {address(tensor) for tensor in staying()}
    tensors = [copy_of(tensor) if address(tensor) in addresses else tensor for tensor in payload.tensors]
    return Payload(tensors, payload.skeleton)


def _is_activation(tensor: Tensor) -> bool:
    """Tell whether autograd has seen the tensor, or what it is a view of, being made: its memory is its own."""
    if tensor._is_view():
        return tensor._base is not None and not tensor._base.is_leaf
    return not tensor.is_leaf


def version_of(tensor: Tensor) -> int:
    """Return how often autograd has seen a tensor being written; 0 where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


def copies_batch(batch: Payload, written: bool | None) -> bool:
    """Tell whether layers get copies of a batch: of a small one always, since a layer may write it by chance.

    Args:
        written: whether they have been seen to write one; None: it has not been looked at.
    """
    return written is not False or batch.num_bytes <= _SMALL_BATCH_BYTES


def tell_written(layer: int, microbatch: int) -> None:
    """Tell that a batch has been written that was not copied, as nobody had written one before."""
    logger.warning(
        "layer %d or one behind it has written its input in place, which it had not done before: of microbatch %d that "
        "was the batch itself, which is changed now; it is copied from here on", layer, microbatch,
    )  # fmt: skip


def starts(roots: list[Tensor], grads: Payload | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what backward starts from, and the gradients there."""
    if grads is None:
        return roots, [None] * len(roots)
    pairs = [(root, grad) for root, grad in zip(roots, unpack(grads), strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
