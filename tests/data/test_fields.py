"""Fields of samples in a pipeline: each worker reads those that its part of a model uses."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from threads_as_processes import each_worker
from torch import nn

from rpc_pipe import Pipeline
from rpc_pipe.data import Loader, dataset
from rpc_pipe.model.observe.unread_fields import FieldNeeded, filled
from rpc_pipe.model.observed_model import observe


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


@pytest.mark.parametrize("name, readers", [("gpt2", "users"), ("bert", "first"), ("t5", "users")])
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
    args, kwargs = filled(stage._skeleton, ((), {"x": None, "extra": None, "labels": batch["labels"]}), places)
    with torch.no_grad():
        payload = observed.build(0, cut).run((), (), batch)
        assert torch.equal(stage.run(payload, args, kwargs), model(**batch))
        stage.module.length = 2
        with pytest.raises(FieldNeeded, match="is called with other numbers, and takes a field"):
            stage.run(payload, args, kwargs)
