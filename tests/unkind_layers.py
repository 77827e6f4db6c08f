"""Layers that are legal in one process and hard on a pipeline."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rpc_pipe.workers.transport.payload import Tree

WIDTH = 8

Layer = Callable[[], nn.Module]


class Product(torch.autograd.Function):
    """A product as a user's own function; a subclass says how it goes backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight


class Linear(nn.Module):
    """What most are made of: a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class HandedOn(Linear):
    """A weight and what is made of one are used here and handed on, as a position bias or a tied weight is."""

    def forward(self, tree: Tree) -> Tree:
        x, weight, scale = tree if isinstance(tree, tuple) else (tree, self.linear.weight, self.linear.bias.exp())
        own = self.linear.bias.sigmoid()
        y = functional.linear(self.linear(x).tanh() * own * scale, weight + self.linear.weight)
        return y, weight, own + scale


class Twice(Linear):
    """One tensor is returned twice, and written by the next layer: both are."""

    def forward(self, tree: Tree) -> Tree:
        a, b, c = tree if isinstance(tree, tuple) else (tree, tree, tree)
        a = a.mul_(0.5)
        y = self.linear(a + b * c)
        return y, y, y


class InPlace(Linear):
    """Everything that can be is written in place, the input first."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.detach().mean(0))
        x[:, :2].mul_(0.5)
        y = self.linear(functional.relu(x, inplace=True))
        y += 1
        return y.mul_(self.linear.bias)


class EMA(Linear):
    """Its output depends on a moving average, a counter in a buffer, one in an attribute, and a buffer it replaces."""

    mean: Tensor
    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.mean - self.last) * (1 + self.count % 3) / (1 + self.calls % 2)
        if self.training:
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
            self.count += 1
            self.calls += 1
            self.last = x.detach()[0] / 2
        return y.tanh()


class JustMoved(Linear):
    """Scales by buffers that it has just written and backward needs; of one write autograd does not know."""

    seen: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().abs().mean(0), 0.5)
            self.hidden.data.lerp_(x.detach().abs().amax(0), 0.5)
        return self.linear(x * self.seen * self.hidden).tanh()


class Bounded(Linear):
    """Shrinks and bounds its weights before it uses them, which autograd does not see, and moves frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data.mul_(0.9).clamp_(-0.3, 0.3)
            self.book.data.lerp_(x.detach().abs().mean(0), 0.5)
        return (self.linear(x) * self.book).tanh()


class CountHandedOn(Linear):
    """A buffer that the next forward writes is handed on."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, tree: Tree) -> Tree:
        x, count = tree if isinstance(tree, tuple) else (tree, torch.zeros(()))
        self.count += 1
        return self.linear(x).tanh() + count / 4, self.count


class Checkpointed(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x).tanh(), 0.4, self.training)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 4)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.cfloat) @ self.weight
        return (z / (1 + z.abs())).conj()


class SparseGradients(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, WIDTH, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.detach().argsort(1)[:, :3]
        return self.linear(x + self.bag(ids)).tanh()


class SparseHandedOn(Linear):
    """Hands on a sparse tensor that wants a gradient beside a dense one."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.linear(x + 0 if isinstance(x, Tensor) else x[0] + x[1].to_dense()).tanh()
        return y, (y * (y > 0)).to_sparse()


class Hooks(Linear):
    """Hooks of gradients, of a parameter, after accumulation, and of the module."""

    accumulated: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.register_buffer("accumulated", torch.tensor(0))
        self.linear.bias.register_post_accumulate_grad_hook(self._count)
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.register_full_backward_hook(self._doubled)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 3)
        return self.norm(y).tanh()

    @staticmethod
    def _doubled(module: nn.Module, grads: Any, outputs: Any) -> tuple[Tensor]:
        return (grads[0] * 2,)

    def _count(self, parameter: Tensor) -> None:
        self.accumulated.add_(1)


class OwnHooks(Linear):
    """Has methods that are hooks: one halves a gradient, the other counts in a buffer."""

    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("counted", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.scale

    def halved(self, grad: Tensor) -> Tensor:
        return grad / 2

    def count(self, parameter: Tensor) -> None:
        self.counted += 1


class Views(Linear):
    """Views, not contiguous, of one tensor and of a weight, are handed on; the tree holds what is no tensor too."""

    def forward(self, tree: Tree) -> Tree:
        x = tree if isinstance(tree, Tensor) else tree["parts"][0] + tree["parts"][1].T * tree["scale"] + tree["row"]
        count = torch.zeros(1, dtype=torch.int64) if isinstance(tree, Tensor) else tree["count"].add_(1)
        y = self.linear(x.tanh()) / (1 + int(count))
        return {"parts": [y, y.T], "scale": 0.5, "none": None, "count": count, "row": self.linear.weight[0]}


class Strided(Linear):
    """Tensors that repeat elements, or leave some out, are handed on: copied, they would be summed in another order."""

    def forward(self, tree: Tree) -> Tree:
        x = tree if isinstance(tree, Tensor) else tree[0] + sum(other.sum() for other in tree[1:])
        y = self.linear(x).tanh()
        return y, y[:, :1].expand(-1, 3), y[:, ::2], y.detach()[:1].expand(5, -1), y[1:].T


class StridedGradients(Linear):
    """The gradient of its input is every other element of something: laid out anew, it is summed in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, self.linear(x)).tanh())[..., 0] + self.linear.bias


class Penalty(Linear):
    """Forward asks for a gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.linear(x).tanh()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad


Pair = namedtuple("Pair", "left right")


class Pairs(Linear):
    def forward(self, tree: Tree) -> Tree:
        left, right = tree if isinstance(tree, Pair) else (tree, None)
        y = self.linear(left).tanh()
        return Pair(y if right is None else y + right, y.square())


class Depth(Linear):
    """Stochastic depth, by Python's and numpy's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        return self.linear(x).tanh() * (0.5 + float(numpy.random.rand()))


class SetAnew(Linear):
    """A hook of gradients reads what this forward has set, in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.scale, self.shift = y.detach().square().mean(), y.detach().mean()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * self.scale + self.shift)
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def normed(norm: Callable[[nn.Linear], nn.Module]) -> Layer:
    return lambda: nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def frozen() -> nn.Module:
    """A backbone in evaluation mode between layers that are trained."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    layer[2].running_mean.fill_(0.25)  # type: ignore[operator]
    return layer.requires_grad_(False).eval()


def trained() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
