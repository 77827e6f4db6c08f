"""What a layer begins after the forwards that were looked at: it is right from then on, or refused."""

from __future__ import annotations

import random
from functools import partial

import numpy
import pytest
import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline
from rpc_pipe.dependency.errors import WorkerFailure
from rpc_pipe.workers.compute import randomness

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)
SGD = partial(torch.optim.SGD, lr=0.1)


_other_threads = randomness.other_threads


@pytest.fixture(autouse=True)
def without_idle_threads(monkeypatch):
    """Threads that earlier tests have left count as ones that may draw, beside which a late draw is only warned of."""
    idle = set(_other_threads())
    monkeypatch.setattr(randomness, "other_threads", lambda: [name for name in _other_threads() if name not in idle])


class Late(nn.Module):
    """A linear layer that does something more from its forward number `begin` in training on."""

    def __init__(self, begin: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.begin, self.number = begin, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.number += 1
        return self.more(self.linear(x)) if self.number >= self.begin else self.linear(x)

    def more(self, x: Tensor) -> Tensor:
        return x


class Draws(Late):
    draw = random.random

    def more(self, x: Tensor) -> Tensor:
        return x * type(self).draw()


class Wide(Draws):
    """As many numbers as bring a generator back to the same word of its state."""

    @staticmethod
    def draw() -> float:
        return float(numpy.random.rand(624)[0])


class Whole(nn.Module):
    def __init__(self, kind: type[Late]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), kind(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def losses(model: nn.Module | list[object], workers: int, schedule: str = "1f1b", steps: int = 6) -> list[float]:
    pipe = Pipeline(
        model, nn.functional.mse_loss, optimizer=SGD, schedule=schedule, num_workers=workers, num_microbatches=4
    )
    return [pipe.step((X, Y)) for _ in range(steps)]


@pytest.mark.parametrize("kind", [Draws, Wide])
def test_a_layer_that_begins_late_to_draw_in_python_is_refused(kind):
    """Its numbers were those that the process's generators came to, others on other workers, silently."""
    for workers in (1, 2):
        with pytest.raises(WorkerFailure, match=r"one of the layers .* drew random numbers of Python or numpy"):
            losses([nn.Linear(4, 4), kind(), nn.Linear(4, 4)], workers)


@pytest.mark.parametrize("kind", [Draws, Wide])
def test_a_block_that_begins_late_to_draw_in_python_draws_the_same_in_any_cut(kind):
    def trained(workers: int, schedule: str) -> list[float]:
        torch.manual_seed(0)
        return losses(Whole(kind), workers, schedule)

    assert trained(2, "1f1b") == trained(3, "zb-h1") == trained(1, "1f1b")
    assert trained(3, "gpipe-recompute") == trained(1, "gpipe")


class Scales(Late):
    """By a buffer that it moves through `.data`, which autograd does not see."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(begin=7)
        self.register_buffer("scale", torch.ones(4))

    def more(self, x: Tensor) -> Tensor:
        y = x * self.scale
        self.scale.data.mul_(0.9)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Bounds(Late):
    """The same of its weight."""

    def __init__(self) -> None:
        super().__init__(begin=7)

    def more(self, x: Tensor) -> Tensor:
        y = x @ self.linear.weight
        self.linear.weight.data.mul_(0.99)
        return y


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind, told", [(Scales, "buffer scale of a Scales"), (Bounds, r"parameter of shape \(4, 4\)")])
def test_a_layer_that_begins_late_to_write_through_data_is_refused_where_others_are_under_way(kind, told, whole):
    """Backward read what later forwards had written, silently."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Whole(kind) if whole else nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))

    alone = model()
    optimizer, expected = SGD(alone.parameters()), []
    for _ in range(6):
        parts: list[Tensor] = []
        for x in X.chunk(4):
            parts.append(nn.functional.mse_loss(alone(x), x * 0) / 4)
            parts[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(part.item() for part in parts))
    assert losses(model(), 1) == expected
    for schedule in ("gpipe", "zb-h1"):
        with pytest.raises(WorkerFailure, match=f"a layer writes its {told} by .data in its forward"):
            losses(model(), 2, schedule)
