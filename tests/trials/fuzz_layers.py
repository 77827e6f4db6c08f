"""Modules that are legal in one process and hard on a pipeline; `fuzz_operations.py` names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def largest(x: Tensor) -> Tensor:
    """Return about the largest singular value, by power iteration.

    `torch.linalg.svdvals` gives other last bits for the same numbers in other memory: what it shows is no difference of
    a pipeline's.
    """
    found = torch.ones_like(x[0])
    for _ in range(3):
        found = functional.normalize((x * (x * found).sum(1, keepdim=True)).sum(0), dim=0)
    return (x * found).sum(1).norm()


class Calls(nn.Module):
    """Calls a function, which keeps nothing."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Shaped(nn.Module):
    """Calls a module with rows of another shape."""

    def __init__(self, module: nn.Module, *shape: int) -> None:
        super().__init__()
        self.module, self.shape = module, shape

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x.reshape(len(x), *self.shape))
        return (y[0] if isinstance(y, tuple) else y).reshape(len(x), -1)


class Average(nn.Module):
    """Depends on a moving average, a counter in a buffer, one in an attribute, and a buffer that it replaces."""

    mean: Tensor
    count: Tensor
    last: Tensor

    def __init__(self, quietly: bool, persistent: bool) -> None:
        super().__init__()
        self.quietly = quietly
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.mean - self.last) * (1 + int(self.count) % 3) / (1 + self.calls % 2)
        if self.training:
            with torch.no_grad():
                (self.mean.data if self.quietly else self.mean).lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
            self.count.add_(1)
            self.calls += 1
            self.last = (x.detach()[0] / 2).to(self.mean.dtype)
        return y


class QuietScale(nn.Module):
    """Scales by a buffer that it has just written, so that autograd does not see it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.data.lerp_(1 + x.detach().abs().mean(0).to(self.scale.dtype), 0.1)
        return x * self.scale


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Complex(nn.Module):
    def __init__(self, conjugate: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.get_default_dtype().to_complex()) / 4)
        self.conjugate = conjugate

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.weight.dtype) @ self.weight
        z = z / (1 + z.abs())
        return z.conj() if self.conjugate else torch.view_as_real(z).sum(-1)


class Embedded(nn.Module):
    """Looks rows up by what comes in, with sparse or dense gradients."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        ids = x.detach().argsort(1)[:, :3]
        rows = self.table(ids)
        return x + (rows if rows.dim() == 2 else rows.sum(1))


class Twice(nn.Module):
    """One layer is used twice, and its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.linear(x).tanh())
        return y + functional.linear(x, self.linear.weight.T) + self.linear.weight.diagonal()


class Sometimes(nn.Module):
    """Stochastic depth: a layer that some microbatches leave out, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return x + self.linear(x) / 2 if float(x.detach().sum()) > 0 else self.linear(x)


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Straight.apply(x, self.weight.to(x.dtype))
        return out


class Noise(nn.Module):
    """Draws whether it trains or not, and in backward too."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.randn_like(x) / 8
        if y.requires_grad:
            y.register_hook(self._noisy)
        return y

    def _noisy(self, grad: Tensor) -> Tensor:
        return grad + 0 * grad


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype, back: bool) -> None:
        super().__init__()
        doubled = torch.get_default_dtype() is torch.float64  # where nothing is rounded as coarsely
        self.kind, self.back = torch.float64 if doubled else dtype, back
        self.linear = linear().to(self.kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(self.kind))
        return y.to(torch.get_default_dtype()) if self.back else y


class Written(nn.Module):
    """Everything that can be is written in place, the input first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.detach().mean(0))
        x[:, :2].mul_(0.5)
        x[:, ::3] += 1
        y = self.linear(functional.relu(x, inplace=True))
        y += 1
        return y.mul_(self.linear.bias)


class Handle(nn.Module):
    """Adds a detached branch, and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            far = self.far(x)
        return self.near(x).tanh() + self.near(x.detach()) + far


class Multiplied(nn.Module):
    """A parametrization of its own, of a weight that another parameter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale.exp()


def parametrized() -> nn.Module:
    layer = linear()
    nn.utils.parametrize.register_parametrization(layer, "weight", Multiplied())
    return layer


def half_frozen() -> nn.Module:
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer
