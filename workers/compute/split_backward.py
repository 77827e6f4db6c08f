"""Backward in two: gradients of a stage's inputs first, those of its weights later, nothing computed twice.

The autograd graph of a stage is cut where paths that reach only weights leave the paths that reach inputs:

    output ── ... ── matmul ── ... ── input          I runs along here and stops nowhere
                       └── transpose ── weight       W runs along here, from where the paths part

A node that can compute its two gradients apart (a matrix product, a convolution) runs once in each pass, each time for
one of them. Any other node runs once, in I, and what it makes for the weights waits for W: for a norm or a scale
that is the size of the weights. After I, everything saved in forward is freed but for what the nodes of W still
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

#: nodes whose formula computes the gradient of each operand by itself, and only if it is asked for
_SEPARABLE = frozenset((
    "AddmmBackward", "MmBackward", "BmmBackward", "BaddbmmBackward", "AddbmmBackward", "AddmvBackward", "MvBackward",
    "LinearBackward", "ConvolutionBackward", "ConvolutionBackwardOverrideable", "ConvolutionOverrideableBackward",
))  # fmt: skip

#: where a gradient enters a node: the node and which of its outputs the gradient is for
_Edge = tuple[Node, int]


class Saved:
    """What forward saves for backward, held where it can be let go of tensor by tensor."""

    def __init__(self) -> None:
        self._handles: list[_Handle] = []
        #: handles that are being read, while it is found out which
        self._seen: set[_Handle] | None = None
        #: handles that outlive their first use; None while nothing is freed
        self._kept: set[_Handle] | None = None

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context in which what autograd saves is saved here."""
        return saved_tensors_hooks(self._save, self._load)

    @contextmanager
    def freeing(self, later: Iterable[Node], several_times: Iterable[Node]) -> Iterator[None]:
        """Free each tensor when it has been used, and at the end all but those that the nodes `later` use.

        What the nodes `several_times` use is freed only at the end.
        """
        kept = self._read_by(later)
        self._kept = kept | self._read_by(several_times)
        try:
            yield
        finally:
            self._kept = None
            for handle in self._handles:
                if handle not in kept:
                    handle.tensor = None
            self._handles = list(kept)

    def num_bytes(self, without: Iterable[int] = ()) -> int:
        """Return the bytes of what is held, each storage once, but for storages at the addresses `without`."""
        storages = [handle.tensor.untyped_storage() for handle in self._handles if handle.tensor is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for address, size in sizes.items() if address not in without)

    def _read_by(self, nodes: Iterable[Node]) -> set[_Handle]:
        seen: set[_Handle] = set()
        self._seen = seen
        for node in nodes:
            for name in _saved_names(type(node)):
                getattr(node, name)
        self._seen = None
        return seen

    def _save(self, tensor: Tensor) -> _Handle:
        # Detached: a saved output would otherwise hold the node that holds it.
        handle = _Handle(tensor.detach(), tensor._version)
        self._handles.append(handle)
        return handle

    def _load(self, handle: _Handle) -> Tensor:
        tensor = handle.tensor
        if tensor is None:
            raise RuntimeError("backward for inputs ran through a part of the graph a second time")
        if tensor._version != handle.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it was used"
            )
        if self._seen is not None:
            self._seen.add(handle)
        elif self._kept is not None and handle not in self._kept:
            handle.tensor = None
        return tensor


class _Handle:
    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version  # with hooks, autograd does not look for changes in place itself


_names: dict[type, list[str]] = {}


def _saved_names(node: type) -> list[str]:
    """Return the attributes through which a node's saved tensors are read."""
    if node not in _names:
        found = [name for name in dir(node) if name.startswith("_saved_")]
        _names[node] = found or [name for name in ("saved_tensors",) if hasattr(node, name)]
    return _names[node]


def backward_inputs(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor], saved: Saved
) -> tuple[list[Tensor | None], Deferred]:
    """Return the gradients of `inputs` and what is left to do for the weights.

    Args:
        roots: tensors that backward starts from, each with its gradient; None for a scalar that counts as 1.
        inputs: leaves. Their data is freed.
        saved: what the forward that made `roots` has saved.
    """
    starts = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, roots)]
    first = [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads, strict=True)]
    graph = _Graph([node for node, _ in starts], {get_gradient_edge(leaf).node for leaf in inputs})
    along = [i for i, (node, _) in enumerate(starts) if node in graph.to_inputs]
    cut = graph.cut()
    # Roots that no input is reached from are all for later; so is everything on the first stage.
    at = {starts[i]: first[i] for i in range(len(starts)) if i not in along}
    found: Sequence[Tensor | None] = [None] * len(inputs)
    with saved.freeing(graph.below([*cut, *at]), graph.written_in_python):
        if along:
            wanted: list[Any] = [*inputs, *(GradientEdge(*edge) for edge in cut)]
            found = torch.autograd.grad(
                [roots[i] for i in along],
                wanted,
                [first[i] for i in along],
                retain_graph=True,
                allow_unused=True,
            )
    at |= {edge: grad for edge, grad in zip(cut, found[len(inputs) :], strict=False) if grad is not None}
    deferred = Deferred(at, graph)
    for leaf in inputs:
        # The graph that leads here stays until W; the leaf in it would hold the activation.
        leaf.data = leaf.data.new_empty(0)
    return list(found[: len(inputs)]), deferred


class Deferred:
    """The weights' part of a backward, with the gradients where it starts."""

    def __init__(self, starts: dict[_Edge, Tensor], graph: _Graph) -> None:
        # From a separable node the engine would run on to the weights of earlier layers: one by one, for its own.
        alone = [edge for edge in starts if edge[0] in graph.to_inputs]
        together = [edge for edge in starts if edge[0] not in graph.to_inputs]
        #: runs of the engine: (where it starts, the gradients there, the leaves it is for)
        self._runs = [
            (edges, [starts[edge] for edge in edges], _leaves(graph.below(edges)))
            for edges in ([edge] for edge in alone)
        ]
        if together:
            self._runs.append((together, [starts[edge] for edge in together], _leaves(graph.below(together))))

    def run(self) -> None:
        """Add to the gradients of the weights."""
        for edges, grads, leaves in self._runs:
            weights = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
            found = torch.autograd.grad([GradientEdge(*edge) for edge in edges], weights, grads, allow_unused=True)
            for weight, grad in zip(weights, found, strict=True):
                if grad is not None:
                    _accumulate(weight, grad)
        self._runs.clear()


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    if weight.grad is None:
        # A copy: what autograd returns may be shared, with another weight or with what was received.
        weight.grad = grad.clone() if grad.is_sparse else torch.empty_like(weight).copy_(grad)
    elif weight.grad.is_sparse and not grad.is_sparse:
        weight.grad = grad + weight.grad
    else:
        weight.grad += grad


class _Graph:
    """The part of the autograd graph that one microbatch made on one stage."""

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        self._order = _children_first(roots)
        #: nodes that may read what they saved several times
        self.written_in_python = [node for node in self._order if isinstance(node, BackwardCFunction)]
        #: nodes from which an input can be reached
        self.to_inputs: set[Node] = set()
        #: those of them from which a path leaves that reaches only weights -> where it leads
        self.leaving: dict[Node, list[_Edge]] = {}
        for node in self._order:
            children = [(child, i) for child, i in node.next_functions if child is not None]
            if node in inputs or any(child in self.to_inputs for child, _ in children):
                self.to_inputs.add(node)
                if leaving := [edge for edge in children if edge[0] not in self.to_inputs]:
                    self.leaving[node] = leaving

    def below(self, edges: Iterable[_Edge]) -> list[Node]:
        """Return the nodes that run in W from `edges` on: of separable nodes only what leads to their weights."""
        starts = list(dict.fromkeys(node for node, _ in edges))
        again = [node for node in starts if node in self.to_inputs]
        onward = [child for node in again for child, _ in self.leaving[node]]
        return again + _children_first([*onward, *(node for node in starts if node not in self.to_inputs)])

    def cut(self) -> list[_Edge]:
        """Return where W starts: at a separable node, which runs once more, or behind a node that runs once, in I.

        A weight that several nodes lead to is summed in I, in autograd's own order.
        """
        leaves = {node: _leaves(_children_first([c for c, _ in edges])) for node, edges in self.leaving.items()}
        users = Counter(leaf for below in leaves.values() for leaf in below)
        cut: dict[_Edge, None] = {}
        for node in reversed(self._order):
            if node not in self.leaving:
                continue
            if any(users[leaf] > 1 for leaf in leaves[node]):
                cut |= dict.fromkeys((leaf, 0) for leaf in leaves[node])
            elif node.name().rstrip("0123456789") in _SEPARABLE:
                cut[node, 0] = None  # such a node has one output
            else:
                cut |= dict.fromkeys(self.leaving[node])
        return list(cut)


def _children_first(roots: Iterable[Node]) -> list[Node]:
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


def _leaves(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if not node.next_functions]
