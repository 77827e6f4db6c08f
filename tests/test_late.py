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

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)
SGD = partial(torch.optim.SGD, lr=0.1)


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
