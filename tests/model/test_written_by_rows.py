"""Weights that a forward writes by its rows, on replicas that see other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_whole import SGD, made
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import Disagreement


class Scaled(nn.Linear):
    """A scale that the first forward sets by its rows, as ActNorm and LSQ do, or by the weight alone."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__(8, 8)
        self.by_rows, self.scale, self.is_set = by_rows, nn.Parameter(torch.ones(())), False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if not self.is_set:
            self.scale.data.copy_(1 / (x if self.by_rows else self.weight).detach().std())
            self.is_set = True
        return x * self.scale


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_replicas_that_a_first_forward_sets_apart_are_refused(whole, streamed):
    """Each replica went on with a scale of its own rows, for good, or in a stream until an evaluation."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"training": Training(SGD), "num_microbatches": 2, "num_workers": 2, "replicas": 2}

    def pipe(by_rows: bool) -> Pipeline:
        layers = made(lambda: nn.ModuleList(Scaled(by_rows) for _ in range(2)))
        model = nn.Sequential(*layers)
        if whole:
            model.forward = model.forward
        return Pipeline(model, nn.functional.mse_loss, **how)

    def trained(pipe: Pipeline) -> list[float]:
        return list(pipe.train([(x, x)] * 4)) if streamed else [pipe.step((x, x)) for _ in range(3)]

    with pipe(by_rows=False) as alike:
        assert all(trained(alike))
    apart = pipe(by_rows=True)
    with pytest.raises(Disagreement):
        trained(apart)


class Counted(nn.Linear):
    """A buffer that forwards move by their rows, as a codebook, or by their number."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__(8, 8)
        self.by_rows = by_rows
        self.register_buffer("moved", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.moved = self.moved + (x.detach().mean(0) if self.by_rows else 1)
        return super().forward(x)


def test_buffers_that_replicas_move_apart_are_told_once(caplog):
    """Codebooks of replicas went apart in silence."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"training": Training(SGD), "num_microbatches": 2, "num_workers": 2, "replicas": 2}
    for by_rows in False, True:
        layers = Counted(by_rows), nn.BatchNorm1d(8)
        with Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, **how) as pipe:
            assert len({pipe.step((x, x)) for _ in range(3)}) > 1
        assert [record.getMessage().count("Counted.moved") for record in caplog.records] == [1] * by_rows
