"""Microbatches of other sizes, for which a forward goes another way: all stages must cut it alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_whole import SGD, assert_same_state, made
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training


def assert_trains_alike(make: Any, batches: list[list[tuple[Tensor, Tensor]]], loss_fn: Any, workers: int) -> None:
    """Train on these microbatches, piped and not; compare the losses and all tensors."""
    model = made(make)
    alone = copy.deepcopy(model)
    pipe = Pipeline(
        model, loss_fn, training=Training(SGD), num_microbatches=len(batches[0]), num_workers=workers, blocks="blocks",
        example=batches[0][0],
    )  # fmt: skip
    optimizer = SGD(alone.parameters())
    for batch in batches:
        rows = sum(len(x) for x, _ in batch)
        expected = 0.0
        for x, y in batch:
            part = loss_fn(alone(x), y) * (len(x) / rows)
            part.backward()
            expected += part.item()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step(microbatches=batch) == pytest.approx(expected, rel=1e-12)
    assert_same_state(pipe, alone)


class Lazy(nn.Linear):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        return super().forward(x) + self.table


class Positions(nn.Module):
    """Makes a buffer as long as the longest microbatch, before a block that keeps what it made first."""

    limits: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Lazy(8, 8), nn.Linear(8, 8)])
        self.register_buffer("limits", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 2:
                if len(self.limits) < len(x):
                    self.register_buffer("limits", torch.arange(len(x), dtype=x.dtype), persistent=False)
                x = x + self.limits[: len(x), None] / 8
            x = block(x)
        return x


@pytest.mark.parametrize("workers", [2, 3])
def test_stages_cut_alike_where_their_copies_have_made_other_things_so_far(workers):
    """What a block makes and keeps was looked for at a wrong place of the forward; the first stage, whose copy of the
    block never runs, cut before the addition then, and the second behind it: nobody added."""
    x, y = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(0))
    rows = [2, 2, 9]
    assert_trains_alike(Positions, [list(zip(x.split(rows), y.split(rows), strict=True))], nn.MSELoss(), workers)


class Outer(nn.Module):
    """What crosses is smaller before or behind the product with what weights alone make: that depends on the rows."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(16, 16)])
        self.made = nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(0, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](torch.einsum("bi,j->ij", x, self.made(self.table)))


def test_what_is_made_of_weights_stays_on_the_stage_that_has_them():
    """A smaller batch was refused in the middle of training: another stage would have needed the weights."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.mean()).square().mean()

    x, y = torch.randn(2, 40, 8)
    batches = [[(x, y)] * 2, [(x[:3], y[:3])] * 2]
    assert_trains_alike(Outer, batches, loss_fn, 2)
