"""Checkpoints of tensors that consist of plain ones, such as an optimizer's moments of 8 bits."""

import copy
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


SMALL = partial(Small, lr=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)


def pipeline(optimizer=SMALL, **options):
    torch.manual_seed(1)
    model, training = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), Training(optimizer)
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


class Pair:
    """Momentum for matrices and Adam for the rest, as with Muon; its `state` is made anew at each look, or shared."""

    def __init__(self, named, shares):
        self.first = torch.optim.SGD([p for _, p in named if p.dim() > 1], lr=0.1, momentum=0.9)
        self.second = torch.optim.Adam([p for _, p in named if p.dim() < 2], lr=0.1)
        self.defaults, self.param_groups = {}, self.first.param_groups + self.second.param_groups
        self.kept = self.first.state if shares else None
        if shares:
            self.second.state = self.kept

    @property
    def state(self):
        return {**self.first.state, **self.second.state} if self.kept is None else self.kept

    def step(self, closure=None):
        self.first.step()
        self.second.step()

    def zero_grad(self, set_to_none=True):
        self.first.zero_grad(set_to_none)
        self.second.zero_grad(set_to_none)

    def state_dict(self):
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}


def test_an_optimizer_of_two_goes_on_or_is_refused(tmp_path):
    """The checkpoint had all momenta, and what was read went into a dict that was thrown away."""
    made = partial(pipeline, optimizer=partial(Pair, shares=True))
    with made() as straight, made() as pipe:
        losses = [straight.step(BATCH) for _ in range(4)]
        assert [pipe.step(BATCH) for _ in range(2)] == losses[:2]
        pipe.checkpoints.save(tmp_path)
    with made() as resumed:
        resumed.checkpoints.load(tmp_path)
        assert [resumed.step(BATCH) for _ in range(2)] == losses[2:]
    with pipeline(optimizer=partial(Pair, shares=False)) as pipe, refused("optimizer"):
        pipe.step(BATCH)
        pipe.checkpoints.save(tmp_path)


def test_an_optimizer_that_finds_its_rate_has_none():
    """`transformers.Adafactor` has None by default: float() of it ended the first step."""
    with pipeline() as pipe:
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] = None
        pipe.step(BATCH)
        assert pipe.learning_rate is None


class Quantized(nn.Module):
    """A frozen weight that has hardly an operation, as torchao's under LoRA."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Scaled.of(torch.randn(8, 8)), requires_grad=False)
        self.beside = nn.Linear(8, 8)

    def forward(self, x):
        return self.beside(x) + x @ (self.weight.codes * self.weight.scale)


@pytest.mark.parametrize("how", [{"num_workers": 2, "schedule": "zb-v"}, {"num_workers": 2, "replicas": 2}])
def test_frozen_weights_that_consist_of_plain_ones_stand_beside_trained_ones(how):
    """The first forward ended in an error of torch about `aten.view`, as it samples all weights."""
    torch.manual_seed(1)
    model = nn.Sequential(*[Quantized() for _ in range(4)])
    plain = copy.deepcopy(model)
    with Pipeline(
        model, nn.functional.cross_entropy, training=Training(SGD), num_microbatches=2, transport="local", **how
    ) as pipe:
        losses = [pipe.step(BATCH) for _ in range(2)]
        trained = dict(model.named_parameters())
        optimizer = SGD([p for p in plain.parameters() if p.requires_grad])
        for found in losses:
            parts = [
                nn.functional.cross_entropy(plain(x), y) / 2 for x, y in zip(*(t.chunk(2) for t in BATCH), strict=True)
            ]
            for part in parts:
                part.backward()
            assert found == sum(part.item() for part in parts)
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, trained[name])
