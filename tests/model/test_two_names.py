"""Modules, weights and buffers of one model that have several names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused
from test_whole import SGD, assert_trains_alike, made
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training


def norms(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(count)]


class Named(nn.Module):
    """A second name for the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(norms(4))
        self.first = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Encoded(nn.Module):
    """A U-Net whose levels are slices of another module's children."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(part for block in norms(3) for part in block))
        parts = list(self.encoder)
        self.levels = nn.ModuleList([nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:4]), nn.Sequential(*parts[4:])])
        self.up = nn.ModuleList(norms(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.levels:
            skips.append(x := level(x).relu())
        for block, skip in zip(self.up, reversed(skips[:2]), strict=True):
            x = block(x + skip)
        return x


class OneNorm(Named):
    """One norm in two blocks, and its running mean as a buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1] = self.blocks[0][1]
        self.register_buffer("mean", self.blocks[0][1].running_mean)


@pytest.mark.parametrize(("kind", "schedule"), [(Named, "1f1b"), (Encoded, "zb-v"), (OneNorm, "1f1b")])
def test_running_statistics_are_kept_under_all_names(kind, schedule):
    """The last name counted alone, so no stage held them: an evaluation had others, and a checkpoint none."""
    how: dict[str, Any] = {"schedule": schedule, "num_microbatches": 2, "num_workers": 2}
    pipe, alone = Pipeline(model := made(kind), nn.functional.mse_loss, training=Training(SGD), **how), made(kind)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    assert_trains_alike(pipe, alone, x)
    with torch.no_grad():
        halves = [nn.functional.mse_loss(alone.eval()(half), half).item() for half in x.chunk(2)]
    assert pipe.evaluate((x, x)) == sum(halves) / 2
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in model.state_dict().items())


class Transposed(Named):
    """A decoder whose weight is a view of an encoder's, as a parameter, a buffer or an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = self.blocks[0][0].weight
        self.kind, self.decoder = kind, nn.Linear(8, 8)
        if kind == "parameter":
            self.decoder.weight = nn.Parameter(weight.t())
        elif kind == "buffer":
            self.register_buffer("view", weight.data)
        else:
            self.view = weight.t()

    def forward(self, x: Tensor) -> Tensor:
        x = self.decoder(super().forward(x))
        return x if self.kind == "parameter" else nn.functional.linear(x, self.view)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_views_of_a_weight_that_stages_would_part_are_refused(kind):
    """An update of one was none of the other: losses differed in silence."""
    pipe = Pipeline(
        made(lambda: Transposed(kind)),
        nn.functional.mse_loss,
        training=Training(SGD),
        num_microbatches=2,
        num_workers=2,
    )
    with refused("model"):
        pipe.step((torch.ones(4, 8), torch.ones(4, 8)))


def test_layers_with_views_of_one_weight_on_two_stages_are_refused():
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[1].weight = nn.Parameter(layers[0].weight.t())
    with refused("model"):
        Pipeline(layers, nn.functional.mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2)
