"""Backward in two: gradients of a stage's inputs first, gradients of its weights later, nothing computed twice.

The autograd graph of a stage is cut where paths that reach only weights leave the paths that reach inputs:

    output ── ... ── matmul ── ... ── input          I runs along here and stops nowhere
                       └── transpose ── weight       W runs along here, from where the paths part

A node that can compute its two gradients apart (a matrix product, a convolution) runs once in each pass, each time for
one of them. Any other node runs once, in I, and its result for the weights waits for W: for a norm or a scale
it has the size of the weights. After I, everything saved in forward is freed but for tensors that the nodes of W still
read. That is little less, or nothing: W of a product needs its input and the gradient of its output, which did not
exist before. A stage of products, norms and activation functions, each as wide as the next, holds 0.9 to 1.05 of its
activations from I to W; only tensors saved by norms, activation functions, dropout and attention are freed.

Gradients that meet in one place must be summed in one pass, in autograd's order. So I also makes the gradients of a
weight that several paths lead to, be it from several nodes or from an output of the stage that is made of weights
alone; and the gradients of all weights where forward has registered hooks: a node that runs twice would call a hook
twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ...dependency import ConfigError
from .autograd_graph import children_first, packed
from .modules.borders import address, strided_copy
from .modules.torch_internals import keep_uncompiled, without_torch_function

#: nodes with a formula that computes the gradient of each operand separately, and only on demand
_SEPARABLE = frozenset((
    "AddmmBackward", "MmBackward", "BmmBackward", "BaddbmmBackward", "AddbmmBackward", "AddmvBackward", "MvBackward",
    "LinearBackward", "ConvolutionBackward", "ConvolutionBackwardOverrideable", "ConvolutionOverrideableBackward",
))  # fmt: skip
#: nodes that hide their saved tensors
_OPAQUE = frozenset(("CopySlices", "CppFunction"))

#: where a gradient enters a node: the node and which of its outputs the gradient is for
_Edge = tuple[Node, int]
#: a run of the engine: its starting edges and gradients
_Starts = list[tuple[_Edge, Tensor]]


class Saved:
    """The tensors that forward saves for backward, held so that each can be freed."""

    def __init__(self) -> None:
        self._handles: list[_Handle] = []
        #: whether forward may have registered hooks of tensors or nodes
        self.hooked = False
        #: handles that outlive their first use; None while nothing is freed
        self._kept: set[_Handle] | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Return a context that saves autograd's tensors here; `torch.func.grad` and the like refuse it."""
        num_registered = RemovableHandle.next_id  # of the process; a node does not show its hooks
        with saved_tensors_hooks(self._save, self._load):
            yield
        self.hooked |= RemovableHandle.next_id != num_registered

    @contextmanager
    def freeing(self, later: Iterable[Node], graph: _Graph) -> Iterator[None]:
        """Free each tensor when it has been used, and at the end all but the tensors of the nodes `later`.

        Hooks, and nodes written in Python, may run inner graphs again and again. So the tensors that they may read are
        freed only at the end.
        """
        kept = {handle for node in later for handle in _handles(node)}
        several = set(self._handles if self.hooked or graph.written_in_python else ())
        if not self.hooked:
            of_others = (node for node in graph.nodes if node not in graph.written_in_python)
            several.difference_update(handle for node in of_others if several for handle in _handles(node))
        self._kept = kept | several
        try:
            yield
        finally:
            self._kept = None
            for handle in self._handles:
                if handle not in kept:
                    handle.tensor = None
            self._handles = list(kept)

    def num_bytes(self, without: Collection[int] = ()) -> dict[int, int]:
        """Return the bytes of the held storages by address, except `without`."""
        storages = [handle.tensor.untyped_storage() for handle in self._handles if handle.tensor is not None]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in without}

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Hold `change(tensor)` instead of each tensor, such as a copy in another memory, for backward to read."""
        for handle in self._handles:
            if handle.tensor is not None:
                self._load_unchanged(handle)
                handle.tensor = change(handle.tensor)
                handle.version = handle.tensor._version

    def _save(self, tensor: Tensor) -> _Handle:
        # Detached: a saved output would otherwise hold the node that holds it. Not a weight: a layer may give it other
        # memory, which autograd then reads.
        with without_torch_function():  # it is not the model that does this
            held = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            handle = _Handle(held, held._version)
        self._handles.append(handle)
        return handle

    def _load(self, handle: _Handle) -> Tensor:
        tensor = self._load_unchanged(handle)
        if self._kept is not None and handle not in self._kept:
            handle.tensor = None
        return tensor

    @staticmethod
    def _load_unchanged(handle: _Handle) -> Tensor:
        tensor = handle.tensor
        if tensor is None:
            raise RuntimeError("backward for inputs ran through a part of the graph a second time")
        if tensor._version != handle.version:
            raise ConfigError(f"tensor of shape {tuple(tensor.shape)} that backward needs was changed in place")
        return tensor


keep_uncompiled(Saved._save)
keep_uncompiled(Saved._load)


class _Handle:
    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version  # with hooks, autograd does not look for changes in place itself


def _handles(node: Node) -> Iterator[_Handle]:
    return (each for each in packed(node) if isinstance(each, _Handle))


def _may_wait(node: Node) -> bool:
    """Return whether `node` may run after I: not if it would recompute a checkpoint twice, or use freed tensors."""
    if type(node).__name__ in _OPAQUE:
        return False
    return all(each is None or isinstance(each, (_Handle, Tensor)) for each in packed(node))


def backward_inputs(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor], saved: Saved
) -> tuple[list[Tensor | None], WeightBackward]:
    """Return the gradients of `inputs` and the rest of the work, for the weights.

    Args:
        roots: tensors that backward starts from, each with its gradient; None for a scalar that counts as 1.
        inputs: leaves. Their data is freed.
        saved: the tensors saved by the forward that made `roots`.
    """
    first = [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads, strict=True)]
    edges = [get_gradient_edge(root) for root in roots]
    starts = list(zip(((edge.node, edge.output_nr) for edge in edges), first, strict=True))
    graph = _Graph([edge for edge, _ in starts], {_leaf_node(leaf) for leaf in inputs})
    now, later = graph.divided(all_now=saved.hooked)
    along: _Starts = []
    apart: _Starts = []
    for start in starts:
        (apart if graph.outputs in later and start[0][0] not in graph.to_inputs else along).append(start)
    weights = list(dict.fromkeys(leaf for branch in now for leaf in branch.leaves))
    cut = [edge for branch in later if branch is not graph.outputs for edge in branch.edges]
    wanted = [*((_leaf_node(leaf), 0) for leaf in inputs), *((leaf, 0) for leaf in weights), *cut]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if along:
        with saved.freeing((node for branch in later for node in branch.nodes), graph):
            found = _run(along, wanted, retain_graph=True)
    for leaf in inputs:
        # The graph that leads here stays until W; the leaf in it would hold the activation.
        if leaf.layout is torch.strided and not leaf.is_nested:  # else torch cannot take its memory away
            leaf.data = leaf.data.new_empty(0)
    at = dict(zip(wanted, found, strict=True))
    runs = [(apart, branch.leaves) for branch in later if branch is graph.outputs]
    runs += [(_there(branch.edges, at), branch.leaves) for branch in later if branch is not graph.outputs]
    return _unshared(found, len(inputs)), WeightBackward([(leaf, at[leaf, 0]) for leaf in weights], runs, edges)


def _leaf_node(leaf: Tensor) -> Node:
    if leaf.layout is torch.strided:
        with without_torch_function():  # a view of a class of its own has more nodes
            return get_gradient_edge(leaf).node
    made = leaf.clone().grad_fn  # torch finds the node by a view, and sparse tensors have none
    assert made is not None
    return made.next_functions[0][0]  # type: ignore[return-value]


def _there(edges: Iterable[_Edge], at: Mapping[_Edge, Tensor | None]) -> _Starts:
    return [(edge, grad) for edge in edges if (grad := at[edge]) is not None]


def _unshared(grads: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """Return the first `count` gradients, copied where they share memory: a receiver may write to its gradient."""
    users = Counter(address(grad) for grad in grads if grad is not None)
    return [strided_copy(grad) if grad is not None and users[address(grad)] > 1 else grad for grad in grads[:count]]


def _run(starts: _Starts, wanted: Iterable[_Edge], retain_graph: bool = False) -> Sequence[Tensor | None]:
    """Return the gradients at the edges `wanted`, from the gradients at `starts` on."""
    edges = [GradientEdge(*edge) for edge, _ in starts]
    grads = [grad for _, grad in starts]
    places = [GradientEdge(*edge) for edge in wanted]
    return torch.autograd.grad(edges, places, grads, retain_graph=retain_graph, allow_unused=True)


class WeightBackward:
    """The weights' part of a backward, with the gradients where it starts.

    Args:
        sums: leaves of the graph, and their gradients as I has made them.
        runs: where to start the engine, and the leaves to run to.
        roots: of the graph. In torch before 2.13 a node written in Python does not own the nodes below it; roots do.
    """

    def __init__(
        self,
        sums: Iterable[tuple[Node, Tensor | None]],
        runs: Iterable[tuple[_Starts, list[Node]]],
        roots: Sequence[GradientEdge],
    ) -> None:
        self._sums = [(leaf, grad) for leaf, grad in sums if grad is not None]
        self._runs = [(starts, leaves) for starts, leaves in runs if starts and leaves]
        self._roots = list(roots) if self._runs else []

    def run(self) -> None:
        """Add to the gradients of the weights."""
        for leaf, grad in self._sums:
            _accumulate(leaf, grad)
        for starts, leaves in self._runs:
            for leaf, found in zip(leaves, _run(starts, [(leaf, 0) for leaf in leaves]), strict=True):
                if found is not None:
                    _accumulate(leaf, found)
        self._sums.clear()
        self._runs.clear()
        self._roots.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the gradients that wait here, each storage once."""
        grads = [grad for _, grad in self._sums] + [grad for starts, _ in self._runs for _, grad in starts]
        storages = [grad.untyped_storage() for grad in grads if grad.layout is torch.strided]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _accumulate(leaf: Node, grad: Tensor) -> None:
    """Add to the gradient of the weight that `leaf` stands for, and call the hooks that wait for it."""
    weight: Tensor = leaf.variable  # type: ignore[attr-defined]
    if weight.grad is None:
        # A copy: a gradient of autograd may be shared, with another weight or with a received one.
        made = torch.empty_like(weight, dtype=grad.dtype)  # `grad_dtype`: the engine casts to it
        weight.grad = grad.clone() if grad.is_sparse else made.copy_(grad)
    elif weight.grad.is_sparse and not grad.is_sparse:
        weight.grad = grad + weight.grad
    else:
        weight.grad += grad
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


class _Branch(NamedTuple):
    """A part of the graph that reaches only weights."""

    #: where it starts
    edges: list[_Edge]
    nodes: list[Node]
    #: nodes of the weights that it leads to
    leaves: list[Node]


class _Graph:
    """The part of the autograd graph that one microbatch made on one stage.

    Args:
        roots: where backward starts.
        inputs: nodes of the stage's inputs.
    """

    def __init__(self, roots: Sequence[_Edge], inputs: set[Node]) -> None:
        self.nodes = children_first(node for node, _ in roots)
        #: nodes that may read their saved tensors several times
        self.written_in_python = {node for node in self.nodes if isinstance(node, BackwardCFunction)}
        #: nodes that lead to an input
        self.to_inputs: set[Node] = set()
        #: among them, nodes with a path that reaches only weights -> its first nodes
        self._leaving: dict[Node, list[_Edge]] = {}
        for node in self.nodes:
            children = [(child, i) for child, i in node.next_functions if child is not None]
            if node in inputs or any(child in self.to_inputs for child, _ in children):
                self.to_inputs.add(node)
                if leaving := [edge for edge in children if edge[0] not in self.to_inputs]:
                    self._leaving[node] = leaving
        #: the nodes of outputs that lead to no input
        self.outputs = _branch([edge for edge in roots if edge[0] not in self.to_inputs])

    def divided(self, all_now: bool) -> tuple[list[_Branch], list[_Branch]]:
        """Return the branches that compute their weights' gradients in I, and the branches that run in W."""
        branches = [self.outputs]
        if not self.to_inputs:  # as on the first stage
            return [], branches
        seen: set[_Edge] = set()
        for node in reversed(self.nodes):
            leaving = self._leaving.get(node, [])
            if leaving and node.name().rstrip("0123456789") in _SEPARABLE and _may_wait(node):
                below = _branch(leaving)
                branches.append(_Branch([(node, 0)], [node, *below.nodes], below.leaves))  # such a node has one output
            else:
                branches += [_branch([edge]) for edge in leaving if edge not in seen]
                seen |= set(leaving)
        users = Counter(leaf for branch in branches for leaf in branch.leaves)
        now: list[_Branch] = []
        later: list[_Branch] = []
        for branch in branches:
            shared = any(users[leaf] > 1 for leaf in branch.leaves)
            ready = branch is not self.outputs and (all_now or branch.nodes == branch.leaves)
            (now if shared or ready or not all(map(_may_wait, branch.nodes)) else later).append(branch)
        return now, later


def _branch(edges: list[_Edge]) -> _Branch:
    nodes = children_first(node for node, _ in edges)
    return _Branch(edges, nodes, [node for node in nodes if hasattr(node, "variable")])
