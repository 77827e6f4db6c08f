"""Streams of steps, and what ends a step: the loss, its weight, norms of gradients, a wish to stop."""

import time
import weakref
from functools import partial

import pytest
import torch
from processes import python
from refusals import failed, refused
from small_models import LAYERS, NORMED
from torch import nn
from training_options import pipeline_with

from rpc_pipe.dependency import G, PipeError, WorkerFailure
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers import run
from rpc_pipe.workers.hooks import Listener
from rpc_pipe.workers.step import Step

X = torch.randn(6, 10, 8, generator=torch.Generator().manual_seed(1))


def summed(output, target):
    """A sum and its weight, which differs from microbatch to microbatch."""
    wanted = target[:, 0] > -0.5
    return ((output - target)[wanted] ** 2).sum(), wanted.sum() * 8


def pipeline(schedule="1f1b", layers=LAYERS, loss_fn=nn.functional.mse_loss, P=2, M=4, **options):
    return pipeline_with(
        layers,
        loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        schedule=schedule,
        num_workers=P,
        num_microbatches=M,
        **options,
    )


def same(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, summed])
@pytest.mark.parametrize("schedule, P", [("1f1b", 4), ("zb-h1", 2), ("interleaved", 2), ("zb-v", 2), ("naive", 3)])
def test_clipping_has_the_bits_of_the_whole_model(schedule, P, loss_fn):
    layers = [layer for layer in LAYERS if not isinstance(layer, partial) or layer.func is not nn.Dropout]
    pipe = pipeline(schedule, layers, loss_fn, P, max_grad_norm=0.05)
    whole = nn.Sequential(*(layer() for layer in layers))
    whole.load_state_dict(pipe.weights.state_dict())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for x in X[:3]:
        weight = 0
        for part in x.tensor_split(4):
            loss = loss_fn(whole(part), part)
            if isinstance(loss, tuple):
                weight += float(loss[1])
                loss[0].backward()
            else:
                (loss * (len(part) / len(x))).backward()
        for parameter in whole.parameters() if weight else ():
            parameter.grad.div_(weight)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        pipe.step((x, x))
        assert pipe.grad_norm == float(norm) > 0.05
    assert same(whole.state_dict(), pipe.weights.state_dict())


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_replicas_are_clipped_by_the_norm_of_what_they_are_together(schedule):
    pipe = pipeline(schedule, max_grad_norm=0.05)
    straight = pipeline("1f1b", max_grad_norm=0.05)
    for x in X[:3]:
        pipe.step((x, x))
        straight.step((x, x))
        assert pipe.grad_norm == pytest.approx(straight.grad_norm, rel=1e-6), "sums of another order"
    by_place = {place: shard.state_dict() for actor in pipe.actors for place, shard in actor.shards.items()}
    assert all(same(state, by_place[stage, 0]) for (stage, _), state in by_place.items())


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [(name, [LAYERS, NORMED][i % 2]) for i, name in enumerate(SCHEDULES) if SCHEDULES[name].synchronous],
)
def test_a_stream_is_its_steps(schedule, layers):
    """With an evaluation in the loop's body, and after the loop was left early."""
    pipes = [pipeline(schedule, layers, P=2, max_grad_norm=1.0) for _ in range(2)]
    losses = [[pipes[0].step((x, x)) for x in X[:3]]]
    losses[0] += [pipes[0].evaluate((X[5], X[5]))]
    losses[0] += [pipes[0].step((x, x)) for x in X[3:]]
    stream = pipes[1].train((x, x) for x in X)
    losses.append([loss for _, loss in zip(range(3), stream, strict=False)])
    stream.close()  # what has been begun of the fourth is undone
    losses[1] += [pipes[1].evaluate((X[5], X[5]))]
    for number, loss in enumerate(pipes[1].train((x, x) for x in X[3:])):
        losses[1].append(loss)
        if number == 0:
            pipes[1].evaluate((X[0], X[0]))
    assert losses[0] == losses[1]
    assert same(pipes[0].weights.state_dict(), pipes[1].weights.state_dict())
    assert all(len(actor.carrier.outbox) == 0 for actor in pipes[1].actors)


def test_batches_of_a_stream_are_read_one_ahead_and_may_differ_in_size():
    read = []

    def batches():
        for rows in (8, 3, 10, 1):
            read.append(rows)
            yield X[0, :rows], X[0, :rows]

    pipe = pipeline()
    losses = []
    for loss in pipe.train(batches()):
        losses.append(loss)
        assert len(read) == min(len(losses) + 1, 4)
    straight = pipeline()
    assert losses == [straight.step((X[0, :rows], X[0, :rows])) for rows in (8, 3, 10, 1)]


def test_of_a_complete_step_nothing_is_held_while_the_caller_has_the_loss(monkeypatch):
    """The step that was opened last was, with its batch and what replicas had handed each other."""
    steps = weakref.WeakSet()

    def noted(*args):
        steps.add(step := Step(*args))
        return step

    monkeypatch.setattr(run, "Step", noted)
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipe = Pipeline([partial(nn.Linear, 4, 4)], nn.functional.mse_loss, training=Training(sgd), num_microbatches=2)
    losses = pipe.train([(torch.ones(4, 4), torch.ones(4, 4))])
    next(losses)
    assert not list(steps) and pipe.actors[0].step == 1


def test_a_stop_that_is_wanted_ends_the_stream_after_the_step_that_has_begun():
    pipe = pipeline()
    losses = []
    for loss in pipe.train((x, x) for x in X):
        losses.append(loss)
        if len(losses) == 2:
            pipe.request_stop()
    assert pipe.stopped and 2 < len(losses) <= 4


def test_a_loss_that_changes_its_kind_is_refused():
    """A mean lets updates wait for nobody, and a sum's weight would come too late to divide by it."""
    kinds = iter([False] * 4 + [True] * 4)

    def fickle(output, target):
        loss = nn.functional.mse_loss(output, target)
        return (loss, 1.0) if next(kinds) else loss

    pipe = pipeline(loss_fn=fickle)
    pipe.step((X[0], X[0]))
    with refused("loss_fn", WorkerFailure):
        pipe.step((X[1], X[1]))


def test_a_failure_is_told_to_those_who_ask_later():
    """A worker that failed gave its step up, and answered no question about it any more, not even with why: a hang."""

    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("no")

    pipe = pipeline(layers=[Fails, *LAYERS[:1]], P=2, stall_s=60)
    with failed(ArithmeticError):
        pipe.step((X[0], X[0]))


@pytest.mark.parametrize("schedule", ["chimera", "mixpipe", "dualpipe"])
def test_a_replica_without_a_microbatch_has_nothing_to_tell(schedule):
    pipe = pipeline(schedule, M=1, max_grad_norm=1.0)
    assert pipe.step((X[0], X[0])) == pipeline(M=1, max_grad_norm=1.0).step((X[0], X[0]))


STREAM = """
import sys
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

torch.manual_seed(0)
training = Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=0.1)
pipe = Pipeline([partial(nn.Linear, 8, 8) for _ in range(4)], nn.functional.mse_loss, num_workers=2,
                training=training, schedule="zb-h1", num_microbatches=4)
x = torch.randn(8, 8)
losses = []
for loss in pipe.train([(x, x)] * 6):
    losses.append((loss, pipe.grad_norm))
    if len(losses) == 3:
        losses.append(pipe.evaluate((x, x)))
    if len(losses) == 6:
        break
losses.append(pipe.step((x, x)))
if pipe.worker == 0:
    print("LOSSES", losses)
"""


@pytest.mark.parametrize("schedule", ["zb-h1", "pipedream"])
def test_a_stream_over_rpc_is_that_of_threads(tmp_path, schedule):
    script = tmp_path / "stream.py"
    script.write_text(STREAM.replace("zb-h1", schedule))
    found = []
    for command in ([script], ["-m", "rpc_pipe", "run", script, "--workers", 2]):
        done = python(*command, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(next(line.split("LOSSES")[1] for line in done.stdout.splitlines() if "LOSSES" in line))
    assert found[0] == found[1]


class Remembering(nn.Module):
    """Running statistics, a counter in an attribute, and noise that is drawn in evaluation too."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(8), 0

    def forward(self, x):
        self.calls += self.training
        return self.norm(x) * (1 + self.calls % 3) + torch.randn_like(x) / 8


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe-recompute", "zb-v", "pipedream-2bw"])
def test_the_body_of_a_loop_sees_the_model_of_a_complete_step(schedule):
    """Forwards of the next step, which begins before, had moved running means: other evaluations than between steps."""
    layers = [*LAYERS[:2], Remembering, *LAYERS[:2], Remembering, *LAYERS[:2]]
    pipe, plain = (pipeline(schedule, layers) for _ in range(2))
    found = []
    for loss in pipe.train((x, x) for x in X):
        found.append((loss, pipe.evaluate((X[5], X[5])), {k: t.clone() for k, t in pipe.weights.state_dict().items()}))
    if pipe.spec.synchronous:
        expected = [(plain.step((x, x)), plain.evaluate((X[5], X[5])), plain.weights.state_dict()) for x in X[:1]]
        assert found[0][:2] == expected[0][:2]
        expected += [(plain.step((x, x)), plain.evaluate((X[5], X[5])), plain.weights.state_dict()) for x in X[1:]]
        assert [each[:2] for each in found] == [each[:2] for each in expected]
        assert same(found[-1][2], plain.weights.state_dict())
    again = pipeline(schedule, layers)
    for _, (_, evaluated, state) in zip(again.train((x, x) for x in X), found, strict=True):
        assert again.evaluate((X[5], X[5])) == evaluated and same(again.weights.state_dict(), state)


class Typed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self, x):
        y = x.to(self.weight.dtype) @ self.weight
        return (y.abs() if y.is_complex() else y).float().tanh()


def test_norms_of_several_types_are_put_together_as_torch_does():
    """Torch takes those of a type together, in an order of its own, and a complex type for another than its parts'."""
    kinds = [torch.float32, torch.complex64, torch.bfloat16, torch.float64, torch.float32, torch.complex64] * 2
    layers = [partial(Typed, kind) for kind in kinds]
    pipe = pipeline("1f1b", layers, P=3, M=1, max_grad_norm=1e-3)
    whole = nn.Sequential(*(layer() for layer in layers))
    whole.load_state_dict(pipe.weights.state_dict())
    nn.functional.mse_loss(whole(X[0]), X[0]).backward()
    pipe.step((X[0], X[0]))
    assert pipe.grad_norm == float(nn.utils.clip_grad_norm_(whole.parameters(), 1e-3))


class Bounded(nn.Module):
    """Writes its weights in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            self.linear.weight.data.mul_(0.95).clamp_(-0.3, 0.3)
        return self.linear(x)


class Late(Listener):
    """Lets gradients of one stage come late from one worker: the other one begins the next step by the other stage."""

    def __init__(self, worker):
        self.worker = worker

    def action_started(self, step, action):
        if action.kind is G and action.stage == 1 and self.worker == 1:
            time.sleep(0.01)


def test_an_evaluation_between_steps_sees_no_weights_that_the_next_step_has_written():
    """Forwards of the next step may have run by then, or not: what was evaluated depended on time."""
    batches = [(x, x) for x in X.repeat(4, 1, 1)]
    layers = [nn.Identity, Bounded, Bounded, nn.Identity]
    one, other = (pipeline("dualpipev", layers, M=5, seed=3, order="ready") for _ in range(2))
    apart = [(one.step(batch), one.evaluate(batch)) for batch in batches]
    other.listen(Late)
    assert [(loss, other.evaluate(batches[n])) for n, loss in enumerate(other.train(batches))] == apart
    assert same(one.weights.state_dict(), other.weights.state_dict())


class Table(nn.Module):
    """Bounds the rows that it looks up, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(8, 8, max_norm=0.5)

    def forward(self, x):
        return x + self.rows(x.detach().argsort(1)[:, 0])


class Noting(nn.Module):
    """Keeps what nobody reads, as many models keep their last attention."""

    def forward(self, x):
        self.rows, self.seen = len(x), x.detach()
        return x * 2


@pytest.mark.parametrize("layer", [Table, Noting])
def test_an_evaluation_that_changes_what_the_next_step_has_read_is_told(layer):
    """The next step's forwards had begun, and what the evaluation wrote was lost."""
    layers = [partial(nn.Linear, 8, 8), layer, layer, nn.Identity]
    one, other = (pipeline("dualpipev", layers, M=5, seed=3, order="ready") for _ in range(2))
    batches = [(x[:7], x[:7]) for x in X[:4]]
    apart = [(one.step(batch), one.evaluate((X[5], X[5]))) for batch in batches]
    other.listen(Late)
    found = []
    try:
        found += ((loss, other.evaluate((X[5], X[5]))) for loss in other.train(batches))
    except PipeError as error:  # unless none of them had begun
        assert layer is not Noting
        assert "an evaluation changed what forwards of the next step have read" in str(error)
    assert found == apart[: len(found)] and (found == apart or layer is not Noting)


def test_an_evaluation_follows_statistics_of_other_stages_and_has_changed_none():
    """With zero=1 and a whole model it was blamed for the running statistics that it had brought from their stages."""
    batches, found = [(x[:8], x[:8]) for x in X[:4]], []
    for zero in 0, 1:
        model = nn.Sequential(*(layer() for layer in [partial(nn.Linear, 8, 8), partial(nn.BatchNorm1d, 8)] * 2))
        with torch.no_grad():
            [parameter.fill_(0.1) for parameter in model.parameters()]
        model.forward = model.forward  # a whole model
        training = Training(partial(torch.optim.AdamW, lr=1e-2))
        how = {"num_microbatches": 4, "num_workers": 4, "replicas": 2, "zero": zero, "training": training}
        with Pipeline(model, nn.functional.mse_loss, **how) as pipe:
            found.append([(loss, pipe.evaluate(batches[0])) for loss in pipe.train(batches)])
    assert found[0] == found[1]
