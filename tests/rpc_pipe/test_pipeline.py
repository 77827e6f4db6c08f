"""The face, over the in-process carrier."""

import copy
import random
import threading
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from refusals import refused
from small_pipeline import SGD, X, Y, layers, num_held, pipeline
from torch import nn

import rpc_pipe
from rpc_pipe.dependency import F, PipeError, WorkerFailure
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.workers.compute.shard import Shard
from rpc_pipe.workers.hooks import Listener


def test_a_plain_sequential_trains_like_a_plain_loop():
    """The user's own loop in plain torch, with gradient accumulation over equal microbatches."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    piped = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    piped.load_state_dict(plain.state_dict())
    pipe = pipeline(piped, num_microbatches=2)
    optimizer = SGD(plain.parameters())
    for _ in range(3):
        expected = 0.0
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            loss = nn.functional.cross_entropy(plain(x), y) / 2
            loss.backward()
            expected += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step((X, Y)) == expected
    for name, tensor in pipe.weights.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


def test_sum_and_weight_count_padding_right():
    """Rows with target -1 are padding; the loss and the gradients are those of the others alone."""
    padded = torch.where(torch.arange(10) < 7, Y, -1)

    def masked(logits, target):
        total = nn.functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
        return total, (target >= 0).sum()

    pipe = pipeline(loss=masked, num_microbatches=3)
    alone = pipeline(num_microbatches=1)
    for _ in range(3):
        assert pipe.step((X, padded)) == pytest.approx(alone.step((X[:7], Y[:7])), rel=1e-6)
    for name, tensor in alone.weights.state_dict().items():
        torch.testing.assert_close(pipe.weights.state_dict()[name], tensor)


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_any_number_of_rows_works(rows):
    pipe, whole = pipeline(num_workers=3), pipeline(num_workers=1, num_microbatches=1)
    for _ in range(2):
        assert pipe.step((X[:rows], Y[:rows])) == pytest.approx(whole.step((X[:rows], Y[:rows])), rel=1e-5)


def test_microbatches_may_differ_in_shape():
    """A sequence of 128 and one of 129, without padding."""
    model = [partial(nn.Linear, 4, 4), nn.Tanh, partial(nn.Linear, 4, 1)]
    pipe = pipeline(model, nn.functional.mse_loss, num_microbatches=2)
    pieces = [(torch.ones(2, length, 4), torch.ones(2, length, 1)) for length in (128, 129)]
    assert pipe.step(microbatches=pieces) > pipe.step(microbatches=pieces) > 0


def test_dicts_tuples_none_and_integers_travel_between_stages():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return {"x": self.linear(x), "mask": x > 0, "ids": torch.arange(len(x)), "none": None, "scale": 2}

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, tree):
            assert tree["none"] is None and tree["ids"].dtype == torch.int64
            return self.linear(tree["x"] * tree["mask"] * tree["scale"])

    pipe, whole = pipeline([Split, Join]), pipeline([Split, Join], num_workers=1)
    losses = [pipe.step((X, Y)) for _ in range(3)]
    assert losses == [whole.step((X, Y)) for _ in range(3)] and losses[2] < losses[0]


def test_a_frozen_stage_and_an_output_without_gradient():
    def frozen():
        return nn.Linear(4, 4).requires_grad_(False)

    pipe = pipeline([frozen, nn.Tanh, partial(nn.Linear, 4, 3)], num_workers=3)
    before = pipe.weights.state_dict()["0.weight"]
    assert pipe.step((X, Y)) > pipe.step((X, Y))
    assert torch.equal(pipe.weights.state_dict()["0.weight"], before)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_initial_weights_and_dropout_do_not_depend_on_the_cut(num_workers):
    model = [partial(nn.Linear, 4, 8), partial(nn.Dropout, 0.5), partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)]
    pipe, reference = pipeline(model, num_workers=num_workers), pipeline(model, num_workers=2, order="fixed")
    assert [pipe.step((X, Y)) for _ in range(3)] == [reference.step((X, Y)) for _ in range(3)]


def test_a_builder_builds_only_what_it_is_asked_for():
    asked = []

    class Builder:
        num_layers = 4

        def __call__(self, stage):
            asked.append(list(stage.layers))
            return [layers()[i] for i in stage.layers]

    pipe, listed = pipeline(Builder(), split=[1, 3]), pipeline()
    assert asked == [[0], [1, 2, 3]]
    assert pipe.step((X, Y)) == listed.step((X, Y))
    assert list(pipe.weights.state_dict()) == list(listed.weights.state_dict())


class Drawing(nn.Module):
    """Draws from every global generator, when it is built and when it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + random.random() + float(numpy.random.rand()))

    def forward(self, x):
        return nn.functional.dropout(x * self.weight) * random.random() * numpy.random.rand()


def test_building_and_stepping_leave_the_callers_random_numbers_alone():
    """Each worker builds other layers; batches drawn or shuffled after that differed from worker to worker.

    The README's script gave loss 0.062 alone and 0.556 on two workers.
    """

    def drawn(use):
        torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
        use()
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    pipe = None

    def build():
        nonlocal pipe
        pipe = pipeline([partial(nn.Linear, 4, 8), Drawing, partial(nn.Linear, 8, 3)])

    expected = drawn(lambda: None)
    assert drawn(build) == expected
    assert drawn(lambda: pipe.step((X, Y))) == drawn(lambda: pipe.evaluate((X, Y))) == expected


def test_initial_weights_depend_on_the_seed_alone_whatever_draws_them():
    first = pipeline([Drawing, Drawing], num_workers=1).weights.state_dict()
    random.seed(7), numpy.random.seed(8)
    second = pipeline([Drawing, Drawing], num_workers=2).weights.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_outboxes_and_activations_are_empty_after_every_step():
    pipe = pipeline(num_workers=4)
    for call in (pipe.step, pipe.evaluate, pipe.step):
        call((X, Y))
        for actor in pipe.actors:
            assert len(actor.carrier.outbox) == 0
            assert not any(map(num_held, actor.shards.values()))


def test_activations_stay_within_the_promise(monkeypatch):
    peak = {}
    forward = Shard.forward

    def watched(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        peak[self.stage] = max(peak.get(self.stage, 0), num_held(self))
        return out

    monkeypatch.setattr(Shard, "forward", watched)
    pipe = pipeline(num_workers=4, num_microbatches=8)
    pipe.step((X, Y))
    assert all(kept <= pipe.spec.peak_activations(stage) for stage, kept in peak.items())


def test_worker_threads_compute_with_the_callers_settings():
    """Autocast around `step` worked in a job and did nothing in threads."""
    seen = []

    class SeeingLinear(nn.Linear):
        def forward(self, x):
            there = torch.empty(0).device.type  # as everything that a layer makes
            seen.append((there, torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), x.dtype))
            return super().forward(x)

    pipe = pipeline([partial(nn.Linear, 4, 8), partial(SeeingLinear, 8, 3)], num_microbatches=1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step((X, Y))
    assert seen.pop() == ("cpu", torch.float32, True, torch.bfloat16)
    with torch.device("meta"):
        pipe.evaluate((X, Y))
    assert seen.pop()[0] == "meta"
    pipe.evaluate((X, Y))
    assert seen.pop() == ("cpu", torch.float32, False, torch.float32)
    alone = pipeline([partial(nn.Linear, 4, 8), partial(nn.Linear, 8, 3)], num_workers=1, num_microbatches=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert alone.step((X, Y)) == loss
    with torch.no_grad():
        assert pipe.gather("grad", lambda actor: torch.is_grad_enabled()) == [False] * 2
    assert pipe.gather("grad", lambda actor: torch.is_grad_enabled()) == [True] * 2


def test_autocast_around_the_whole_loop_trains_like_autocast_around_each_step():
    """With one worker on the caller's thread, or in a job, forwards went on with the first step's weights."""

    def losses(around_all, around_each):
        pipe = pipeline(num_workers=1)
        with around_all:
            for _ in range(3):
                with around_each:
                    yield pipe.step((X, Y))

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    assert [*losses(autocast(), nullcontext())] == [*losses(nullcontext(), autocast())]


def test_a_closed_pipeline_has_no_threads_and_others_go_on():
    before = set(threading.enumerate())  # those of earlier tests may end at any time
    with pipeline(num_workers=3) as first, pipeline() as second:
        assert first.step((X, Y)) == second.step((X, Y))
        first.close()
        second.step((X, Y))
    assert set(threading.enumerate()) <= before
    for call in (lambda: first.step((X, Y)), first.weights.state_dict, first.barrier):
        with refused("pipeline", PipeError):
            call()


def test_a_listener_that_raises_is_removed_and_the_run_goes_on(caplog):
    class Raises(Listener):
        def action_started(self, step, action):
            raise RuntimeError("listener")

    pipe, quiet = pipeline(), pipeline()
    pipe.listen(lambda worker: Raises())
    assert pipe.step((X, Y)) == quiet.step((X, Y))
    assert sum("raised in action_started" in record.message for record in caplog.records) == 2


def test_a_stop_is_seen_by_all_after_the_same_step():
    pipe = pipeline()
    pipe.step((X, Y))
    threading.Timer(0, pipe.request_stop).run()
    assert not pipe.stopped
    pipe.step((X, Y))
    assert pipe.stopped
    with pytest.raises(KeyboardInterrupt, match="end the loop"):
        pipe.step((X, Y))
    assert pipe.evaluate((X, Y)) > 0, "what a script does after its loop still works"


def test_a_users_schedule_class_runs():
    from rpc_pipe.schedules import OneFOneB

    class Mine(OneFOneB):
        def after(self, a):
            return [*super().after(a), *([F(a.stage, a.microbatch - 1)] if a.kind is F else [])]

    mine, theirs = pipeline(schedule=Mine), pipeline()
    assert mine.step((X, Y)) == theirs.step((X, Y))


def test_a_stage_may_begin_with_a_layer_that_writes_its_input():
    model = [nn.ReLU, partial(nn.Linear, 4, 8), nn.ReLU, partial(nn.Linear, 8, 3)]
    writing = [partial(nn.ReLU, inplace=True), model[1], partial(nn.ReLU, inplace=True), model[3]]
    x = X.clone()
    pipe, plain = pipeline(writing), pipeline(model)
    assert [pipe.step((x, Y)) for _ in range(3)] == [plain.step((x, Y)) for _ in range(3)]
    assert torch.equal(x, X), "the user's batch is left alone"


def test_running_statistics_count_a_recomputed_microbatch_once():
    """Batch normalisation sees each microbatch twice where activations are recomputed."""

    def statistics(schedule):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        pipe = Pipeline(
            model, nn.functional.mse_loss, training=Training(SGD), num_workers=2, num_microbatches=4,
            schedule=schedule, schedule_options={"b_order": "ascending"},
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            pipe.step((torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)))
        return pipe.weights.state_dict()

    found, expected = statistics("gpipe-recompute"), statistics("gpipe")
    assert found["1.num_batches_tracked"] == 8
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_groups_of_parameters_are_made_by_name():
    """No decay for biases, as in one process: torch's optimizers take the pairs as they are."""

    def groups(named):
        decayed = [(name, parameter) for name, parameter in named if not name.endswith("bias")]
        others = [(name, parameter) for name, parameter in named if name.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1, weight_decay=0.5
        )

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=1, num_workers=2, training=Training(groups))
    optimizer = groups(list(whole.named_parameters()))
    x = torch.randn(6, 4)
    for _ in range(3):
        pipe.step((x, x))
        nn.functional.mse_loss(whole(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for actor in pipe.actors for s in actor.shards.values() for name, _ in s.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in pipe.weights.state_dict().items())


class Deep(nn.Module):
    """Notes how deep it is called; raises if told."""

    def __init__(self):
        super().__init__()
        self.linear, self.frames, self.raises = nn.Linear(8, 8), [], False

    def forward(self, x):
        if self.raises:
            raise ArithmeticError("mine")
        ours = Path(rpc_pipe.__file__).resolve().parent
        files = [Path(frame.filename).resolve() for frame in traceback.extract_stack()]
        self.frames.append(sum(bool({ours, ours.parent / "workers"} & set(file.parents)) for file in files))
        return self.linear(x)


def test_few_of_our_frames_lie_between_a_step_and_the_users_layer():
    """There were 16, which made tracebacks and profiles of a user's own layer hard to read."""
    layer = Deep()
    with Pipeline([layer], nn.functional.mse_loss, num_microbatches=2) as pipe:
        pipe.step((torch.randn(4, 8), torch.randn(4, 8)))
    assert max(layer.frames) <= 9


def test_a_stream_that_breaks_off_is_as_it_was_until_it_is_abandoned(monkeypatch):
    """An error abandoned it at once, so nobody could see which of its steps stand."""
    layer, seen = Deep(), []
    with Pipeline([layer], nn.functional.mse_loss, num_microbatches=2) as pipe:
        batch, (actor,) = (torch.randn(4, 8), torch.randn(4, 8)), pipe.actors
        expected = pipe.evaluate(batch)
        monkeypatch.setattr(actor, "keeps_broken", True)
        monkeypatch.setattr(actor, "resume", lambda *how: seen.append(len(actor.broken._steps)) or resume(*how))
        resume, layer.raises = type(actor).resume.__get__(actor), True
        with pytest.raises(WorkerFailure):
            pipe.step(batch)
        layer.raises = False
        assert seen == [1] and actor.broken is None and pipe.evaluate(batch) == expected
