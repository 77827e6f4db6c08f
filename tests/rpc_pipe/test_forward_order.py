"""Layers that keep something from one forward for the next meet microbatches in one process's order, or it is told."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from unkind import differences, repeated
from unkind_layers import EMA, WIDTH, Linear

from rpc_pipe.dependency import F, WorkerFailure
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.schedules.gpipe import GPipe
from rpc_pipe.workers.hooks import Listener


class Late(GPipe):
    """The first forward of the second stage may be overtaken."""

    def after(self, a):
        late = a == F(1, 0)
        return [*super().after(a), *([F(0, self.num_microbatches - 1)] if late else [])]

    def slot(self, a):
        return super().slot(a) + (self.num_microbatches if a.stage or a.kind is not F else 0)


class Crossed(GPipe):
    """Exchanges the third microbatch and the fourth."""

    def after(self, a):
        return []

    def slot(self, a):
        return super().slot(a._replace(index={2: 3, 3: 2}.get(a.index, a.index)))


class Slow(Listener):
    """Lets the first worker take its time."""

    def __init__(self, worker):
        self.worker = worker

    def action_started(self, step, action):
        time.sleep(0.005 * (self.worker == 0 and action.kind is F))


class Counts(Linear):
    """Its output depends on a number that no buffer holds."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Caches(Linear):
    """Makes a table in its first forward, as rotary embeddings do."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH)
        return self.linear(x) + self.table


def training(layer, schedule, *, workers=2, **options):
    layers = [partial(nn.Linear, WIDTH, WIDTH), layer, partial(nn.Linear, WIDTH, WIDTH), layer][: 2 * workers]
    model = replace(repeated(Linear), layers=layers)
    options = {"num_workers": workers, "num_microbatches": 4, "seed": 1, "split": [1, 3], **options}
    pipe = Pipeline(list(layers), model.loss_fn, training=Training(model.optimizer), schedule=schedule, **options)
    return pipe, model


BATCHES = [tuple(torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(i))) for i in range(2)]


@pytest.mark.parametrize("order", ["ready", "fixed"])
@pytest.mark.parametrize("layer", [EMA, Counts, Caches])
def test_forwards_of_a_layer_that_counts_do_not_overtake_each_other(layer, order):
    """Those with buffers did not; of those with a number in an attribute the order of arrival was trained."""
    torch.manual_seed(0)
    pipe, model = training(layer, Late, order=order)
    pipe.listen(Slow)
    assert differences(pipe, model, BATCHES, 1) == []


@pytest.mark.parametrize("layer", [EMA, partial(nn.BatchNorm1d, WIDTH)])
def test_a_schedule_whose_forwards_go_another_way_cannot_train_a_layer_with_buffers(layer):
    """It was trained in the schedule's order, which is no one process's."""
    pipe, _ = training(layer, Crossed)
    with refused("stage", WorkerFailure):
        pipe.step(BATCHES[0])


@pytest.mark.parametrize("layer", [partial(nn.Linear, WIDTH, WIDTH), Caches])
def test_a_schedule_whose_forwards_go_another_way_trains_other_layers(layer):
    torch.manual_seed(0)
    pipe, model = training(layer, Crossed)
    assert differences(pipe, model, BATCHES, 1) == []
