"""Inputs and outputs of a stage, prepared so that its layers may write them in place, as inside one model.

Inside one model the input of a layer is the output of another. At the border of a stage it is a leaf, which autograd
forbids to write in place, and its memory may be foreign: the previous stage's, if that runs in this process, or the
user's batch, which the layers get a copy of. Outputs that share memory are handed on as copies, as they arrive from
another process: behind a cut, writing one in place does not write another. The next stage learns which of its inputs
are views, because autograd lays out the gradient of a tensor written through a view as that of the
view's base.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...transport.payload import (  # isort: skip
    Payload, Place, Tree, as_leaf, distinct_tensors, extent, is_dense, pack, parts_of, tensors_of, unpack,
)  # fmt: skip
from .module_state import KeptAttribute, KeptTensor
from .torch_internals import no_view

#: most bytes of a tensor that is cheaper to clone than to make a view of
_SMALL_BYTES = 2**12


class ForwardArgs(NamedTuple):
    """The arguments of a forward.

    Attributes:
        inputs: the payload of the previous stage; on the first stage, the microbatch.
        fields: the microbatch's fields, if the slice takes them.
        target: second argument of the loss function.
        share: on the last stage, this microbatch's fraction of the step's rows, which weighs a mean loss; None on other
            stages, and to get the output instead of the loss.
        split: whether `backward_inputs` and `backward_weights` will follow instead of `backward`.
        recompute: keep the inputs instead of the activations; `recompute` will be called before backward.
        scale: with a share, if an update does not take whole steps: the share of the rows of the update.
        place: of a slice of sequences: where it begins and ends, and the sequence's length.
    """

    step: int
    microbatch: int
    inputs: Payload
    fields: Tree = None
    target: Tree = None
    share: float | None = None
    split: bool = False
    recompute: bool = False
    scale: float | None = None
    place: tuple[int, int, int] | None = None


class Forwarded(NamedTuple):
    """The parts of a microbatch's forward that its backward needs."""

    step: int
    #: leaves with gradients that the previous stage waits for
    owing: list[Tensor]
    #: outputs (or the loss) that backward starts from
    roots: list[Tensor]
    #: the needs of a split backward, a `Saved`, or None
    saved: Any
    #: the state of the stage's modules behind the forward, if forwards write it
    left: list[KeptTensor | KeptAttribute]


class WithViews(NamedTuple):
    """A tree with tensors that are views; it travels between stages in place of the tree."""

    tree: Tree
    #: indices of the payload's tensors that require a gradient and are views
    views: tuple[int, ...]


def without_views(tree: Tree) -> Tree:
    """Return the tree itself."""
    return tree.tree if type(tree) is WithViews else tree


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; a unique negative number if it has none or is not strided."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
    except RuntimeError:  # a stand-in for a tensor of another stage
        return -id(tensor)


#: (tensor of a payload, the tensor for the layers, its autograd version; -1: an inference tensor, which has none)
Entered = tuple[Tensor, Tensor, int]


def note_writes(entered: Iterable[Entered]) -> None:
    """Let a backward that needs old values of the inputs know which of them layers have written in place.

    It raises autograd's error then, as inside one model. Without a gradient, the two have one version.
    """
    for tensor, given, version in entered:
        if version >= 0 and given._version != version and given.requires_grad:
            if given.data_ptr() == tensor.data_ptr():
                increment_version(tensor)


class InputGradients:
    """Collects the gradients of a stage's inputs with the strides that backward gives them.

    `leaf.grad` would have the strides of the leaf, and kernels that read it would sum in another order. The hooks are
    shared by all microbatches and set as `Tensor.register_hook` does: making one for each leaf costs more than
    everything else that is done with the leaf.
    """

    def __init__(self) -> None:
        self._hooks: list[dict[int, Any]] = []
        #: leaves of the running backward, and gradients with other strides than their leaves
        self._leaves: Sequence[Tensor] = ()
        self._came: dict[int, Tensor] = {}

    def watch(self, leaves: Sequence[Tensor]) -> None:
        """Hook the leaves of a microbatch."""
        for number, leaf in enumerate(leaves):
            if number == len(self._hooks):
                self._hooks.append({0: partial(self._look, number)})
            leaf._backward_hooks = self._hooks[number]

    def expect(self, leaves: Sequence[Tensor]) -> None:
        """Prepare for the backward of these leaves; an earlier backward may have failed halfway."""
        self._leaves, self._came = leaves, {}

    def taken(self, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients after backward, with the strides that they have inside one model."""
        came, self._leaves, self._came = self._came, (), {}
        if not came:
            return tuple([leaf.grad for leaf in leaves])
        return tuple([came.get(number, leaf.grad) for number, leaf in enumerate(leaves)])

    def _look(self, number: int, grad: Tensor | None) -> Tensor | None:
        # Only gradients with other strides are held: autograd copies a gradient that anybody holds. A function of the
        # user's may give None.
        if grad is not None and number < len(self._leaves) and grad.layout is torch.strided:
            leaf = self._leaves[number]
            if leaf.layout is not torch.strided or grad.stride() != leaf.stride():
                self._came[number] = grad
        return None


def stage_inputs(payload: Payload, *, copied: bool = False) -> tuple[Tree, list[Tensor], list[Entered]]:
    """Unpack a payload into tensors that layers may write in place.

    Returns the tree for the layers, the leaves with gradients that the previous stage waits for, and the argument of
    `note_writes` behind the forward.

    Args:
        copied: give the layers copies instead of the payload's memory.
    """
    owing: list[Tensor] = []
    given: list[Entered] = []
    views = payload.skeleton.views if type(payload.skeleton) is WithViews else ()

    def take(tensor: Tensor, owes_grad: bool) -> Tensor:
        own = strided_copy(tensor) if copied else tensor
        free = leaf = own if copied and not owes_grad else as_leaf(own, owes_grad)
        if owes_grad:
            owing.append(leaf)
            # Not a leaf, so that autograd allows writes as to a layer's output; on the same memory if it is large.
            # A clone would lose the strides of expanded or sliced tensors, and kernels would sum in another order.
            small = leaf.layout is torch.strided and leaf.nbytes <= _SMALL_BYTES
            alike = leaf.layout is not torch.strided or (small and (leaf.is_contiguous() or is_dense(leaf)))
            free = leaf.clone() if alike else _other(leaf)
            if len(given) in views and not free.is_nested:  # a view to autograd, as it was in the previous stage
                free = torch.ops.aten.alias.default(free)
        given.append((tensor, free, -1 if free.is_inference() else free._version))
        return free

    tree = unpack(payload, take)
    return tree.tree if type(tree) is WithViews else tree, owing, given


def _other(leaf: Tensor) -> Tensor:
    """Return a tensor on the memory of a leaf that to autograd is no view of it."""
    free = no_view(leaf)
    if free.stride() != leaf.stride():  # in dimensions of size 1; kernels lay out their results by these strides, too
        with torch.no_grad():
            free.as_strided_(leaf.shape, leaf.stride())
    return free


def strided_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; with other strides, kernels would sum in another order."""
    if tensor.layout is not torch.strided or is_dense(tensor) or not tensor.numel():
        return tensor.clone()
    reach = extent(tensor.shape, tensor.stride())
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def stage_output(tree: Tree, staying: Callable[[], Iterable[Tensor]]) -> Payload:
    """Pack the output of a stage; copy tensors that share memory with each other, or with a tensor that stays.

    Args:
        staying: returns the tensors that outlive the forward; called only for outputs that are no activations.
    """
    if type(tree) is Tensor and tree.grad_fn is not None and tree.layout is torch.strided and not tree._is_view():
        return Payload([tree.detach()], Place(0, True))  # made by an operator, as most are
    payload = pack(tree)
    are_activations = all([_is_activation(tensor) for tensor in tensors_of(tree)])
    known = set() if are_activations else {address(tensor) for tensor in staying()}
    tensors = []
    for tensor in payload.tensors:
        tensors.append(strided_copy(tensor) if tensor.numel() and address(tensor) in known else tensor)
        known.add(address(tensor))
    views, number = [], 0
    for tensor in distinct_tensors(tree):
        if tensor.requires_grad and tensor._is_view():
            views.append(number)
        number += 1 if tensor.requires_grad else len(parts_of(tensor))
    return Payload(tensors, WithViews(payload.skeleton, tuple(views)) if views else payload.skeleton)


def _is_activation(tensor: Tensor) -> bool:
    """Return whether an operator made the tensor, or the base that it is a view of: then its memory is not shared."""
    if tensor._is_view():
        return tensor._base is not None and not tensor._base.is_leaf
    return not tensor.is_leaf


def own_target(target: Tree) -> Tree:
    """Return a copy of a microbatch's target, which the loss function may write in place."""
    if type(target) is Tensor and not target.requires_grad:
        return strided_copy(target)  # as most are
    return stage_inputs(pack(target), copied=True)[0]


def backward_starts(roots: list[Tensor], grads: Payload | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that backward starts from and their gradients, without outputs that got none."""
    if grads is None:
        return roots, [None] * len(roots)
    given = unpack(grads)
    if len(given) == len(roots) and all([grad is not None for grad in given]):
        return roots, list(given)
    pairs = [(root, grad) for root, grad in zip(roots, given, strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
