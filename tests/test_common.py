"""What layers of several stages hold: a layer that stands twice in a list, an object, a list that all append to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline
from rpc_pipe.dependency.errors import WorkerFailure

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SGD = partial(torch.optim.SGD, lr=0.1)


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count = 0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.mask is None:
            self.mask = torch.ones(4)
        return super().forward(x) * self.mask


class Reads(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.count % 2)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0


class Ticks(nn.Linear):
    def __init__(self, clock: Any) -> None:
        super().__init__(4, 4)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.time += 0.5
        return super().forward(x) * self.clock.time


class Appends(Ticks):
    def forward(self, x: Tensor) -> Tensor:
        self.clock.append(x.detach().mean())
        return super(Ticks, self).forward(x)


def twice(kind: type[nn.Module]) -> nn.Sequential:
    layer = kind()
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())


def losses(make: Callable[[], nn.Sequential], workers: int, split: list[int] | None = None) -> list[float]:
    torch.manual_seed(0)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(make(), loss_fn, optimizer=SGD, num_workers=workers, num_microbatches=4, split=split)
    return [pipe.step((X, X)) for _ in range(2)]


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: twice(Reads), "count of a Reads"),
        (lambda: nn.Sequential(Ticks(clock := Clock()), nn.Tanh(), Ticks(clock), nn.Tanh()), "time of a Clock"),
        (lambda: nn.Sequential(Appends(seen := []), nn.Tanh(), Appends(seen), nn.Tanh()), "a list"),
    ],
)
def test_what_layers_of_several_stages_count_is_refused_by_name(make, what):
    """Each stage counted its own forwards alone, silently."""
    with pytest.raises(WorkerFailure, match=f"model: forwards change {what} that layers of several stages hold"):
        losses(make, 2)
    assert losses(make, 2, split=[3, 1]) == losses(make, 1)


def test_what_nobody_reads_or_is_made_once_is_not_refused():
    assert losses(partial(twice, Counts), 2) == pytest.approx(losses(partial(twice, Counts), 1))
