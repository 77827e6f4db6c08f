"""Schedules whose forwards overtake updates: what is trained is what the declared versions say, at any timing."""

from functools import partial

import pytest
import torch
from refusals import failed, refused
from replayed import ASYNCHRONOUS, Late, X, decaying, most_copies, pipeline, replay_of, same
from small_models import LAYERS, NORMED
from test_transparency import verdict
from torch import nn

from bench.replaying import held_out
from rpc_pipe.dependency import B, U, WorkerFailure
from rpc_pipe.dependency.earlier_steps import most_open, staleness
from rpc_pipe.model.batches.microbatches import update_shares
from rpc_pipe.schedules import OneFOneB, PipeDream, PipeDream2BW


@pytest.mark.parametrize(("P", "M"), [(2, 5), (4, 1)])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_identical_to_a_replay_in_one_process(monkeypatch, schedule, P, M):
    for order in ("ready", "fixed"):
        report = verdict(monkeypatch, 6, schedule=schedule, num_workers=P, num_microbatches=M, order=order, model="mlp")
        assert report["identical"] and report["max_abs_error"] == 0, report


@pytest.mark.parametrize(
    ("schedule", "options", "model"),
    [
        *[("pipedream", {"vertical_sync": "true"}, "gpt"), ("pipedream", {"window": "6"}, "conv")],
        ("avgpipe", {"pipelines": "3"}, "gpt"),
        *zip(ASYNCHRONOUS, [{}] * 3, ["conv", "gpt", "conv"], strict=True),
    ],
)
def test_other_models_and_parameters(monkeypatch, schedule, options, model):
    report = verdict(
        monkeypatch, 5, schedule=schedule, schedule_options=options, model=model, num_workers=3, num_microbatches=4
    )
    assert report["identical"], report


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_random_delays_change_nothing(schedule):
    """In both orders. `bench/delays.py` tries a thousand."""
    for seed in range(4):
        pipe = pipeline(schedule, P=3, M=seed % 2 + 2, order=("ready", "fixed")[seed // 2 % 2])
        pipe.listen(lambda worker, seed=seed: Late(seed, worker, 0.004))
        found = list(pipe.train((x, x) for x in X[:5]))
        replay = replay_of(pipe)
        assert found == list(replay.train((x, x) for x in X[:5]))
        assert same(pipe.weights.state_dict(), replay.state_dict())
        pipe.close()


@pytest.mark.parametrize("layers, rows", [(NORMED, [10] * 6), (LAYERS, [10, 8, 8, 2, 2, 10, 3, 10, 4])])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_buffers_learning_rates_and_ragged_batches(schedule, layers, rows):
    """Batches of fewer rows than microbatches, in the middle and at the end, each begin another stream."""
    pipe = pipeline(schedule, layers, P=3, lr_scheduler=decaying)
    batches = [(x[:count], x[:count]) for x, count in zip(X, rows, strict=False)]
    replay = replay_of(pipe, layers, lr_scheduler=decaying)
    assert list(pipe.train(batches)) == list(replay.train(batches))
    assert same(pipe.weights.state_dict(), replay.state_dict())


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_gradients_are_clipped_by_what_belongs_to_one_version(schedule):
    layers = [layer for layer in LAYERS if not isinstance(layer, partial) or layer.func is not nn.Dropout]
    for order in ("ready", "fixed"):
        pipe = pipeline(schedule, layers, P=3, max_grad_norm=0.05, order=order)
        replay = replay_of(pipe, layers, max_grad_norm=0.05)
        assert list(pipe.train((x, x) for x in X)) == list(replay.train((x, x) for x in X))
        assert same(pipe.weights.state_dict(), replay.state_dict())
        assert (pipe.grad_norm is None) == (schedule != "pipedream-2bw"), "of the whole model, or of each stage"


def test_norms_of_a_step_may_be_collected_before_the_step_before_has_updated():
    """They were of the gradients that the earlier update had still to take, which then took those of the later one."""
    layers = [partial(nn.Linear, 8, 8)] * 4
    for seed in range(6):
        pipe = pipeline("pipedream-2bw", layers, P=4, M=1, max_grad_norm=0.05)
        pipe.listen(lambda worker, seed=seed: Late(seed, worker, 0.002))
        replay = replay_of(pipe, layers, max_grad_norm=0.05)
        assert list(pipe.train((x, x) for x in X)) == list(replay.train((x, x) for x in X))
        assert same(pipe.weights.state_dict(), replay.state_dict())


class AtRest(nn.Linear):
    """A running number that its first forwards write as it was, as averages do that have converged."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("start", self.weight.detach().clone())
        self.register_buffer("moved", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.moved.mul_(0.9).add_((self.weight.detach() - self.start).abs().max() > 0.025)  # not in two steps
        return super().forward(x) * (1 + self.moved)


def test_the_loop_sees_one_version_on_all_workers():
    """Weights, buffers and a held-out loss after each step, with later steps under way; what is begun is undone."""
    resting = [NORMED[0], AtRest, *NORMED[1:]]
    for schedule, layers in (("pipedream", NORMED), ("pipedream-2bw", resting), ("avgpipe", LAYERS)):
        pipe = pipeline(schedule, layers, P=4, M=2)
        pipe.listen(lambda worker: Late(3, worker, 0.003))
        replay = replay_of(pipe, layers)
        expected = replay.train((x, x) for x in X)
        for step, (loss, other) in enumerate(zip(pipe.train((x, x) for x in X), expected, strict=True)):
            assert loss == other
            assert same(pipe.weights.state_dict(), replay.state_dict()), (schedule, step)
            assert pipe.evaluate((X[-1], X[-1])) == pytest.approx(held_out(replay, X[-1], X[-1]), rel=1e-6)
            if step == 6:
                break
        state = pipe.weights.state_dict()
        assert same(state, replay.state_dict()) and pipe.evaluate((X[0], X[0])) == pipe.evaluate((X[0], X[0]))
        assert all(len(actor.carrier.outbox) == 0 for actor in pipe.actors)
        assert len(list(pipe.train((x, x) for x in X[7:]))) == 5


def test_flush_completes_what_has_been_begun():
    pipe, twin = pipeline("pipedream-2bw", P=3, M=3), pipeline("pipedream-2bw", P=3, M=3)
    losses = []
    for loss in pipe.train((x, x) for x in X):
        losses.append(loss)
        if len(losses) == 2:
            pipe.flush()
            flushed = pipe.weights.state_dict()
    ahead = most_open(pipe.spec) - 1
    first = [loss for loss in twin.train((x, x) for x in X[: 2 + ahead])]
    assert first == losses[: 2 + ahead] and same(flushed, twin.weights.state_dict())
    assert losses[2 + ahead :] == list(twin.train((x, x) for x in X[2 + ahead :])), "in an empty pipe"


def test_a_step_is_a_stream_of_length_one():
    """Filled and drained: of 2BW that is 1F1B with its flush."""
    found = [pipeline(schedule, P=3) for schedule in ("pipedream-2bw", "1f1b", "pipedream")]
    losses = [[pipe.step((x, x)) for x in X[:4]] for pipe in found]
    assert losses[0] == losses[1] != losses[2]
    assert same(found[0].weights.state_dict(), found[1].weights.state_dict())
    replay = replay_of(found[2])
    assert losses[2] == [next(replay.train([(x, x)])) for x in X[:4]]


def test_sums_are_divided_by_what_their_update_takes():
    def summed(output, target):
        return ((output - target) ** 2).sum(), float(target.numel())

    layers = [partial(nn.Linear, 8, 8)] * 4
    for schedule in ASYNCHRONOUS:
        sums, means = pipeline(schedule, layers, summed), pipeline(schedule, layers)
        batches = [(x, x) for x in X[:5]]
        assert list(sums.train(batches)) == pytest.approx(list(means.train(batches)), rel=1e-5)


class Read(list):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_shares_of_many_updates_are_told_in_as_few_passes_as_those_of_few():
    """Each update looked at all microbatches: with 10,000 of them that took 5 s a step on every worker."""
    times = []
    for count in (2, 50):
        shares = Read([1 / count] * count)
        assert update_shares(PipeDream(num_workers=2, num_microbatches=count), shares) == [1.0] * count
        times.append(shares.times)
    assert times[0] == times[1]
    assert update_shares(PipeDream2BW(num_workers=2, num_microbatches=2), [0.75, 0.25]) is None


def test_a_version_that_is_gone_is_noticed():
    """At run time too: edges that do not keep a version would train something else."""
    pipe = pipeline("pipedream", P=2)
    versions = pipe.actors[0].shards[0, 0].versions
    list(pipe.train([(X[0], X[0])]))
    versions.newest = 5
    with refused("stage"):
        versions.used(2)


def test_hooks_of_gradients_are_refused():
    pipe = pipeline("pipedream")
    pipe.actors[0].shards[0, 0].parameters()[0].register_hook(lambda grad: grad)
    with refused("stage", WorkerFailure):
        list(pipe.train([(X[0], X[0])]))


def test_after_an_error_the_pipeline_goes_on():
    class Fails(nn.Module):
        def forward(self, x):
            if fails:
                raise ArithmeticError("no")
            return x

    fails = False
    pipe = pipeline("pipedream-2bw", [*LAYERS, Fails])
    stream = pipe.train((x, x) for x in X)
    assert next(stream) > 0
    fails = True
    with failed(ArithmeticError):
        list(stream)
    fails = False
    assert len(list(pipe.train((x, x) for x in X[:3]))) == 3


class TwoLate(OneFOneB):
    """Of docs/asynchronous.md."""

    synchronous = False

    def version(self, stage, microbatch):
        return max(0, microbatch // self.num_microbatches - 2)

    def slot(self, a):
        last = B(a.stage, (a.index + 1) * self.num_microbatches - 1)
        return 2 * super().slot(last) + 1 if a.kind is U else 2 * super().slot(a)


def test_a_schedule_of_ones_own():
    pipe = pipeline(TwoLate, P=3)
    replay, most = replay_of(pipe), most_copies(pipe)
    assert list(pipe.train((x, x) for x in X)) == list(replay.train((x, x) for x in X))
    assert most == [3, 3, 3]
    assert [staleness(pipe.spec, stage) for stage in range(3)] == [2, 2, 2]


def test_a_stop_ends_the_stream_after_the_same_step_everywhere():
    pipe = pipeline("pipedream", P=4, M=2)
    done = []
    for loss in pipe.train((x, x) for x in X):
        done.append(loss)
        if len(done) == 2:
            pipe.request_stop()
    assert pipe.stopped and 2 < len(done) < 2 + most_open(pipe.spec) + 1
    replay = replay_of(pipe)
    assert done == [loss for _, loss in zip(done, replay.train((x, x) for x in X), strict=False)]
    assert same(pipe.weights.state_dict(), replay.state_dict())


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_was_never_stopped(schedule, tmp_path):
    """No step is under way where a checkpoint is written, so both begin another stream there."""
    batches = [(x, x) for x in X[:9]]
    pipe, replay = pipeline(schedule, P=3, lr_scheduler=decaying), None
    pipe.checkpoints.every(3, tmp_path)
    losses, state = list(pipe.train(batches)), pipe.weights.state_dict()
    replay = replay_of(pipe, lr_scheduler=decaying)
    pipe.close()
    assert losses == [loss for at in (0, 3, 6) for loss in replay.train(batches[at : at + 3])]
    assert same(state, replay.state_dict())
    for step in (3, 6):
        workers = 2 if schedule == "pipedream-2bw" else 3  # the others' versions depend on it
        again = pipeline(schedule, P=workers, lr_scheduler=decaying)
        again.checkpoints.load(tmp_path / f"step-{step:08}")
        again.checkpoints.every(3, tmp_path / "again")
        assert list(again.train(batches[step:])) == losses[step:]
        assert same(again.weights.state_dict(), state)
        again.close()


@pytest.mark.parametrize("P", [1, 2])
def test_what_avgpipe_evaluates_is_what_it_saves(P, tmp_path):
    """Half of the microbatches met the running means of the second pipeline."""
    pipe, alone = pipeline("avgpipe", NORMED, P=P), pipeline("1f1b", NORMED, P=1)
    list(pipe.train([(x, x) for x in X[:3]]))
    pipe.checkpoints.save(tmp_path)
    alone.checkpoints.load(tmp_path)
    assert pipe.evaluate((X[3], X[3])) == alone.evaluate((X[3], X[3]))


def test_a_checkpoint_keeps_every_pipeline_and_what_they_are_pulled_to(tmp_path):
    """It kept the first one's weights, under the names of those that are evaluated, and the others began as it was."""
    pipe = pipeline("avgpipe", P=2)
    list(pipe.train((x, x) for x in X[:4]))
    pipe.checkpoints.save(tmp_path)
    state, held_out = pipe.weights.state_dict(), pipe.evaluate((X[-1], X[-1]))
    own = [shard.state_dict() for actor in pipe.actors for shard in actor.shards.values()]
    assert not same(own[0], {name: state[name] for name in own[0]}), "the first one is not the reference"
    again, three, other = (
        pipeline("avgpipe", P=2),
        pipeline("avgpipe", schedule_options={"pipelines": 3}),
        pipeline("1f1b"),
    )
    for each in (again, three, other):
        each.checkpoints.load(tmp_path)
        assert same(each.weights.state_dict(), state) and each.evaluate((X[-1], X[-1])) == held_out
    found = [shard.state_dict() for actor in again.actors for shard in actor.shards.values()]
    assert all(same(first, second) for first, second in zip(own, found, strict=True))
    for actor in three.actors:
        for shard in actor.shards.values():
            assert same(shard.state_dict(), state), "another number of them begins at the reference"
    assert len(list(three.train((x, x) for x in X[:2]))) == len(list(other.train((x, x) for x in X[:2]))) == 2


class Sequenced(nn.Module):
    """Its layer computes by a list of weights of its own."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class Listed(nn.Module):
    """Computes by a plain list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.weights = [self.weight]

    def forward(self, x):
        return x @ self.weights[0]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_recurrent_layers_use_the_declared_version_and_train(schedule):
    """They kept using the newest weights, and their gradients were lost."""
    layers = [partial(nn.Linear, 8, 8), Sequenced, Sequenced]
    pipe = pipeline(schedule, layers, P=3)
    before = pipe.weights.state_dict()["1.cell.weight_hh_l0"].clone()
    replay = replay_of(pipe, layers)
    assert list(pipe.train((x, x) for x in X[:5])) == list(replay.train((x, x) for x in X[:5]))
    state = pipe.weights.state_dict()
    assert same(state, replay.state_dict()) and not torch.equal(before, state["1.cell.weight_hh_l0"])


class Exchanging(nn.Module):
    """Its two layers change places in every forward."""

    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            self.near, self.far = self.far, self.near
        return self.near(x).tanh() + self.far(x) / 2


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_layers_that_change_places_keep_their_versions_and_their_reference(schedule):
    """AvgPipe pulled each pipeline to the weights that had the name when it began, not to those of the layer."""
    layers = [Exchanging, Exchanging]
    pipe = pipeline(schedule, layers, P=2, schedule_options={"pipelines": 3} if schedule == "avgpipe" else {})
    replay = replay_of(pipe, layers)
    for x in X[:3]:  # a stream each
        assert pipe.step((x, x)) == next(replay.train([(x, x)]))
    assert list(pipe.train((x, x) for x in X[:3])) == list(replay.train((x, x) for x in X[:3]))
    assert same(pipe.weights.state_dict(), replay.state_dict())


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_weights_that_are_not_asked_of_their_module_have_their_versions_too(schedule):
    """They were refused: versions were other parameters, which such a layer did not find."""
    layers = [partial(nn.Linear, 8, 8), Listed]
    pipe = pipeline(schedule, layers, P=2)
    replay = replay_of(pipe, layers)
    assert list(pipe.train((x, x) for x in X[:5])) == list(replay.train((x, x) for x in X[:5]))
    assert same(pipe.weights.state_dict(), replay.state_dict())
