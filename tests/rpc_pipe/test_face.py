"""What a script types: training as a value, checkpoints and weights behind nouns."""

from functools import partial

import pytest
import torch
from refusals import refused
from small_pipeline import X, Y, pipeline
from torch import nn
from torch.nn.functional import cross_entropy

from rpc_pipe import Pipeline, Training

BATCH = X, Y


def layers():
    torch.manual_seed(0)
    return [nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)]


def trained(num_workers=2, schedule="1f1b", **more):
    more = {"training": Training(partial(torch.optim.SGD, lr=0.1))} | more
    return Pipeline(layers(), cross_entropy, num_microbatches=2, num_workers=num_workers, schedule=schedule, **more)


@pytest.mark.parametrize("num_workers, schedule", [(1, "1f1b"), (2, "1f1b"), (2, "zb-h2")])
def test_gradients_are_seen_whole_before_they_are_clipped(num_workers, schedule):
    plain = nn.Sequential(*layers())
    cross_entropy(plain(X), Y).backward()
    found = {}
    more = {"training": Training(partial(torch.optim.SGD, lr=0.1), max_grad_norm=0.01)}
    with trained(num_workers, schedule, **more) as pipe:
        for stage in range(pipe.spec.num_stages):
            pipe.on_gradients(stage, lambda own: found.update({name: each.grad.clone() for name, each in own.items()}))
        pipe.step(BATCH)
        norm = pipe.grad_norm
    assert found.keys() == {name for name, _ in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert norm == pytest.approx(float(torch.stack([each.norm() for each in found.values()]).norm()))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_can_be_changed_before_the_update(schedule):
    with trained(schedule=schedule) as pipe:
        before = pipe.weights.state_dict()
        pipe.on_gradients(1, lambda own: [parameter.grad.zero_() for parameter in own.values()])
        pipe.step(BATCH)
        after = pipe.weights.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("2.", "3."))}
    with pipeline() as other, refused("on_gradients"):
        other.on_gradients(99, print)


def test_modules_are_modified_on_all_stages_or_the_error_is_everybodys():
    def freeze(stage, modules):
        for module in modules:
            if isinstance(module, nn.Linear) and stage == 0:
                module.requires_grad_(False)

    with trained() as pipe:
        pipe.modify(freeze)
        before = pipe.weights.state_dict()
        pipe.step(BATCH)
        after = pipe.weights.state_dict()
        assert {name for name in before if torch.equal(before[name], after[name])} == {"0.weight", "0.bias"}
        with refused("ZeroDivisionError"):
            pipe.modify(lambda stage, modules: 1 / (1 - stage))
