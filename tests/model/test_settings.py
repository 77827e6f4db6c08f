"""Containers and configurations of a model that the user changes between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_whole import SGD, assert_trains_alike, made
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from rpc_pipe import Pipeline, Training


@dataclass
class Options:
    scale: float = 1.0
    use_cache: bool = True
    limits: dict[str, list[float]] = field(default_factory=lambda: {"most": [1.0]})


class Annealed(nn.Module):
    """Settings that the forward only reads around its blocks, and containers that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.options, self.config, self.loose = {"scale": 1.0}, Options(), SimpleNamespace(scale=1.0)
        self.active, self.power = {"scale"}, (1.0,)
        self.count, self.skips, self.seen = {"forwards": 0}, list[Tensor](), dict[Any, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.count["forwards"] += 1
        for number, block in enumerate(self.blocks):
            self.skips.append(x)
            x = block(x).tanh()
            if number % 2:
                x = x + self.skips.pop() + self.skips.pop()
        x = x * self.options["scale"] * self.config.scale * self.config.limits["most"][0] * self.loose.scale
        if not self.training:
            self.seen[x.shape] = x
        return x * self.count["forwards"] if "scale" in self.active else x * self.power[0]


def _options(model: Any, step: int) -> None:
    model.options["scale"] = model.config.scale = model.loose.scale = model.config.limits["most"][0] = step / 2


def _sets(model: Any, step: int) -> None:
    model.active.symmetric_difference_update({"scale"})
    model.power = (step / 4,)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("change", [_options, _sets])
def test_a_change_of_settings_between_steps_holds_on_all_stages(change: Callable[[Any, int], None], schedule):
    """The last stage went on with copies of old settings; containers that a forward writes are copies of each stage."""
    model, alone = made(Annealed), made(Annealed)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    pipe = Pipeline(model, mse_loss, training=Training(SGD), schedule=schedule, num_microbatches=2, num_workers=2)
    optimizer = SGD(alone.parameters())
    for step in range(3):
        if step:
            change(model, step), change(alone, step)
        expected = 0.0
        for half in x.chunk(2):
            (loss := mse_loss(alone(half), half) / 2).backward()
            expected += loss.item()
        optimizer.step(), optimizer.zero_grad()
        assert pipe.step((x, x)) == expected
    pipe.evaluate((x, x))
    assert not model.seen and not model.skips and model.count == {"forwards": 0} and model.config.use_cache


class Classifier(Annealed):
    """A configuration that the first forward completes, as Hugging Face's classifiers do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.loose.scale == 1.0:
            self.loose.scale = 0.5
        return super().forward(x)


def test_a_configuration_that_a_forward_writes_is_a_copy():
    pipe = Pipeline(model := made(Classifier), mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2)
    assert_trains_alike(pipe, made(Classifier), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    assert model.loose.scale == 1.0


class Scaled(nn.Module):
    """A layer that reads settings which it has in common with the others."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.inner, self.settings = nn.Linear(8, 8), settings

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.settings["scale"]


def test_settings_of_layers_hold_on_every_replica():
    """The second replica of a list of layers, in one process, went on with a copy of the old settings."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for replicas in 1, 2:
        torch.manual_seed(0)
        settings = {"scale": 1.0}
        layers = nn.Sequential(Scaled(settings), Scaled(settings))
        options = {"num_microbatches": 2, "num_workers": 2 * replicas, "replicas": replicas}
        with Pipeline(layers, mse_loss, training=Training(SGD), **options) as pipe:
            pipe.step((x, x))
            settings["scale"] = 2.0
            losses.append(pipe.step((x, x)))
    assert losses[0] == losses[1]
