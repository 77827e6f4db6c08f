"""What models of today do inside their blocks: adapters, experts, teachers, codebooks, state of all kinds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

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


class Initialised(nn.Module):
    """Takes its first weights from the first rows that it meets."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.detach().mean(0))
                self.scale.copy_(1 / (x.detach().abs().mean(0) + 1))
                self.ready.fill_(True)
        out: Tensor = (x + self.shift) * self.scale
        return out


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


class Cools(nn.Module):
    """Has a temperature that falls with every forward, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.history = 2.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.9)
            self.history.append(float(x.detach().mean()))
        return x / self.temperature + sum(self.history[-2:]) / 8


class Warm(nn.Module):
    """Moves a buffer in its first forwards alone, and one in every second."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.count < 3 or self.count % 2:
                self.mean = torch.lerp(self.mean, x.detach().mean(0).to(self.mean.dtype), 0.5)
            self.count += 1
        return x - self.mean


class Fourier(nn.Module):
    """Multiplies by complex weights among frequencies."""

    def __init__(self) -> None:
        super().__init__()
        kind = torch.get_default_dtype().to_complex()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=kind) / 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.einsum("bk,k->bk", torch.fft.rfft(x), self.weight), n=WIDTH)
        return out


class Reversed(torch.autograd.Function):
    """Turns gradients round, by numbers and words among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, how: str, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ctx.scale, ctx.how = scale, how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        signs = x > 0
        ctx.mark_non_differentiable(signs)
        return x.view_as(x) if weight is None else x * weight, signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        (weight,) = ctx.saved_tensors
        grad = grad if weight is None else grad * weight
        return (-grad if ctx.how == "round" else grad) * ctx.scale, None, None, None


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Reversed.apply
        y, signs = apply(x, 0.5, "round", None)
        z, _ = apply(self.linear(y), 0.9, "on", self.linear.bias.detach())
        out: Tensor = z + signs
        return out


class Lower(nn.Module):
    """Computes in another precision inside, and shuts it off again."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = linear(), linear()
        self.enabled = torch.get_default_dtype() is torch.float32

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = self.near(x)
            with torch.autocast("cpu", enabled=False):
                out: Tensor = self.far(y.to(x.dtype))
        return out


class Nested(nn.Module):
    """Checkpoints a function that checkpoints others, one of them a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = linear(), nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.2))

    def _inner(self, x: Tensor, scale: float) -> Tensor:
        y = checkpoint(lambda: self.near(x) * scale, use_reentrant=False)
        out: Tensor = checkpoint_sequential(self.far, 2, y, use_reentrant=False)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._inner, x, scale=0.5, use_reentrant=False)
        return out


@dataclass
class Held:
    """What goes through a layer's parts."""

    x: Tensor
    gate: Tensor | None = None


class OfHeld(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, held: Held) -> Held:
        return replace(held, x=self.inner(held.x), gate=held.x.sigmoid())


class InDataclass(nn.Module):
    """Its parts take dataclasses and return them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(OfHeld(linear()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        held = Held(x)
        for part in self.parts:
            held = part(held)
        return held.x if held.gate is None else held.x * held.gate


@lru_cache(maxsize=8)
def _positions(count: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0, 1, count, dtype=dtype)


class Positioned(nn.Module):
    """Turns pairs by angles that a cache of the module's file keeps."""

    def __init__(self) -> None:
        super().__init__()
        _positions(WIDTH // 2, torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        angle = _positions(WIDTH // 2, torch.get_default_dtype())
        some, other = x.chunk(2, 1)
        return torch.cat([some * angle.cos() - other * angle.sin(), some * angle.sin() + other * angle.cos()], 1)


class Generated(nn.Module):
    """Calls a module by weights that another makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.makes = linear(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.makes(self.inner.weight).tanh(), "bias": self.inner.bias * 2}
        out: Tensor = torch.func.functional_call(self.inner, weights, (x,))
        return out


class Rounding(nn.Module):
    """Weights of few bits, trained straight through; noise by Gumbel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        weight = weight + ((weight * 8).round() / 8 - weight).detach()
        y = functional.linear(x, weight, self.linear.bias)
        return y * functional.gumbel_softmax(y, hard=True) + y if self.training else y


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


class Packed(nn.Module):
    """Rows of several lengths through a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + torch.arange(len(x)) % 4
        rows = nn.utils.rnn.pack_padded_sequence(
            x.reshape(len(x), 4, 2), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.recurrent(rows)
        out: Tensor = last[0]
        return out
