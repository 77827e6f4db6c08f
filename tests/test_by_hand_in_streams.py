"""What a user changes by hand while steps of an asynchronous schedule overlap counts, or is refused."""

from functools import partial

import pytest
import torch
from refusals import refused
from replayed import ASYNCHRONOUS, X, pipeline, replay_of
from torch import nn

from bench.replaying import held_out
from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.pipeline import Pipeline, Training


class Counting(nn.Module):
    """Computes by a counter in an attribute, and by a factor that users set."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.factor = nn.Linear(8, 8), 0, 1.0
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x) * self.factor * (1 + self.calls % 3) + self.shift
        self.calls += self.training
        return y


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_the_loop_sees_counters_of_the_step_that_is_complete(schedule):
    """They were those that forwards of later steps had left, in attributes, though not in buffers."""
    pipe = pipeline(schedule, [Counting] * 4)
    replay = replay_of(pipe, [Counting] * 4)
    steps = X[:4]
    for x, _, _ in zip(steps, pipe.train((x, x) for x in X), replay.train((x, x) for x in X), strict=False):
        assert pipe.evaluate((x, x)) == pytest.approx(held_out(replay, x, x), rel=1e-6)


def _loaded(layer, optimizer):
    with torch.no_grad():
        layer.linear.weight.copy_(torch.eye(8))


CHANGES = {
    "value of parameter 0.linear.weight was changed": _loaded,
    "requires_grad of parameter 0.linear.bias was changed": lambda layer, _: layer.linear.bias.requires_grad_(False),
    "shift of a Counting was changed": lambda layer, _: layer.shift.fill_(1.0),
    "factor of a Counting was changed": lambda layer, _: setattr(layer, "factor", 2.0),
    "training of a Linear was changed": lambda layer, _: layer.linear.eval(),
    "hooks of a Linear was changed": lambda layer, _: layer.linear.register_forward_hook(print),
    "hooks of parameter 0.linear.weight was changed": lambda layer, _: layer.linear.weight.register_hook(print),
}


@pytest.mark.parametrize("says", CHANGES)
def test_what_forwards_under_way_have_not_met_is_refused(says):
    """They went backward by other weights than their own, or what was changed was put back, and nobody was told."""
    layers = [Counting() for _ in range(4)]
    pipe = pipeline("pipedream-2bw", layers)
    with refused("stage", WorkerFailure):
        for _ in pipe.train((x, x) for x in X[:4]):
            CHANGES[says](layers[0], None)


class Around(nn.Module):
    """Computes by a weight and a buffer around its blocks, of which stages have copies."""

    def __init__(self):
        super().__init__()
        self.scale, self.blocks = nn.Parameter(torch.ones(8)), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        x = x * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("changed", ["scale", "shift"])
def test_copies_show_that_they_were_changed(changed):
    """They followed the user's module by a write that is no version, so forwards under way had met what was before."""
    model = Around()
    pipe = pipeline("pipedream-2bw", model)
    with refused("stage", WorkerFailure):
        for _ in pipe.train((x, x) for x in X[:4]):
            getattr(model, changed).detach().add_(0.5)


def test_rates_and_what_is_changed_behind_a_flush_count():
    """Learning rates are for the next update, which nobody has begun."""
    layers = [Counting() for _ in range(4)]
    pipe = pipeline("pipedream-2bw", layers)
    optimizers = [shard.optimizer for actor in pipe.actors for shard in actor.shards.values()]
    losses = []
    for loss in pipe.train((x, x) for x in X[:5]):
        losses.append(loss)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / len(losses)
        if len(losses) == 1:
            pipe.flush()
        if len(losses) == 2:
            layers[0].factor = 3.0
    assert len(losses) == 5


def test_statistics_of_whole_batches_need_steps_that_end():
    """Those of the next step were taken over with them."""
    with refused("deferred_batch_norm"):
        Pipeline(
            [nn.Linear(8, 8), nn.BatchNorm1d(8)],
            nn.functional.mse_loss,
            training=Training(partial(torch.optim.SGD, lr=0.1), deferred_batch_norm=True),
            schedule="pipedream-2bw",
            num_workers=2,
            num_microbatches=4,
        )
