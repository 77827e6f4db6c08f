"""What is planned is what runs: emulated devices, whose times are as planned, act in the planned order."""

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from rpc_pipe.dependency import B, F, I, R, W
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.modules import autocast, randomness
from rpc_pipe.workers.hooks import Listener

#: an action's length: long against what a thread needs to wake up
SECONDS = 0.02


@pytest.fixture(autouse=True)
def _devices_compute_at_once(monkeypatch):
    """Workers that are threads take turns, for what a process has once; these devices neither draw nor cast."""
    for module in (autocast, randomness):
        monkeypatch.setattr(module, "computing", nullcontext())


class Device(torch.autograd.Function):
    """Takes the time of a forward and of a backward, without computing."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SECONDS)
        return grad


class Stage(nn.Module):
    """Its backward for the inputs sleeps, and so does that for the weight: together as long as F twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return Device.apply(x) * Weight.apply(self.weight)


class Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SECONDS)
        return grad


class Order(Listener):
    def __init__(self):
        self.steps = []

    def step_finished(self, record):
        self.steps.append([a.action for a in sorted(record.actions, key=lambda a: a.start_ns)])


def emulate(name, P, M, order):
    """Return the pipeline's spec and an iterator: step after step, what each worker ran, in order."""
    spec = SCHEDULES[name](num_workers=P, num_microbatches=M)
    pipe = Pipeline(
        [Stage] * spec.num_stages,
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.SGD, lr=0.1)),
        num_workers=P,
        num_microbatches=M,
        schedule=name,
        order=order,
    )
    orders = [Order() for _ in range(P)]
    pipe.listen(lambda worker: orders[worker])
    # The first stage's input owes a gradient too, so that its I takes time as planned.
    batch = torch.randn(M, 2, requires_grad=True), torch.randn(M, 2)

    def steps():
        while True:
            pipe.step(batch)
            yield [[a for a in own.steps[-1] if a.kind.per_microbatch] for own in orders]

    return spec, steps()


def planned(spec, order):
    cost = uniform({F: 1, B: 2, I: 1, W: 1, R: 1})
    return simulate(spec, cost, comm=0.01, order=order).orders()


@pytest.mark.parametrize(
    "name, P, M",
    [("1f1b", 8, 8), ("chimera", 4, 8), ("dualpipe", 4, 8), ("zb-v", 4, 8), ("v-half", 3, 5), ("zb-h2", 2, 4)],
)
def test_fixed_order_is_the_planned_one(name, P, M, monkeypatch):
    """At any timing, so actions may be short."""
    monkeypatch.setitem(globals(), "SECONDS", 0.001)
    spec, steps = emulate(name, P, M, "fixed")
    assert next(steps) == next(steps) == planned(spec, "fixed")


@pytest.mark.parametrize(
    "name, P, M",
    [("1f1b", 2, 4), ("zb-h1", 2, 4), ("1f1b", 4, 8), ("gpipe", 4, 4), ("gpipe", 8, 8), ("interleaved", 4, 4)],
)
def test_ready_order_is_the_planned_one_where_times_are(name, P, M):
    """Other work on the machine may hold up a payload in any step, but hardly in every one of ten."""
    spec, steps = emulate(name, P, M, "ready")
    plan = planned(spec, "ready")
    assert any(next(steps) == plan for _ in range(10))
