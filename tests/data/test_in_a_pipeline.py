"""A loader in a pipeline: who reads what, and where it is after which step."""

import copy
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import rpc_pipe.pipeline
from rpc_pipe import Pipeline
from rpc_pipe.data import Loader, dataset, tokens
from rpc_pipe.dependency import ConfigError
from rpc_pipe.launching.job import Job
from rpc_pipe.model import observing
from rpc_pipe.model.hollow import NeedsField
from rpc_pipe.model.microbatches import Microbatches
from rpc_pipe.model.observed import observe
from rpc_pipe.tracing.outcome import figures
from rpc_pipe.tracing.own_boards import collect, record
from rpc_pipe.workers.transport.local import local_carriers


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
    return Pipeline(layers, loss_fn, optimizer=optimizer, num_microbatches=3, num_workers=workers)


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
        with pytest.raises(Exception, match="division by zero"):
            failing.step(next(first))
        assert batches.position == 8


@pytest.mark.parametrize("used", [(True, False), (False, True), (False, False)])
def test_what_a_worker_does_not_use_is_not_read(loader, used):
    batches = loader()
    cut = Microbatches.of(next(iter(batches)), None, 3, 0, used)
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
    with Pipeline(layers, nn.functional.cross_entropy, optimizer=optimizer, num_microbatches=2, num_workers=2) as pipe:
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
        Microbatches.of(batch, None, 3, 0, used).described
        for used in ((True, False), (False, False))
        for batch in [next(iter(loader()))]
    }
    assert len(told) == 1
    batches = iter(loader())
    next(batches)
    told |= {Microbatches.of(next(batches), None, 3, 0, (False, False)).described}
    told |= {Microbatches.of(next(iter(loader(seed=1))), None, 3, 0, (False, False)).described}
    assert len(told) == 3


@pytest.mark.parametrize("how", ["step", "train"])
def test_a_script_is_not_resumed_on_other_data(loader, tmp_path, how):
    """Batches that are behind are not read, so what has changed of them was not seen."""

    def script(pipe, batches):
        return list(pipe.train(batches) if how == "train" else map(pipe.step, batches))

    with pipeline() as pipe:
        pipe.checkpoint_every(3, tmp_path / "checkpoints")
        losses = script(pipe, loader())
    for other in ({"seed": 1}, {"rows": 4}):
        with pipeline() as pipe:
            pipe.resume(tmp_path / "checkpoints")
            with pytest.raises(
                ConfigError, match=r"the last step before the checkpoint was of samples 40-47 in the order"
            ):
                script(pipe, loader(**other))
    with pipeline(3) as pipe:
        pipe.resume(tmp_path / "checkpoints")
        assert script(pipe, loader()) == losses


class Columns(dict):
    """A sample that counts which of its fields are read."""

    def __init__(self, read, **fields):
        super().__init__(fields)
        self.read = read

    def __getitem__(self, key):
        self.read[key] += 1
        return super().__getitem__(key)


class Samples:
    def __init__(self, make, count=24):
        self.read = Counter()
        generator = torch.Generator().manual_seed(0)
        self.samples = [make(generator) for _ in range(count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return Columns(self.read, **self.samples[index])


def each_worker(monkeypatch, work, workers=3):
    """Return what `work(worker)` returns on every worker of a job, each with a pipeline of its own, as threads."""
    carriers, here = local_carriers(workers), threading.local()
    monkeypatch.setattr(observing, "_eager", nullcontext)  # what it sets is of all threads
    monkeypatch.setattr(rpc_pipe.pipeline.link, "attach", lambda pipe: None)  # a process has one board
    monkeypatch.setattr(rpc_pipe.pipeline, "own_part", lambda *said: (here.job, workers))
    monkeypatch.setattr(rpc_pipe.pipeline, "join", lambda job: carriers[job.worker])
    found, failed = {}, []

    def run(worker):
        here.job = Job(worker, workers, "", "")
        try:
            found[worker] = work(worker)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return [found[worker] for worker in range(workers)]


def ids(generator):
    return torch.randint(1, 50, (6,), generator=generator)


def mask(generator):
    return (torch.arange(6) < torch.randint(3, 7, (), generator=generator)).long()


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=50, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, n_positions=8, **small)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    config = transformers.T5Config(
        vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


FIELDS = {
    "gpt2": (["input_ids"], lambda g: {"input_ids": ids(g), "labels": ids(g)}, [["input_ids"], [], ["labels"]]),
    "bert": (
        ["input_ids", "token_type_ids", "attention_mask"],
        lambda g: {
            "input_ids": ids(g), "token_type_ids": ids(g) % 2, "attention_mask": mask(g), "labels": ids(g)[0] % 2,
        },
        [["attention_mask", "input_ids", "token_type_ids"], ["attention_mask"], ["attention_mask", "labels"]],
    ),
    "t5": (
        ["input_ids", "attention_mask", "decoder_input_ids"],
        lambda g: {
            "input_ids": ids(g), "attention_mask": mask(g), "decoder_input_ids": ids(g), "labels": ids(g),
        },
        [  # the first stage ends with the encoder, and embeds for the decoder
            ["attention_mask", "decoder_input_ids", "input_ids"],
            ["attention_mask"],
            ["attention_mask", "labels"],
        ],
    ),
}  # fmt: skip


def trained(name, model, samples, worker=None, readers="users"):
    """Train a model of transformers in a pipeline; return losses, and which fields have been read behind the first."""
    optimizer = partial(torch.optim.SGD, lr=0.1)

    def source():
        return dataset(samples, inputs=FIELDS[name][0], targets=["labels"], identity="text")

    batches = Loader(source if readers == "first" else source(), rows=6, readers=readers, memory=40_000)
    workers = 3 if worker is None else None
    with Pipeline(copy.deepcopy(model), optimizer=optimizer, num_microbatches=3, num_workers=workers) as pipe:
        losses = []
        for loss, _ in zip(pipe.train(batches), range(2), strict=False):
            losses.append(loss)
            samples.read.clear()
        losses.append(pipe.step(next(iter(batches))))
        batches.close()
        return losses, sorted(samples.read)


@pytest.mark.parametrize("name, readers", [("gpt2", "users"), ("bert", "users"), ("bert", "first"), ("t5", "users")])
def test_workers_read_the_fields_that_their_part_of_a_model_uses(monkeypatch, name, readers):
    _, make, expected = FIELDS[name]
    torch.manual_seed(0)
    model = hugging_face(name)
    data = [Samples(make) for _ in range(4)]
    found = each_worker(monkeypatch, lambda worker: trained(name, model, data[worker], worker, readers))
    monkeypatch.undo()
    losses, read = trained(name, model, data[3])
    assert [each for each, _ in found] == [losses] * 3
    everything = sorted({field for fields in expected for field in fields})
    assert [read for _, read in found] == (expected if readers == "users" else [everything, [], []])
    assert read == everything, "where all workers are in one process"


class Gate(nn.Module):
    """Uses a field only where no number of what it is given is large."""

    def __init__(self, most):
        super().__init__()
        self.linear, self.most = nn.Linear(4, 4), most

    def forward(self, x, extra):
        x = self.linear(x)
        return x if (x > self.most).any() else x + extra


class Gated(nn.Module):
    def __init__(self, mosts):
        super().__init__()
        self.blocks = nn.ModuleList(Gate(most) for most in mosts)

    def forward(self, x, extra, unused, labels):
        x = x * unused.shape[1] + torch.arange(unused.shape[-1], device=unused.device)
        for block in self.blocks:
            x = block(x, extra)
        return ((x - labels) ** 2).mean()


def test_a_field_that_was_not_seen_to_be_used_is_read_when_it_is(monkeypatch, caplog):
    """Its stand-in computes nothing: numbers are never wrong."""
    torch.manual_seed(0)
    model = Gated([-1e9, 1e9, -1e9])  # the block in the middle adds `extra`, which a forward on shapes does not show

    def make(generator):
        return {name: torch.randn(4, generator=generator) for name in ("x", "extra", "unused", "labels")}

    data = [Samples(make) for _ in range(4)]

    def losses(model, worker, readers="users", **options):
        source = partial(dataset, data[worker], inputs=["x", "extra", "unused"], targets=["labels"], identity="x")
        optimizer = partial(torch.optim.SGD, lr=0.01)
        own = Loader(source() if readers == "users" else source, rows=8, readers=readers, memory=40_000)
        with Pipeline(copy.deepcopy(model), optimizer=optimizer, num_microbatches=2, **options) as pipe:
            return [pipe.step(batch) for batch, _ in zip(own, range(4), strict=False)]

    expected = losses(model, 3, num_workers=3)
    assert each_worker(monkeypatch, partial(losses, model)) == [expected] * 3
    assert data[2].read["extra"] < data[1].read["extra"] == data[1].read["labels"]
    assert "worker 1: uses a field that it was not seen to use" in caplog.text
    with pytest.raises(Exception, match=r"stage 1 uses one of .*'extra'.* of this batch"):
        each_worker(monkeypatch, partial(losses, model, readers="first"))


@pytest.mark.parametrize("other, count", [(4, 24), (1, 40)])
def test_rows_of_another_form_give_no_wrong_numbers(monkeypatch, other, count):
    """A field that a worker does not read it takes to look as in the first batch, if all samples seem to look alike."""
    model = Gated([-1e9] * 3)

    def make(generator):
        return {name: torch.randn(4, generator=generator) for name in ("x", "extra", "unused", "labels")}

    data = Samples(make, count)
    for sample in data.samples[8:16]:
        sample["unused"] = torch.randn(other)

    def losses(model, worker, **options):
        source = dataset(data, inputs=["x", "extra", "unused"], targets=["labels"])
        with Pipeline(copy.deepcopy(model), num_microbatches=2, **options) as pipe:
            return [pipe.evaluate(batch) for batch in Loader(source, rows=8, epochs=1, shuffle=False, memory=40_000)]

    expected = losses(model, 3, num_workers=3)
    if count == 24:  # one of the samples that are looked at is another
        assert each_worker(monkeypatch, partial(losses, model)) == [expected] * 3
        return
    with pytest.raises(Exception, match=r"were given different inputs .*float32\[8, 4\] and 3 more"):
        each_worker(monkeypatch, partial(losses, model))


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
def test_with_a_loss_function_the_last_worker_reads_targets(monkeypatch, loader, readers):
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
    assert [reads for _, reads in found] == ([True, False, True] if readers == "users" else [True, False, False])


class Cropped(nn.Module):
    """Looks at as much of a field as it is told to, by a number that no tensor has."""

    def __init__(self):
        super().__init__()
        self.blocks, self.length = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 3

    def forward(self, x, extra, labels):
        with torch.no_grad():
            cropped = extra[:, : self.length]
        for block in self.blocks:
            x = block(x) * cropped.shape[1]
        return ((x - labels) ** 2).mean()


def test_what_is_done_to_a_field_that_is_not_read_must_be_what_was_seen():
    torch.manual_seed(0)
    model = Cropped()
    batch = {name: torch.randn(2, 4) for name in ("x", "extra", "labels")}
    observed, cut = observe(model, (), batch), [range(1), range(1, 2)]
    stage = observed.build(1, cut)
    places = {path: (torch.Size([2, 4]), torch.float32) for path in observed.unused(cut)[1]}
    assert [path[1][1] for path in sorted(places)] == ["extra", "x"]
    args, kwargs = stage.filled(((), {"x": None, "extra": None, "labels": batch["labels"]}), places)
    with torch.no_grad():
        payload = observed.build(0, cut).forward((), (), batch)
        assert torch.equal(stage.forward(payload, args, kwargs), model(**batch))
        stage.module.length = 2
        with pytest.raises(NeedsField, match="is called with other numbers, and takes a field"):
            stage.forward(payload, args, kwargs)
