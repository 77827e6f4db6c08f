"""Random models that are legal in one process and hard on a pipeline: what `fuzz.py` trains.

A layer takes a tree and returns one: inside are some operations, drawn at random, and outside a way to hand things on.
Every layer takes what any other returns, so that all of them meet at all borders.
"""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rpc_pipe.workers.transport.payload import Tree, tensors_of
from trials.fuzz_layers import Calls, linear
from trials.fuzz_operations import OPERATIONS

Pair = namedtuple("Pair", "left right")


#: how a layer hands on what it has made: (tree that came in, output, the layer) -> tree
MANNERS: dict[str, Callable[[Tree, Tensor, nn.Module], Tree]] = {
    "plain": lambda tree, y, layer: y,
    "also plain": lambda tree, y, layer: y,
    "twice": lambda tree, y, layer: (y, y),
    "pair": lambda tree, y, layer: Pair(y, y.square()),
    "dict": lambda tree, y, layer: {"y": y, "none": None, "scale": 0.5, "text": "x", "sum": y.sum(0)},
    "ordered": lambda tree, y, layer: OrderedDict(y=[y, None], other=(y * 2, 3)),
    "weight": lambda tree, y, layer: (y, next(iter(layer.parameters()), y)),
    "made of weights": lambda tree, y, layer: [y, *(p.square().sum() for p in layer.parameters() if _is_dense(p))][:3],
    "buffer": lambda tree, y, layer: (y, next((b for b in layer.buffers() if b.is_floating_point()), None)),
    "views": lambda tree, y, layer: {"parts": [y, y.T, y[0], y[:, ::2]]},
    "what came": lambda tree, y, layer: (y, *_others(tree)[:2]),
    "detached": lambda tree, y, layer: (y, y.detach(), y.detach() > 0),
    "integers": lambda tree, y, layer: (y, y.detach().argmax(1), torch.ones(1, dtype=torch.int64)),
    "scalar": lambda tree, y, layer: (y, y.mean(), torch.tensor(1.5)),
    "empty": lambda tree, y, layer: (y, y[:0], ()),
    "expanded": lambda tree, y, layer: (y, y[:, :1].expand(-1, 3)),
    "packed": lambda tree, y, layer: nn.utils.rnn.PackedSequence(y, torch.tensor([len(y)])),
    "fresh leaf": lambda tree, y, layer: (y, torch.ones(3, requires_grad=True)),
}


def _is_dense(parameter: Tensor) -> bool:
    return not parameter.is_complex() and parameter.is_floating_point()


def _others(tree: Tree) -> list[Tensor]:
    return list(tensors_of(tree))[1:]


class Layer(nn.Module):
    """Some operations, one after the other, and a way to hand on what they make.

    Args:
        taking: how many of the tensors behind the first are used.
    """

    def __init__(self, operations: Sequence[nn.Module], manner: str, taking: int) -> None:
        super().__init__()
        self.operations, self.manner, self.taking = nn.ModuleList(operations), manner, taking

    def forward(self, tree: Tree) -> Tree:
        x = _real(next(tensors_of(tree)))
        for other in _others(tree)[: self.taking]:
            other = _real(other)
            x = x + (other if other.shape == x.shape else other.sum()) / 4
        for operation in self.operations:
            x = operation(_fit(x, operation))
        return MANNERS[self.manner](tree, x, self)


def _real(tensor: Tensor) -> Tensor:
    """Return numbers that a layer can compute with; the tensor itself if it has such."""
    if tensor.is_complex():
        return tensor.real + tensor.imag
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _fit(x: Tensor, module: nn.Module) -> Tensor:
    x, usual = _real(x), torch.get_default_dtype()
    return x if x.dtype == usual or isinstance(module, Calls) else x.to(usual)


class Made:
    """Builds a layer that is drawn from a seed: the same again and again. Picklable."""

    def __init__(self, seed: int, num: int, among: Sequence[str], manners: Sequence[str]) -> None:
        self.seed, self.num, self.among, self.manners = seed, num, among, manners

    @property
    def names(self) -> list[str]:
        """What is inside."""
        draw = random.Random(self.seed)
        chosen = [draw.choice(self.among) for _ in range(self.num)]
        return [*chosen, draw.choice(self.manners)]

    def __call__(self) -> nn.Module:
        *operations, manner = self.names
        draw = random.Random(self.seed + 1)
        return Layer([OPERATIONS[name](draw) for name in operations], manner, draw.choice([0, 1, 1, 4]))


def first(tree: Tree) -> Tensor:
    """Return what a loss function compares."""
    return _real(next(tensors_of(tree)))


def mean(output: Tree, target: Tensor) -> Tensor:
    return functional.mse_loss(first(output), target)


def everything(output: Tree, target: Tensor) -> Tensor:
    """All that the last layer hands on counts."""
    others = [_real(tensor).sum() / 100 for tensor in _others(output)]
    return functional.mse_loss(first(output), target) + sum(others)


def summed(output: Tree, target: Tensor) -> tuple[Tensor, int]:
    return functional.mse_loss(first(output), target, reduction="sum"), len(target)


def masked(output: Tree, target: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the rows whose target begins with a positive number: perhaps none of a microbatch."""
    mask = target[:, 0] > 0
    return ((first(output) - target).square().sum(1) * mask).sum(), mask.sum()


def noisy(output: Tree, target: Tensor) -> tuple[Tensor, int]:
    """With noise, and writes the target in place."""
    x = first(output)
    return functional.mse_loss(x + torch.randn_like(x) / 4, target.sub_(1), reduction="sum"), len(target)


def classes(output: Tree, target: Tensor) -> Tensor:
    return functional.cross_entropy(first(output), target.argmax(1), label_smoothing=0.1)


def of_one_number(output: Tree, target: Tensor) -> Tensor:
    return functional.l1_loss(first(output), target).double().reshape(1)


def written(output: Tree, target: Tensor) -> Tensor:
    return first(output).mul(0.5).sub_(target).abs_().mean()


LOSSES = (mean, mean, everything, summed, masked, noisy, classes, of_one_number, written)
#: those that give a mean, and draw nothing
MEANS = (mean, everything, classes, of_one_number, written)


class Unsplit(nn.Module):
    """A model with a forward of its own: a stem, blocks with a connection around some of them, perhaps a tied head."""

    def __init__(self, makers: Sequence[Callable[[], nn.Module]], tied: bool, skips: bool, draws: bool) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(make() for make in makers)
        self.head = linear()
        self.skips, self.draws = skips, draws
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = first(block(x))
            if self.skips and number % 3 == 1:
                x = x + start
            if self.draws and number % 2:
                x = functional.dropout(x, 0.2, self.training)
        out: Tensor = self.head(x.to(torch.get_default_dtype()))
        return out
