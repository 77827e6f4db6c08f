"""Updates that do not wait for the norm of all gradients: the same bits, whether they stand or are taken back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refusals import failed, refused
from torch import nn
from training_options import pipeline_with

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import Reductions, T, U, V, entries
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES

_SYNCHRONOUS = sorted(name for name, cls in SCHEDULES.items() if cls.synchronous)
_STEPS = 8
_EARLY = Reductions(norms=True, validated=True)


class _Counting(nn.Module):
    """Has what forwards write: how often, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return torch.tanh(self.drop(self.norm(self.linear(x))))


def _trained(
    schedule,
    post_validation,
    max_norm=5.0,
    loss=nn.functional.mse_loss,
    lr=0.01,
    num_workers=2,
    between=lambda pipe, batch: None,
    **options,
):
    """Return losses, norms and state of a few steps of `train`; some of them are clipped, and some are not."""
    pipe = pipeline_with(
        [partial(_Counting)] * 8,
        loss,
        optimizer=options.pop("optimizer", partial(torch.optim.AdamW, lr=lr)),
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
        max_grad_norm=max_norm,
        post_validation=post_validation,
        schedule=schedule,
        num_workers=num_workers,
        num_microbatches=4,
        **options,
    )
    draw = partial(torch.randn, 12, 6, generator=torch.Generator().manual_seed(1))
    batches = [(draw(), draw()) for _ in range(_STEPS)]
    for number in (2, 5, 6):  # of one kind of number each time
        batches[number] = batches[number][0], 20 * batches[number][1]
    with pipe:
        losses, norms, taken = [], [], []
        again = [shard for actor in pipe.actors for shard in actor.shards.values()]
        for shard in again:
            shard.update_again = partial(_noted, shard.update_again, taken)
        for value in pipe.train(batches):
            losses.append(value)
            norms.append(pipe.grad_norm)
            if between(pipe, batches[0]) == "leave":
                break
        return losses, norms, pipe.weights.state_dict(), len(taken)


def _noted(call, taken, *args):
    taken.append(args)
    return call(*args)


class _Own(torch.optim.SGD):
    """Counts in an attribute, keeps slow weights in another one, and centres gradients in place."""

    def __init__(self, named, lr):
        super().__init__(named, lr=lr)
        self.calls, self.slow = 0, {}

    def step(self, closure=None):
        self.calls += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.sub_(parameter.grad.mean() / self.calls)
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(parameter, parameter.detach().clone())
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))


def test_what_an_optimizer_of_ones_own_keeps_is_taken_back_too():
    """Its attributes counted an update that was taken back, and its gradients had been written."""
    early, waiting = (_trained("zb-v", how, optimizer=partial(_Own, lr=0.01)) for how in (True, False))
    assert early[:2] == waiting[:2] and early[3]
    assert all(torch.equal(early[2][name], tensor) for name, tensor in waiting[2].items())


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "chimera", "gpipe-recompute", "interleaved", "zb-h2", "zb-v"],
)
def test_an_early_update_has_the_bits_of_one_that_waits(schedule):
    split = {"ema_decay": 0.9} if schedule == "zb-v" else {}
    waiting = _trained(schedule, False, **split)
    early = _trained(schedule, True, **split)
    assert any(norm > 5.0 for norm in early[1]) and any(norm < 5.0 for norm in early[1])
    assert early[:2] == waiting[:2]
    assert all(torch.equal(early[2][name], tensor) for name, tensor in waiting[2].items())
    assert waiting[3] == 0 and early[3] > 0, "no update was taken back"


@pytest.mark.parametrize("order", ["ready", "fixed"])
def test_an_early_update_that_stands_is_not_made_again(order):
    waiting = _trained("zb-h2", False, max_norm=1e6, order=order, num_workers=4)
    early = _trained("zb-h2", None, max_norm=1e6, order=order, num_workers=4)
    assert early[:2] == waiting[:2] and early[3] == 0
    assert all(torch.equal(early[2][name], tensor) for name, tensor in waiting[2].items())


def test_the_loop_may_evaluate_and_be_left_where_an_update_was_taken_back():
    def both(post_validation):
        seen = []

        def between(pipe, batch):
            seen.append(pipe.evaluate(batch))
            return "leave" if len(seen) == 6 else None

        losses, _, state, taken = _trained("zb-h2", post_validation, between=between)
        return losses + seen, state, taken

    (waiting, expected, _), (early, state, taken) = both(False), both(True)
    assert early == waiting and taken > 0
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_accumulated_gradients_are_validated_with_their_update():
    waiting = _trained("zb-v", False, accumulate=2)
    early = _trained("zb-v", True, accumulate=2)
    assert early[:2] == waiting[:2]
    assert all(torch.equal(early[2][name], tensor) for name, tensor in waiting[2].items())


def test_sums_are_divided_before_an_early_update():
    def summed(output, target):
        return nn.functional.mse_loss(output, target, reduction="sum"), float(target.numel())

    waiting = _trained("zb-h2", False, loss=summed)
    early = _trained("zb-h2", True, loss=summed)
    assert early[:2] == waiting[:2] and early[3] > 0
    assert all(torch.equal(early[2][name], tensor) for name, tensor in waiting[2].items())


class _Cautious(nn.Module):
    """Refuses what would not be there if gradients had been clipped in time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if self.training and float(self.linear.weight.detach().abs().max()) > 1e3:
            raise ValueError("the weights have exploded")
        return self.linear(x)


def _cautious(post_validation, max_norm, number=3):
    with Pipeline(
        [partial(_Cautious)] * 4,
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.SGD, lr=1.0), max_grad_norm=max_norm, post_validation=post_validation),
        schedule="zb-v",
        num_workers=2,
        num_microbatches=2,
    ) as pipe:
        x = 0.01 * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        batches = [(x, torch.zeros_like(x) + (1e6 if step == number else 0)) for step in range(6)]
        return list(pipe.train(batches)), pipe.weights.state_dict()


def test_what_only_a_wrong_update_makes_fail_does_not_count():
    """Between an update that should have been clipped and its being taken back, the next step's forwards see it."""
    waiting, early = _cautious(False, 10.0), _cautious(True, 10.0)
    assert waiting[0] == early[0]
    assert all(torch.equal(early[1][name], tensor) for name, tensor in waiting[1].items())


def test_what_fails_after_an_update_that_stands_counts():
    with failed(ValueError):
        _cautious(True, 1e12)


def test_nothing_waits_for_the_norm_but_its_validation():
    spec = make_spec("zb-h2", 4, 8)
    for worker in range(4):
        needs = {entry.action: entry for entry in entries(spec, worker, reductions=_EARLY)}
        assert T(worker, 0) not in needs[U(worker, 0)].own and not needs[U(worker, 0)].pulled
        assert set(needs[V(worker, 0)].own) == {U(worker, 0), T(worker, 0)}


@pytest.mark.parametrize("schedule", _SYNCHRONOUS)
def test_early_updates_cost_no_time_from_step_to_step(schedule):
    spec = make_spec(schedule, 4, 8)
    costs = {"F": 10, "I": 10, "W": 10, "B": 20, "R": 10}

    def step_time(reductions):
        relation = Relation(spec, 6, reductions)
        return simulate(relation, lambda action: costs.get(action.kind.letter, 0.0), comm=0.4).step_time

    assert step_time(_EARLY) <= step_time(Reductions(norms=True)) + 1e-6
    assert step_time(_EARLY) == pytest.approx(step_time(Reductions()), rel=0.02)


def test_post_validation_is_refused_where_nothing_could_be_validated():
    with refused("post_validation"):
        Pipeline([nn.Linear(2, 2)], nn.functional.mse_loss, num_microbatches=1, training=Training(post_validation=True))
