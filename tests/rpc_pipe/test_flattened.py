"""Checkpoints of tensors that consist of plain ones, such as an optimizer's moments of 8 bits."""

import sys
from functools import partial

import pytest
import torch
from refusals import refused
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.checkpoints import json_values

torch.manual_seed(0)
BATCH = torch.randn(8, 8), torch.randint(8, (8,))


class Scaled(Tensor):
    """Whole numbers, a scale, and a type: as torchao's states are."""

    @staticmethod
    def __new__(cls, codes, scale, kind):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=kind, requires_grad=False)

    def __init__(self, codes, scale, kind):
        self.codes, self.scale, self.kind = codes, scale, kind

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.kind, torch.Size([1])]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale), args[0].kind)
        raise NotImplementedError(func)

    @classmethod
    def of(cls, tensor):
        scale = tensor.abs().max() / 127 + 1e-12
        return cls((tensor / scale).round().to(torch.int8), scale, tensor.dtype)


class Small(torch.optim.SGD):
    """Momentum in whole numbers."""

    @torch.no_grad()
    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            held = self.state[parameter].get("moment")
            moment = parameter.grad if held is None else 0.9 * held.codes * held.scale + parameter.grad
            self.state[parameter]["moment"] = Scaled.of(moment)
            parameter.sub_(0.1 * moment)


def pipeline(**options):
    torch.manual_seed(1)
    model, training = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), Training(partial(Small, lr=0.1))
    return Pipeline(model, nn.functional.cross_entropy, training=training, num_microbatches=4, **options)


def test_training_goes_on_from_flattened_states(tmp_path):
    """Every checkpoint ended in an error of torch that named no tensor."""
    with pipeline(num_workers=4, replicas=2, zero=1) as pipe:
        pipe.step(BATCH)
        pipe.checkpoints.save(tmp_path)
        expected = [pipe.step(BATCH) for _ in range(2)]
    with pipeline(num_workers=2) as pipe:
        pipe.checkpoints.load(tmp_path)
        assert [pipe.step(BATCH) for _ in range(2)] == pytest.approx(expected, abs=1e-6)
        state = next(iter(pipe.optimizers[0].state.values()))["moment"]
        assert type(state) is Scaled and state.codes.dtype is torch.int8


def test_a_class_that_is_not_loaded_is_not_imported():
    there = json_values.form(Scaled.of(torch.ones(2)), "state") | {"class": "antigravity.Tensor"}
    with refused("moment"):
        json_values.joined(there, "moment", {})
    assert "antigravity" not in sys.modules


def test_weights_of_such_a_class_are_refused_by_name(tmp_path):
    with pipeline(num_workers=1) as pipe:
        pipe.step(BATCH)
        shard = next(iter(pipe.actors[0].shards.values()))
        shard.slice.layers[0][1].register_buffer("table", Scaled.of(torch.ones(2)))
        with refused("0.table"):
            pipe.checkpoints.save(tmp_path)
