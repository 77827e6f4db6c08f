"""A loader in a pipeline: who reads what, and where it is after which step."""

import copy
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from refusals import failed, refused
from threads_as_processes import each_worker
from torch import nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.boards.own_boards import collect, record
from rpc_pipe.data import Loader, dataset, tokens
from rpc_pipe.model.batches.own_rows import read_microbatches
from rpc_pipe.tracing.run_summary import figures


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 50)

    def forward(self, x):
        return self.linear(x).flatten(0, 1)


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits, targets.flatten())


def pipeline(workers=2):
    layers = [partial(nn.Embedding, 50, 8), nn.Tanh, Last]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Pipeline(layers, loss_fn, training=Training(optimizer), num_microbatches=3, num_workers=workers)


@pytest.fixture
def loader(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", rng.integers(50, size=61, dtype=np.uint16))
    return lambda **options: Loader(tokens(tmp_path, 4), **{"rows": 8, "epochs": 1, **options})


def test_the_same_losses_as_from_batches_in_hand(loader):
    with pipeline() as pipe, pipeline() as other, pipeline(1) as third:
        losses = list(pipe.train(loader()))
        assert losses == [other.step((inputs, targets)) for inputs, targets in loader()]
        assert losses == [third.step(batch) for batch in loader()]
        assert pipe.evaluate(next(iter(loader()))) == other.evaluate(tuple(next(iter(loader()))))


def test_the_position_is_that_of_the_last_step_not_of_what_was_read_ahead(loader):
    batches = loader()
    with pipeline() as pipe:
        for number, _ in enumerate(pipe.train(batches)):
            assert batches.position == 8 * (number + 1)
            if number == 2:
                break
        assert batches.state_dict()["position"] == 24
        for batch in batches:
            assert batch.samples.tolist() == loader().samples(24, 32).tolist()
            pipe.step(batch)
            assert batches.position == 32
            break


def test_a_step_that_fails_does_not_count(loader):
    batches = loader()
    with pipeline() as pipe:
        first = iter(batches)
        pipe.step(next(first))
        failing = Pipeline([nn.Identity], lambda output, target: 1 / 0, num_microbatches=1)
        with failed(ZeroDivisionError):
            failing.step(next(first))
        assert batches.position == 8


def cut_of(batch, used):
    return read_microbatches(batch, batch.read(*used), 3)


@pytest.mark.parametrize("used", [(True, False), (False, True), (False, False)])
def test_what_a_worker_does_not_use_is_not_read(loader, used):
    batches = loader()
    cut = cut_of(next(iter(batches)), used)
    assert [part is not None for part in (cut.inputs[0], cut.targets[0])] == list(used)
    assert len(cut.inputs) == len(cut.targets) == 3 and cut.rows == 8
    assert cut.shares == [3 / 8, 3 / 8, 2 / 8]
    if used == (False, False):
        assert batches.loads == 0


class Slow:
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.006)  # so that on a busy machine, too, nothing else is waited for as long
        return torch.zeros(8), index % 3


@pytest.mark.parametrize("how", ["step", "train"])
def test_waiting_for_samples_is_told_with_its_cause(how):
    layers = [partial(nn.Linear, 8, 4), nn.Tanh, partial(nn.Linear, 4, 3)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with Pipeline(
        layers, nn.functional.cross_entropy, training=Training(optimizer), num_microbatches=2, num_workers=2
    ) as pipe:
        record(pipe)
        batches = Loader(dataset(Slow()), rows=16)
        losses = pipe.train(batches) if how == "train" else map(pipe.step, batches)
        for _ in zip(range(8), losses, strict=False):
            pass
        lost = figures(collect())["lost"]
    assert lost["data_cause"] == "decode" and lost["data_ms"] > 10
    assert "for samples to be decoded" in lost["sentence"]


def test_workers_compare_where_their_loaders_are(loader):
    told = {
        cut_of(batch, used).described for used in ((True, False), (False, False)) for batch in [next(iter(loader()))]
    }
    assert len(told) == 1
    batches = iter(loader())
    next(batches)
    told |= {cut_of(next(batches), (False, False)).described}
    told |= {cut_of(next(iter(loader(seed=1))), (False, False)).described}
    assert len(told) == 3


@pytest.mark.parametrize("how", ["step", "train"])
def test_a_script_is_not_resumed_on_other_data(loader, tmp_path, how):
    """Batches that are behind are not read, so what has changed of them was not seen."""

    def script(pipe, batches):
        return list(pipe.train(batches) if how == "train" else map(pipe.step, batches))

    with pipeline() as pipe:
        pipe.checkpoints.every(3, tmp_path / "checkpoints")
        losses = script(pipe, loader())
    for other in ({"seed": 1}, {"rows": 4}):
        with pipeline() as pipe:
            pipe.checkpoints.resume(tmp_path / "checkpoints")
            with refused("--resume"):
                script(pipe, loader(**other))
    with pipeline(3) as pipe:
        pipe.checkpoints.resume(tmp_path / "checkpoints")
        assert script(pipe, loader())[-1] == losses[-1]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Last()])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("readers", ["users", "first"])
def test_of_a_whole_model_all_workers_read_unless_one_reads_for_all(monkeypatch, loader, readers):
    torch.manual_seed(0)
    model = Small()

    def train(worker, **options):
        epochs = 1 if readers == "users" else None
        batches = loader(readers=readers, epochs=epochs)
        with Pipeline(copy.deepcopy(model), loss_fn, num_microbatches=3, **options) as pipe:
            losses = [pipe.evaluate(batch) for batch, _ in zip(batches, range(4), strict=False)]
            found = losses, batches.loads > 0
            batches.close()
        return found

    expected, _ = train(3, num_workers=3)
    found = each_worker(monkeypatch, train)
    assert [losses for losses, _ in found] == [expected] * 3
    assert [reads for _, reads in found] == ([True] * 3 if readers == "users" else [True, False, False])


class Marked:
    """Samples that note which of them are read."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return 28

    def __getitem__(self, index):
        self.read.add(index)
        return torch.full((4,), index % 50), torch.full((4,), index % 7)


@pytest.mark.parametrize("whole", [False, True])
def test_each_replica_reads_its_rows(monkeypatch, whole):
    """Microbatch m is of replica m % 2; the last batch has fewer rows than a step has microbatches."""
    torch.manual_seed(0)
    model = Small()
    layers = [partial(nn.Embedding, 50, 8), nn.Tanh, partial(nn.Linear, 8, 8), Last]
    building, built = threading.Lock(), threading.Barrier(4)

    def train(worker, **options):
        samples = Marked()
        optimizer = partial(torch.optim.SGD, lr=0.1)
        with building:  # one after the other, as threads share the generators that processes have for themselves
            batches = Loader(dataset(samples), rows=12, epochs=1, shuffle=False)
            given = copy.deepcopy(model) if whole else layers
            pipe = Pipeline(given, loss_fn, training=Training(optimizer), num_microbatches=5, replicas=2, **options)
        if not options:
            built.wait()
        with pipe:
            losses = [pipe.step(batch) for batch in batches]
            batches.close()
        return losses, samples.read

    expected, _ = train(4, num_workers=4)
    found = each_worker(monkeypatch, train, 4)
    assert [losses for losses, _ in found] == [expected] * 4
    first = {*range(3), 6, 7, 10, 11, *range(12, 15), 18, 19, 22, 23, 24, 26}
    second = {*range(3, 6), 8, 9, *range(15, 18), 20, 21, 25, 27}
    for (_, read), own in zip(found, [first, second] * 2, strict=True):
        # The first batch of a whole model, which is cut with it, is read whole, and so is what is read ahead of it.
        assert read >= own if whole else read - {0} == own - {0}
