"""Optimizers that move weights outside of their steps, as schedule-free ones do between training and evaluation."""

from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import PipeError, WorkerFailure

torch.manual_seed(0)
BATCH = torch.randn(8, 8), torch.randint(8, (8,))


class Moving(torch.optim.SGD):
    @torch.no_grad()
    def scale(self, factor):
        for parameter in self.state or [p for group in self.param_groups for p in group["params"]]:
            parameter.mul_(factor)


def pipeline(momentum=0.0, ema_decay=None, **options):
    torch.manual_seed(1)
    layers = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
    training = Training(partial(Moving, lr=0.1, momentum=momentum), ema_decay=ema_decay)
    return Pipeline(layers, nn.functional.cross_entropy, training=training, num_microbatches=4, **options)


def scale(pipe, factor):
    for optimizer in pipe.optimizers:
        optimizer.scale(factor)


def losses(momentum=0.0, **options):
    with pipeline(momentum, **options) as pipe:
        found = [pipe.step(BATCH)]
        for factor in 0.5, 2.0:
            scale(pipe, factor)
            found.append(pipe.evaluate(BATCH))
        return [*found, pipe.step(BATCH), pipe.step(BATCH)]


def test_each_replica_moves_its_own_copy():
    assert losses(num_workers=4, replicas=2) == losses(num_workers=2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_owner_alone_would_move_its_copy(momentum):
    with refused("zero"):
        losses(momentum, num_workers=4, replicas=2, zero=1)


def of_layers(change):
    return lambda pipe: pipe.modify(lambda stage, modules: [change(m) for m in modules if isinstance(m, nn.Linear)])


AVGPIPE = {"num_workers": 2, "schedule": "avgpipe"}


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: scale(pipe, 0.5),
        of_layers(lambda layer: nn.init.eye_(layer.weight)),
    ],
)
def test_a_reference_would_stay(move):
    """Such changes were evaluated and saved by nobody."""
    with pipeline(**AVGPIPE) as pipe:
        pipe.step(BATCH)
        with pytest.raises(PipeError, match="pull"):
            move(pipe)
            pipe.step(BATCH)


def test_what_a_reference_has_not_is_not_trained():
    with pipeline(**AVGPIPE) as pipe:
        pipe.step(BATCH)
        of_layers(lambda layer: layer.bias.requires_grad_(False))(pipe)
        with refused("pull", WorkerFailure):
            pipe.step(BATCH)
        of_layers(lambda layer: layer.bias.requires_grad_())(pipe)
        assert pipe.step(BATCH) > 0, "all is as it was"


def test_a_reference_is_loaded_and_has_no_average(tmp_path):
    """Weights were loaded into the pipelines alone, and an average of theirs was evaluated as if there were none."""
    with pipeline(**AVGPIPE) as pipe:
        pipe.weights.save(tmp_path / "first.safetensors")
        first = pipe.evaluate(BATCH)
        pipe.step(BATCH)
        assert pipe.evaluate(BATCH) != first
        pipe.weights.load_pretrained(tmp_path / "first.safetensors")
        assert pipe.evaluate(BATCH) == first
    with refused("ema_decay"):
        pipeline(ema_decay=0.9, **AVGPIPE)


def test_all_other_changes_stay_possible():
    options = {"num_workers": 4, "replicas": 2, "ema_decay": 0.5}
    with pipeline(**options) as pipe, pipeline(zero=1, **options) as divided:
        for each in pipe, divided:
            each.step(BATCH)
            each.learning_rate = 0.05
            with each.weights.averaged():
                each.evaluate(BATCH)
            each.modify(lambda stage, modules: [nn.init.eye_(m.weight) for m in modules if isinstance(m, nn.Linear)])
        assert divided.step(BATCH) == pipe.step(BATCH)
