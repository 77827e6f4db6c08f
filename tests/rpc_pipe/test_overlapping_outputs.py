"""Tensors that overlap, or that layers write by chance, at the border of two stages."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from unkind import differences, mse, pipeline, repeated
from unkind_layers import WIDTH, Linear

from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.workers.compute.modules.borders import ForwardArgs
from rpc_pipe.workers.compute.modules.randomness import Randomness
from rpc_pipe.workers.compute.sequences.slices import Layers
from rpc_pipe.workers.compute.shard import Shard
from rpc_pipe.workers.transport.payload import pack


class Hands(Linear):
    """Hands on what it computes, and something else of the same memory."""

    def __init__(self, both):
        super().__init__()
        self.both = both

    def forward(self, x):
        return self.both(self.linear(x))


class WritesOne(Linear):
    """Writes the first in place and uses the other afterwards."""

    def forward(self, tree):
        y, other = tree
        y.mul_(0.5)
        return self.linear(nn.functional.pad(y, (0, WIDTH - y.shape[1]))) + other.sum()


HALVES = partial(Hands, lambda y: (y[:, :4], y[:, 4:]))


@pytest.mark.parametrize("layers", [[HALVES, WritesOne, partial(nn.Linear, WIDTH, WIDTH)]])
def test_halves_of_a_tensor_are_written_behind_a_cut_as_coupling_layers_do(layers):
    views = replace(repeated(Linear), layers=layers)
    batches = [(torch.randn(9, WIDTH), torch.randn(9, WIDTH)) for _ in range(2)]
    torch.manual_seed(0)
    assert differences(pipeline(views, "1f1b", num_workers=3, num_microbatches=3, seed=1), views, batches, 1) == []


@pytest.mark.parametrize("both", [lambda y: (y, y.T), lambda y: (y, y[:, 4:]), lambda y: (y, y.view_as(y))])
def test_tensors_that_share_memory_arrive_apart_wherever_the_next_stage_is(both):
    """In threads one was written with the other if it was large, over processes never."""
    stage = Shard(0, Layers([(0, Hands(both))]), Randomness(0))
    y, other = stage.output(stage.forward(ForwardArgs(0, 0, pack(torch.randn(2**10, WIDTH))))[0]).tensors
    assert y.data_ptr() != other.data_ptr() and torch.equal(both(y)[1], other)
    assert both(y)[1].stride() == other.stride()


class HandsOnAtTimes(Linear):
    """Stochastic depth before an activation in place."""

    leaves_out = False

    def forward(self, x):
        return nn.functional.relu(x if self.leaves_out else self.linear(x), inplace=True)


def test_a_large_batch_is_not_written_by_a_layer_that_writes_by_chance():
    """Large batches were copied only for layers that had written one before."""
    layers = [HandsOnAtTimes(), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipeline(layers, mse, training=Training(partial(torch.optim.SGD, lr=0.1)), num_workers=2, num_microbatches=2)
    x, y = torch.randn(2, 2**13, WIDTH)
    before = x.clone()
    for leaves_out in (False, True):
        layers[0].leaves_out = leaves_out
        pipe.step((x, y))
    assert torch.equal(x, before)
