"""What models of today do inside their blocks: adapters, experts, teachers, codebooks, state of all kinds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fuzz_layers import WIDTH, linear


class LowRank(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.adapters = nn.ModuleDict({"default": nn.Dropout(0.1)})
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(self.adapters["default"](x))) * 2
        return out


class Experts(nn.Module):
    """A router sends each row to some experts; what comes back is added up. Some experts get nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                out.index_add_(0, row, expert(x[row]) * weights[row, place, None].to(x.dtype))
        return out + x


class Chooses(nn.Module):
    """One of several ways through, by the numbers that come in."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"low": linear(), "high": nn.Sequential(nn.LayerNorm(WIDTH), linear())})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ways["high" if x.detach().mean() > 0 else "low"](x)
        return out


class Teacher(nn.Module):
    """Follows itself by a moving average, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.student = linear()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(theirs, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._follow()
        with torch.no_grad():
            wanted = self.teacher(x)
        out: Tensor = self.student(x) + wanted / 2
        return out


class Quantised(nn.Module):
    """The nearest rows of a codebook, which is moved to what comes in; gradients go straight through."""

    book: Tensor
    size: Tensor

    def __init__(self, quietly: bool) -> None:
        super().__init__()
        self.quietly = quietly
        self.register_buffer("book", torch.randn(4, WIDTH))
        self.register_buffer("size", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.detach(), self.book.to(x.dtype)).argmin(1)
        found = self.book[chosen].to(x.dtype)
        if self.training:
            with torch.no_grad():
                hot = functional.one_hot(chosen, 4).to(self.book.dtype)
                self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                moved = torch.lerp(self.book, hot.T @ x.detach().to(hot.dtype), 0.1)
                (self.book.data if self.quietly else self.book).copy_(moved / self.size.clamp(min=0.5)[:, None])
        return x + (found - x).detach()


class Queue(nn.Module):
    """Compares with rows of earlier forwards, in a ring."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(6, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        alike = (x @ self.queue.clone().to(x.dtype).T).softmax(1)
        if self.training:
            at = (int(self.place) + torch.arange(min(len(x), 6))) % 6
            self.queue[at] = x.detach()[:6].to(self.queue.dtype)
            self.place[0] = (int(self.place) + len(at)) % 6
        return x + alike.sum(1, keepdim=True) / 4 + alike[:, :1]


class Remembers(nn.Module):
    """A recurrent layer that goes on where the last forward ended."""

    state: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        if state is None or state.shape != x.shape or not self.training:
            state = torch.zeros_like(x)
        out: Tensor = self.cell(x, state.to(x.dtype))
        if self.training:
            self.state = out.detach()
        return out


@dataclass
class Held:
    """What goes through a layer's parts."""

    x: Tensor
    gate: Tensor | None = None


class Generated(nn.Module):
    """Calls a module by weights that another makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.makes = linear(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.makes(self.inner.weight).tanh(), "bias": self.inner.bias * 2}
        out: Tensor = torch.func.functional_call(self.inner, weights, (x,))
        return out


class Kept(nn.Module):
    """Leaves what it made in attributes, for whoever looks: it does so itself, one forward later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.last: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before = self.last.get("mean", 0.0)
        if self.training:
            self.last["mean"] = y.detach().mean()
        out: Tensor = y + before
        return out
