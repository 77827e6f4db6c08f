"""What is left after a step that failed in threads mode: what was there before it."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from refusals import failed
from small_pipeline import X, Y, num_held, pipeline
from torch import nn
from training_options import pipeline_with

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.pipeline import Pipeline


class Broken(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.linear, self.when, self.calls = nn.Linear(8, 8), when, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.when:
            raise ArithmeticError("the model's own fault")
        return self.linear(x)


def test_the_first_cause_is_raised_with_worker_action_step_and_traceback():
    pipe = pipeline([partial(nn.Linear, 4, 8), nn.Tanh, partial(Broken, 7), partial(nn.Linear, 8, 3)], num_workers=4)
    pipe.step((X, Y))
    with pytest.raises(WorkerFailure) as failure:
        pipe.step((X, Y))
    assert (failure.value.worker, failure.value.action, failure.value.step) == (2, "2F2", 2)
    assert failure.value.summary == "ArithmeticError: the model's own fault, in layer 2 (Broken)"
    assert "in forward" in failure.value.remote_traceback


def test_an_error_of_the_users_undoes_the_step_and_the_pipeline_goes_on():
    """A wrong shape typed at a prompt lost the pipeline and its weights: every later call raised."""

    def run(*mistakes):
        pipe = pipeline([partial(nn.Linear, 4, 8), partial(nn.Dropout, 0.5), partial(nn.Linear, 8, 3)], num_workers=3)
        losses = [pipe.step((X, Y))]
        for mistake in mistakes:
            torch.manual_seed(3)
            before = torch.rand(1)
            torch.manual_seed(3)
            with pytest.raises(WorkerFailure):
                mistake(pipe)
            assert torch.equal(torch.rand(1), before), "as it was"
            assert sum(num_held(shard) for actor in pipe.actors for shard in actor.shards.values()) == 0
        return [*losses, pipe.step((X, Y)), pipe.evaluate((X, Y))], pipe.weights.state_dict()

    losses, state = run(
        lambda pipe: pipe.step((torch.ones(10, 5), Y)),  # in the first stage
        lambda pipe: pipe.step((X, Y.float())),  # in the last, after the others' first forwards
        lambda pipe: pipe.step(microbatches=[(X, Y), (X, Y), (X, Y), (X[:, :3], Y)]),  # after backwards
        lambda pipe: pipe.predict(X[:, :2]),
    )
    expected_losses, expected = run()
    assert losses == expected_losses
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_ctrl_c_at_a_prompt_undoes_the_step_too(num_workers):
    def stop(x):
        if interrupts:
            interrupts.pop()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread may be late on a busy machine
        return x

    class Stopped(nn.Module):
        def forward(self, x):
            return stop(x)

    pipe = pipeline([partial(nn.Linear, 4, 8), nn.Tanh, Stopped, partial(nn.Linear, 8, 3)], num_workers=num_workers)
    quiet = pipeline([partial(nn.Linear, 4, 8), nn.Tanh, nn.Identity, partial(nn.Linear, 8, 3)])
    interrupts = []
    assert pipe.step((X, Y)) == quiet.step((X, Y))
    interrupts = [1]
    with pytest.raises(KeyboardInterrupt):
        pipe.step((X, Y))
    assert [pipe.step((X, Y)) for _ in range(2)] == [quiet.step((X, Y)) for _ in range(2)]


class Counting(nn.Module):
    """Counts its forwards in a buffer and in an attribute, whatever the mode; fails when it is told to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.calls = 0
        self.norm = nn.BatchNorm1d(4)
        self.fails = False

    def forward(self, x):
        self.count += 1
        self.calls += 1
        if self.fails and self.calls % 4 == 3:
            raise ArithmeticError("no")
        return self.norm(x)


def held(modules):
    return [(m.training, m.calls, *(b.clone() for b in m.buffers())) for m in modules if isinstance(m, Counting)]


@pytest.mark.parametrize("call", ["step", "train", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("schedule", "num_workers"),
    [("1f1b", 1), *((schedule, 2) for schedule in ("1f1b", "gpipe-recompute", "zb-h1", "chimera", "pipedream-2bw"))],
)
def test_what_modules_hold_is_undone_with_the_step(schedule, call, num_workers):
    """The weights were those of before a step that failed, running statistics and counters were not."""
    modules = [nn.Linear(4, 4), Counting(), nn.Linear(4, 4), Counting()]
    batch = torch.randn(8, 4), torch.randn(8, 4)
    options = {"num_microbatches": 4, "num_workers": num_workers, "schedule": schedule}
    pipe = pipeline_with(modules, nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    calls = {"train": lambda: list(pipe.train([batch, batch])), "predict": lambda: pipe.predict(batch[0])}
    calls |= {"step": lambda: pipe.step(batch), "evaluate": lambda: pipe.evaluate(batch)}
    pipe.step(batch)
    mine = [m for a in pipe.actors for s in a.shards.values() for m in s.slice.modules]
    before = held(mine)
    for module in mine:
        module.fails = isinstance(module, Counting)
    with failed(ArithmeticError):
        calls[call]()
    assert len(before) == len(held(mine)) >= 2
    for old, new in zip(before, held(mine), strict=True):
        assert old[:2] == new[:2] and all(map(torch.equal, old[2:], new[2:]))
    for module in mine:
        module.fails = False
    pipe.step(batch)
    pipe.close()


def test_what_a_loop_that_is_left_has_begun_counts_nowhere():
    """Buffers were put back, counters in attributes were not."""
    modules = [nn.Linear(4, 4), Counting(), nn.Linear(4, 4), Counting()]
    batch = torch.randn(8, 4), torch.randn(8, 4)
    pipe = Pipeline(modules, nn.functional.mse_loss, num_microbatches=4, num_workers=2)
    for _ in pipe.train([batch] * 3):
        break
    assert [module.calls for module in modules[1::2]] == [4, 4]
    assert [int(module.count) for module in modules[1::2]] == [4, 4]
    pipe.close()


def shifted(output, target):
    return nn.functional.mse_loss(output, target.sub_(1))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_is_not_written_whatever_was_called_before(num_workers):
    """A prediction has no targets, and told nothing of who writes them: an evaluation after it wrote the user's."""
    layers = [partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4)]
    pipe = Pipeline(layers, shifted, num_microbatches=2, num_workers=num_workers)
    x, y = torch.randn(2, 4, 4)
    before = y.clone()
    pipe.predict(x)
    pipe.evaluate((x, y))
    pipe.evaluate((x, y), metric=lambda output, target: target.mul_(2).sum())
    pipe.evaluate((x, y), metric=nn.functional.l1_loss)
    pipe.evaluate((x, y), metric=shifted)
    pipe.step((x, y))
    assert torch.equal(y, before)
    pipe.close()
