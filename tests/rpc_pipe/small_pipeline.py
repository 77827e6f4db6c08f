"""A pipeline of four small layers that classify, for tests of what one calls."""

from functools import partial

import torch
from torch import nn
from training_options import pipeline_with

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3


def layers():
    return [partial(nn.Linear, 4, 8), nn.Tanh, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)]


def pipeline(model=None, loss=nn.functional.cross_entropy, **options):
    defaults = {"num_microbatches": 4, "num_workers": 2, "optimizer": SGD}
    return pipeline_with(model or layers(), loss, **(defaults | options))


def num_held(shard):
    """Return how many microbatches' activations, or inputs to compute them from, a shard holds now."""
    return sum(map(len, (shard._forwarded, shard._inputs, shard._deferred)))
