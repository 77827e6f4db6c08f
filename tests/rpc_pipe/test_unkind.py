"""Unkind models train as in one process, bit for bit, whatever the schedule, wherever they are cut."""

import random
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from unkind import MODELS, WIDTH, Linear, batches_for, differences, mse, repeated

from rpc_pipe.dependency import ConfigError
from rpc_pipe.model.partition import Partition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.randomness import Randomness


def pipeline(model, schedule, **options):
    return Pipeline(list(model.layers), model.loss_fn, optimizer=model.optimizer, schedule=schedule, **options)


@pytest.mark.parametrize("schedule", [name for name, cls in SCHEDULES.items() if cls.synchronous])
@pytest.mark.parametrize("name", MODELS)
def test_identical_to_one_process(name, schedule):
    """Workers, microbatches and order are drawn by the names."""
    draw = random.Random(name + schedule)
    workers, microbatches, order = draw.choice([2, 2, 3, 4]), draw.choice([1, 3, 4]), draw.choice(["ready", "fixed"])
    if schedule == "dualpipe" and workers == 3:
        workers = 4  # it takes even numbers only
    torch.manual_seed(0)
    options = {"num_workers": workers, "num_microbatches": microbatches, "order": order, "seed": 1}
    pipe = pipeline(MODELS[name], schedule, **options)
    assert differences(pipe, MODELS[name], batches_for(name, microbatches), 1) == [], options


class Noisy(Linear):
    """Adds noise to gradients, as a function that rounds at random in backward does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda grad: grad + torch.randn_like(grad))

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: grad + torch.randn_like(grad))
        return y


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += torch.randn_like(parameter) / 10


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_what_draws_in_backward_and_update_does_not_depend_on_timing(schedule):
    """Workers in threads drew from one generator in the order in which they happened to run."""
    noisy = repeated(Noisy, optimizer=partial(Langevin, lr=0.1))
    states = []
    for order in ("ready", "fixed", "ready"):
        torch.manual_seed(0)
        pipe = pipeline(noisy, schedule, num_workers=2, num_microbatches=3, order=order)
        for _ in range(2):
            pipe.step((torch.ones(6, WIDTH), torch.ones(6, WIDTH)))
        states.append(pipe.state_dict())
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


class Hooked(Linear):
    """Halves a gradient by a method of its own, and counts by another."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.linear = norm(self.linear)
        self.scale, self.counted = nn.Parameter(torch.ones(WIDTH)), 0
        self.scale.name_of_mine = "scale"
        self.scale.register_hook(self.halved)
        self.scale.register_post_accumulate_grad_hook(self.count)

    def halved(self, grad):
        return grad / 2

    def count(self, parameter):
        self.counted += 1

    def forward(self, x):
        return self.linear(x).tanh() * self.scale


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_replicas_of_modules_have_all_that_these_have(norm):
    """Copies lost their parameters' hooks, silently; the old `weight_norm` could not be copied."""
    torch.manual_seed(0)
    modules = [Hooked(norm) for _ in range(2)]
    pipe = pipeline(replace(MODELS["hooks"], layers=modules), "chimera", num_workers=2, num_microbatches=4)
    pipe.step((torch.randn(8, WIDTH), torch.randn(8, WIDTH)))
    layers = {place: shard.slice.layers[0][1] for actor in pipe.actors for place, shard in actor.shards.items()}
    assert layers[0, 0] is modules[0] and layers[0, 1] is not modules[0]
    for stage in (0, 1):
        one, other = layers[stage, 0], layers[stage, 1]
        assert (one.counted, other.counted) == (2, 2) and other.scale.name_of_mine == "scale"
        assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_module_that_cannot_be_copied_is_named():
    class Locked(Linear):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"a Locked cannot be copied for the second replica .*; pass a callable"):
        Pipeline([Locked(), Locked()], mse, schedule="chimera", num_workers=2, num_microbatches=2)


def test_a_callable_that_returns_what_is_there_gives_no_two_replicas_one_layer():
    layers = [Linear(), Linear()]
    pipe = Pipeline([lambda: layers[0], lambda: layers[1]], mse, schedule="chimera", num_workers=2, num_microbatches=2)
    shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
    assert len({shard.slice.layers[0][1] for shard in shards}) == 4


def test_a_pipeline_lets_go_of_layers_that_it_does_not_hold():
    """In a job a worker kept the layers of all stages alive, if they were given as modules."""
    partition = Partition(nn.Sequential(Linear(), Linear()), 2)
    ((_, mine),) = partition.build(0, Randomness(0))
    other = weakref.ref(partition.build(1, Randomness(0))[0][1])
    partition.release()
    assert other() is None and mine is not None
