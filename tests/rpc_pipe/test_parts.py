"""Live replicas of a stage run the microbatches of a dead one in parts: with the bits of the undisturbed run.

All workers are threads here; `test_elastic.py` kills processes.
"""

from functools import partial

import pytest
import torch
from torch import nn

from rpc_pipe.dependency import H
from rpc_pipe.dependency.relocating import relocated
from rpc_pipe.model.shard_maker import ShardMaker
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.workers.hooks import Listener
from rpc_pipe.workers.threads import WorkerThreads


class Handed(Listener):
    """Counts the sums that are handed on."""

    count = 0

    def action_started(self, step, action):
        Handed.count += action.kind is H


def lose(pipe, maker, gone):
    """Let the live workers of a pipeline go on without those that are gone, between two steps."""
    session = pipe._session
    spec = relocated(session.spec, frozenset(gone))
    session.actors[:] = [actor for actor in session.actors if actor.worker in spec.workers]
    for actor in session.actors:
        own = dict(actor.shards)
        for stage, route in spec.carried(actor.worker):
            if (stage, route) not in own:
                host = next(shard for (other, _), shard in own.items() if other == stage)
                own[stage, route] = maker.guest(spec, stage, route, host, actor.backend.device)
        actor.host(dict(sorted(own.items())), spec.hosted(actor.worker))
    session._threads = WorkerThreads(session.actors)
    session.begin(spec)


def trained(schedule, gone, monkeypatch):
    """Return losses and weights; between the first step and the others workers go."""
    makers = []
    end = ShardMaker.end
    monkeypatch.setattr(ShardMaker, "end", lambda maker, *a, **b: (makers.append(maker), end(maker, *a, **b)))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    training = Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=0.1)
    options = {"num_workers": 6, "schedule_options": {"replicas": 3}, "num_microbatches": 12}
    with Pipeline(layers, nn.functional.mse_loss, training=training, schedule=schedule, **options) as pipe:
        pipe.listen(lambda worker: Handed())
        batches = [(torch.randn(24, 8), torch.randn(24, 8)) for _ in range(5)]
        losses = [pipe.step(batches[0])]
        if gone:
            lose(pipe, makers[0], gone)
        losses += [pipe.step(batches[1]), *pipe.train(batches[2:]), pipe.evaluate(batches[0])]
        short = tuple(part[:4] for part in batches[0])  # fewer microbatches than replicas times parts
        losses.append(pipe.step(short))
        held = [shard for actor in pipe.actors for shard in actor.shards.values() if not shard.is_guest]
        return losses, {name: tensor.clone() for shard in held for name, tensor in shard.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_parts_of_a_replica_have_the_bits_of_the_whole(schedule, monkeypatch):
    whole, weights = trained(schedule, set(), monkeypatch)
    for gone in {0}, {1, 5}:
        Handed.count = 0
        again, others = trained(schedule, gone, monkeypatch)
        assert Handed.count >= 4 and again == whole
        assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
