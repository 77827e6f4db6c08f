"""Tensors that overlap, or that layers write by chance, at the border of two stages."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from unkind import differences, mse, pipeline, repeated
from unkind_layers import WIDTH, Linear

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.pipeline import Pipeline


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


OVERLAPPING = (lambda y: (y, y.T), lambda y: (y, y[:, 4:]), lambda y: (y, y.view_as(y)))


@pytest.mark.parametrize(
    ("both", "is_legal"), [*((both, False) for both in OVERLAPPING), (lambda y: (y[:, :4], y[:, 4:]), True)]
)
def test_one_of_two_tensors_that_overlap_is_not_written_behind_a_cut(both, is_legal):
    """The other kept what it was, over processes always and in threads if it was small, in silence."""
    layers = [partial(Hands, both), WritesOne, partial(nn.Linear, WIDTH, WIDTH)]
    views = replace(repeated(Linear), layers=layers)
    batches = [(torch.randn(9, WIDTH), torch.randn(9, WIDTH)) for _ in range(2)]
    torch.manual_seed(0)
    assert differences(pipeline(views, "1f1b", num_workers=1, num_microbatches=3, seed=1), views, batches, 1) == []
    pipe = pipeline(views, "1f1b", num_workers=3, num_microbatches=3, seed=1)
    if is_legal:
        assert differences(pipe, views, batches, 1) == []
        return
    with pytest.raises(WorkerFailure, match="in place what its stage was handed together with a view of it"):
        pipe.step(batches[0])


class HandsOnAtTimes(Linear):
    """Stochastic depth before an activation in place."""

    leaves_out = False

    def forward(self, x):
        return nn.functional.relu(x if self.leaves_out else self.linear(x), inplace=True)


def test_a_large_batch_is_not_written_by_a_layer_that_writes_by_chance():
    """Large batches were copied only for layers that had written one before."""
    layers = [HandsOnAtTimes(), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipeline(layers, mse, optimizer=partial(torch.optim.SGD, lr=0.1), num_workers=2, num_microbatches=2)
    x, y = torch.randn(2, 2**13, WIDTH)
    before = x.clone()
    for leaves_out in (False, True):
        layers[0].leaves_out = leaves_out
        pipe.step((x, y))
    assert torch.equal(x, before)
