"""Gradients of low-precision weights that add up in float32: torch's `parameter.grad_dtype`, which copies forget."""

from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.model.parameter_hooks import copy_attachments
from rpc_pipe.model.sharding import Sharing
from rpc_pipe.own_members import dividing

torch.manual_seed(0)
BATCH = torch.randn(32, 8, dtype=torch.bfloat16), torch.randint(8, (32,))


class Wide(torch.optim.Optimizer):
    """Takes gradients as they are, and notes their types."""

    def __init__(self, parameters, types):
        super().__init__(parameters, {})
        self.types = types

    @torch.no_grad()
    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.types.add(parameter.grad.dtype)
            parameter.sub_(parameter.grad)


class Whole(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if tied:
            self.blocks[3].weight = self.blocks[0].weight
        for parameter in self.bfloat16().parameters():
            parameter.grad_dtype = torch.float32

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.float(), target)


def plainly(model):
    optimizer, losses = Wide(model.parameters(), set()), []
    for _ in range(3):
        losses.append(0.0)
        for x, y in zip(*(part.chunk(8) for part in BATCH), strict=True):
            loss = loss_fn(model(x), y) / 8
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


CASES = [
    {"replicas": 2, "num_workers": 4},
    {"replicas": 2, "num_workers": 4, "zero": 1, "schedule": "zb-h1"},
    {"schedule": "zb-v", "num_workers": 2},
    {"schedule": "pipedream-2bw", "num_workers": 2, "tied": False},
]


@pytest.mark.parametrize("options", CASES, ids=lambda each: " ".join(map(str, each.values())))
def test_copies_of_weights_take_gradients_of_the_declared_type(options):
    tied, types = options.get("tied", True), set()
    options = {name: value for name, value in options.items() if name != "tied"}
    for model in nn.Sequential(*Whole(tied).blocks), Whole(tied):
        training = Training(partial(Wide, types=types))
        with Pipeline(model, loss_fn, training=training, num_microbatches=8, **options) as pipe:
            assert [pipe.step(BATCH) for _ in range(3)] == plainly(Whole(tied))
    assert types == {torch.float32}


def test_a_model_made_where_it_is_trained_keeps_the_type():
    types = set()
    with Pipeline(
        Whole, loss_fn, training=Training(partial(Wide, types=types)), num_microbatches=8, num_workers=2
    ) as p:
        p.step(BATCH)
    assert types == {torch.float32}


def test_gradients_of_any_type_stay_of_any_type():
    parameter, copied = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    parameter.grad_dtype = None
    copy_attachments(copied, parameter)
    assert copied.grad_dtype is None


def test_a_division_that_forgets_the_type_is_refused():
    def halve(layer, mesh):
        layer.weight = nn.Parameter(layer.weight[:4].detach().clone())

    with refused("grad_dtype"):
        dividing(Sharing(2, halve), None)(Whole().blocks[0], "blocks.0", None)
