"""Asynchronous pipelines of small models, and the replay in one process that they must equal."""

import random
import time

import torch
from small_models import LAYERS
from torch import nn
from training_options import pipeline_with

from bench.replaying import replay_of as replay_of_layers
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.modules.randomness import Randomness
from rpc_pipe.workers.hooks import Listener

ASYNCHRONOUS = [name for name, cls in SCHEDULES.items() if not cls.synchronous]
X = torch.randn(12, 10, 8, generator=torch.Generator().manual_seed(1))


def adamw(named):
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def decaying(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def pipeline(schedule, layers=LAYERS, loss_fn=nn.functional.mse_loss, P=2, M=4, **options):
    return pipeline_with(
        layers,
        loss_fn,
        optimizer=adamw,
        schedule=schedule,
        num_workers=P,
        num_microbatches=M,
        stall_s=30,
        **options,
    )


def replay_of(pipe, layers=LAYERS, loss_fn=nn.functional.mse_loss, **options):
    randomness = Randomness(0)
    built = [module for _, module in LayerPartition(list(layers), 1).build(0, randomness)]
    return replay_of_layers(pipe.spec, built, pipe.partition.ranges, loss_fn, adamw, randomness, **options)


def most_copies(pipe):
    """Return a list that will say how many versions of its weights each shard has held at once behind an update."""
    shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
    most = [1] * len(shards)

    def watch(number, shard, update):
        def updated(**settings):
            update(**settings)
            most[number] = max(most[number], 1 + len(shard.versions._versions))

        shard.update = updated

    for number, shard in enumerate(shards):
        watch(number, shard, shard.update)
    return most


def same(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


class Late(Listener):
    """Delays actions at random."""

    def __init__(self, seed, worker, most_s):
        self.draw, self.most_s = random.Random(f"{seed} {worker}"), most_s

    def action_started(self, step, action):
        if self.draw.random() < 0.5:
            time.sleep(self.draw.random() * self.most_s)
