"""A loader of rows of different lengths, in a pipeline."""

import copy
import threading
from functools import partial

import pytest
import torch
from threads_as_processes import each_worker
from torch import nn

from rpc_pipe import BatchError, ConfigError, Pipeline, Training
from rpc_pipe.data import Loader, dataset, tokens
from rpc_pipe.model.batches.own_rows import LengthNeeds, OwnRows
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.transport.payload import tensors_of

WORDS, WIDTH = 11, 8
LENGTHS = [3, 9, 4, 4, 2, 7, 5, 3, 6, 2, 8, 4]
SGD = partial(torch.optim.SGD, lr=0.1)


class Rows:
    """Rows whose first labels do not count, as those of a prompt; it notes which are read."""

    def __init__(self, named=False):
        self.named, self.read = named, set()

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        self.read.add(index)
        row = torch.arange(LENGTHS[index]) * (index + 1) % WORDS
        labels = [-100] * (LENGTHS[index] // 3) + row[LENGTHS[index] // 3 :].tolist()
        return {"input_ids": row.tolist(), "labels": labels} if self.named else (row, torch.tensor(labels).roll(-1))


def loader(samples=None, **options):
    named = {"inputs": ["input_ids"], "targets": ["labels"]} if samples and samples.named else {}
    source = dataset(samples or Rows(), **named)
    return Loader(source, **{"rows": 6, "epochs": 2, "lengths": LENGTHS, "most_tokens": 16, **options})


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS), Classes()
    )


class Classes(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Predicts(nn.Module):
    """Predicts the next word, and returns the mean of its losses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(layers()[:4])

    def forward(self, input_ids, attention_mask, labels):
        assert attention_mask.shape == input_ids.shape
        for block in self.blocks:
            input_ids = block(input_ids)
        return {"loss": nn.functional.cross_entropy(input_ids[:, :-1].transpose(1, 2), labels[:, 1:])}


def trained_alone(model, loss, batches):
    """Return the losses and weights of a model that is trained on whole batches."""
    optimizer, losses = SGD(model.parameters()), []
    for batch in batches:
        found = loss(model, *batch)
        losses.append(found.item())
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    return losses, model.state_dict()


def same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 4, "replicas": 2}])
def test_a_whole_model_that_returns_a_mean_gets_the_gradient_of_the_batch(options):
    expected = trained_alone(Predicts(), lambda model, x, y: model(**x, **y)["loss"], loader(Rows(named=True)))
    with Pipeline(
        Predicts(), training=Training(SGD), num_microbatches=2, microbatch_order="balanced", **options
    ) as pipe:
        same((list(pipe.train(loader(Rows(named=True)))), pipe.weights.state_dict()), expected)


def test_a_worker_in_the_middle_of_layers_reads_nothing_and_knows_the_order(monkeypatch):
    expected = trained_alone(layers(), lambda model, x, y: nn.functional.cross_entropy(model(x), y), loader())
    building, built = threading.Lock(), threading.Barrier(3)

    def train(worker):
        rows = Rows()
        with building:  # one after the other, as threads share the generators that processes have for themselves
            batches, model = loader(rows), copy.deepcopy(layers())
            pipe = Pipeline(
                model,
                nn.functional.cross_entropy,
                training=Training(SGD),
                num_microbatches=2,
                microbatch_order="balanced",
            )
        built.wait()
        with pipe:
            return (list(pipe.train(batches)), pipe.weights.state_dict()), len(rows.read)

    found = each_worker(monkeypatch, train)
    same(found[0][0], expected)
    assert [count for _, count in found] == [12, 1, 12]


@pytest.mark.parametrize("named", [False, True])
def test_a_member_reads_its_rows_alone_and_has_the_microbatches_of_the_whole_batch(named):
    """Each member read the labels of all rows, by which its microbatches weigh, and with them the rows."""
    spec, shift = make_spec("1f1b", 2, 4, {}), int(named)
    counted = [sum(label != -100 for label in list(Rows(named=True)[i]["labels"])[shift:]) for i in range(12)]
    counted = counted if named else [length - length // 3 for length in LENGTHS]
    needs = LengthNeeds(spec.num_stages, 2, 2, named)

    def read(own, **options):
        rows = Rows(named)
        batches = loader(rows, epochs=1, **options)
        rows.read.clear()
        return [b.grouped((True, True), lambda pair: pair, needs, own) for b in batches], rows.read

    whole, _ = read(None)
    parts = [read(OwnRows(spec, 0, member, 2), counted=counted) for member in range(2)]
    assert parts[0][1] & parts[1][1] <= {0} and len(parts[0][1] | parts[1][1]) == 12, (
        "the first shows whether rows draw"
    )
    for member, (found, _) in enumerate(parts):
        for one, other in zip(found, whole, strict=True):
            assert one.shares == other.shares and one.described == other.described
            sides = [(each.inputs[member::2], each.targets[member::2]) for each in (one, other)]
            mine, theirs = map(list, map(tensors_of, sides))
            assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def test_replicas_read_their_rows_alone_where_labels_are_counted(monkeypatch):
    """A step has the bits of one for which each replica reads the whole batch."""
    building, counted = threading.Lock(), [length - length // 3 for length in LENGTHS]

    def train(worker, built, **options):
        rows = Rows()
        with building:
            batches, model = loader(rows, epochs=1, rows=12, **options), copy.deepcopy(layers())
            pipe = Pipeline(model, nn.functional.cross_entropy, training=Training(SGD), num_microbatches=2, replicas=2)
        built.wait()
        with pipe:
            return list(pipe.train(batches)), pipe.weights.state_dict(), len(rows.read)

    every = each_worker(monkeypatch, partial(train, built=threading.Barrier(4)), 4)
    own = each_worker(monkeypatch, partial(train, built=threading.Barrier(4), counted=counted), 4)
    assert [found[0] for found in own] == [found[0] for found in every]
    assert all(torch.equal(tensor, own[0][1][name]) for name, tensor in every[0][1].items())
    assert [found[2] for found in every] == [12] * 4 and max(found[2] for found in own) < 12


@pytest.mark.parametrize("counted, error", [([2] * 12, BatchError), ([1], ConfigError)])
def test_labels_that_are_counted_otherwise_are_refused(counted, error):
    with Pipeline(layers(), nn.functional.cross_entropy, num_microbatches=2, num_workers=2) as pipe:
        with pytest.raises(error):
            pipe.step(next(iter(loader(counted=counted))))


def test_a_run_goes_on_where_it_was(tmp_path):
    def losses(batches, **options):
        with Pipeline(
            layers(), nn.functional.cross_entropy, training=Training(SGD), num_microbatches=2, **options
        ) as pipe:
            pipe.checkpoints.every(2, tmp_path)
            return list(pipe.train(batches))

    expected = losses(loader(epochs=1), num_workers=2)
    with Pipeline(
        layers(), nn.functional.cross_entropy, training=Training(SGD), num_microbatches=2, num_workers=2
    ) as pipe:
        pipe.checkpoints.resume(tmp_path)
        found = list(pipe.train(loader(most_tokens=20)))
    assert found[1] == expected[1] and len(found) == 4


def test_evaluation_weighs_labels_and_has_no_outputs():
    (batch,) = loader(rows=12, epochs=1)
    model = layers()
    expected = nn.functional.cross_entropy(model(batch[0]), batch[1])
    with Pipeline(model, nn.functional.cross_entropy, num_microbatches=2, num_workers=2) as pipe:
        assert pipe.evaluate(batch) == pytest.approx(expected.item())
        with pytest.raises(BatchError):
            pipe.predict(batch)


def test_lengths_that_cannot_be(tmp_path):
    torch.zeros(64, dtype=torch.uint8).numpy().tofile(tmp_path / "a.u8")
    for wrong in (
        {"lengths": LENGTHS[1:]},
        {"lengths": None},
        {"most_tokens": 8},
        {"readers": "first", "epochs": None},
    ):
        with pytest.raises(ConfigError):
            loader(**wrong)
    with pytest.raises(ConfigError):
        Loader(tokens(tmp_path, 4), rows=2, lengths=[4] * 12, most_tokens=16)
    with pytest.raises(BatchError):
        next(iter(loader(lengths=[length + 1 for length in LENGTHS])))[0]
