"""More modules that are legal in one process, and stranger: weights, state and chance where nobody looks for them."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fuzz_layers import WIDTH, linear


class Depth(nn.Module):
    """Stochastic depth, by Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.4:
            return x
        return self.linear(x) * (0.5 + float(numpy.random.rand()))


class Bounded(nn.Module):
    """Writes its weights before it uses them, so that autograd sees it or not."""

    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.linear, self.quietly = linear(), quietly

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            weight = self.linear.weight.data if self.quietly else self.linear.weight.detach()
            weight.mul_(0.95).clamp_(-0.3, 0.3)
        return self.linear(x).tanh()


class Codebook(nn.Module):
    """Frozen weights that a forward moves; backward reads them."""

    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.linear, self.quietly = linear(), quietly
        self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.book
        if self.training:
            moved = x.detach().abs().mean(0).to(self.book.dtype).clamp(max=2)
            if self.quietly:
                self.book.data.lerp_(moved, 0.1)
            else:
                self.book.data = torch.lerp(self.book.data, moved, 0.1)
        return y


class InLists(nn.Module):
    """Weights in lists and dicts: those of torch, and plain ones that hold the same once more."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.some = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(WIDTH))})
        self.plain = list(self.some) if plain else None

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.plain or self.some:
            x = functional.linear(x, weight, self.named["bias"]).tanh()
        return x


class OwnForward(nn.Module):
    """Its forward is an attribute, bound to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.forward = self._of_mine

    def _of_mine(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


class Counter(nn.Module):
    """Counts in attributes alone, one of them a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen[0] += 1
        return x * (1 + self.calls % 3) / (1 + self.seen[0] % 2)


class OwnGenerator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype) / 8 if self.training else x


class Swapped(nn.Module):
    """Exchanges a module and a buffer of its own for others as it goes."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = linear(), linear()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.near, self.far = self.far, self.near
            self.shift = self.shift + 0.1
        return self.near(x).tanh() + self.far(x) / 2 + self.shift


class OfGradients(nn.Module):
    """Uses gradients that torch.func makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return (self.linear(row).tanh() ** 2).sum()

        out: Tensor = torch.func.vmap(torch.func.grad(energy))(x)
        return x - out / 4


class Attended(nn.Module):
    """Attention with a mask that is made where it is used, and kept."""

    mask: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), 2, 4)
        if self.mask is None:
            self.mask = torch.triu(torch.ones(2, 2, dtype=torch.bool), 1)
        y, _ = self.attention(rows, rows, rows, attn_mask=self.mask)
        return x + y.reshape(len(x), WIDTH)


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(nn.Sequential(linear(), nn.Tanh()))
    return module
