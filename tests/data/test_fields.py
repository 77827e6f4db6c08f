"""Samples with several fields in a pipeline of a whole model, whose workers all read them."""

import copy
from functools import partial

import pytest
import torch
from threads_as_processes import each_worker
from torch import nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, dataset


class Samples:
    def __init__(self, make, count=24):
        generator = torch.Generator().manual_seed(0)
        self.samples = [make(generator) for _ in range(count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def ids(generator):
    return torch.randint(1, 50, (6,), generator=generator)


def mask(generator):
    return (torch.arange(6) < torch.randint(3, 7, (), generator=generator)).long()


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    config = transformers.T5Config(
        vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=2, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


FIELDS = {
    "bert": (
        ["input_ids", "token_type_ids", "attention_mask"],
        lambda g: {
            "input_ids": ids(g), "token_type_ids": ids(g) % 2, "attention_mask": mask(g), "labels": ids(g)[0] % 2,
        },
    ),
    "t5": (
        ["input_ids", "attention_mask", "decoder_input_ids"],
        lambda g: {
            "input_ids": ids(g), "attention_mask": mask(g), "decoder_input_ids": ids(g), "labels": ids(g),
        },
    ),
}  # fmt: skip


def trained(name, model, samples, worker=None, readers="users", workers=3):
    """Train a model of transformers in a pipeline, evaluate it, and return the losses."""
    optimizer = partial(torch.optim.SGD, lr=0.1)

    def source():
        return dataset(samples, inputs=FIELDS[name][0], targets=["labels"], identity="text")

    batches = Loader(source if readers == "first" else source(), rows=6, readers=readers, memory=40_000)
    workers = workers if worker is None else None
    with Pipeline(copy.deepcopy(model), training=Training(optimizer), num_microbatches=3, num_workers=workers) as pipe:
        losses = [loss for loss, _ in zip(pipe.train(batches), range(2), strict=False)]
        losses.append(pipe.evaluate(next(iter(batches))))
        losses.append(
            pipe.evaluate(next(iter(batches)), metric=lambda output, batch: output.loss + batch["labels"].sum())
        )
        return losses


@pytest.mark.parametrize("name, readers, workers", [("bert", "first", 3), ("t5", "users", 2)])
def test_workers_of_a_whole_model_read_what_it_is_called_with(monkeypatch, name, readers, workers):
    torch.manual_seed(0)
    model = hugging_face(name)
    data = Samples(FIELDS[name][1])
    found = each_worker(monkeypatch, lambda worker: trained(name, model, data, worker, readers), workers)
    monkeypatch.undo()
    assert found == [trained(name, model, data, workers=workers)] * workers


class Gated(nn.Module):
    """Uses a field only where no number of what a block is given is large."""

    def __init__(self, mosts):
        super().__init__()
        self.blocks, self.mosts = nn.ModuleList(Gate(most) for most in mosts), mosts

    def forward(self, x, extra, labels):
        for block in self.blocks:
            x = block(x, extra)
        return ((x - labels) ** 2).mean()


class Gate(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.linear, self.most = nn.Linear(4, 4), most

    def forward(self, x, extra):
        x = self.linear(x)
        return x if (x > self.most).any() else x + extra


def test_a_block_may_use_a_field_by_what_it_computes(monkeypatch):
    torch.manual_seed(0)
    model = Gated([-1e9, 1e9, -1e9])  # the block in the middle adds `extra`, which a forward on shapes does not show

    def make(generator):
        return {name: torch.randn(4, generator=generator) for name in ("x", "extra", "labels")}

    data = Samples(make)

    def losses(model, worker, readers="users", **options):
        source = partial(dataset, data, inputs=["x", "extra"], targets=["labels"], identity="x")
        optimizer = partial(torch.optim.SGD, lr=0.01)
        own = Loader(source() if readers == "users" else source, rows=8, readers=readers, memory=40_000)
        with Pipeline(copy.deepcopy(model), training=Training(optimizer), num_microbatches=2, **options) as pipe:
            return [pipe.step(batch) for batch, _ in zip(own, range(4), strict=False)]

    expected = losses(model, 3, num_workers=3)
    assert each_worker(monkeypatch, partial(losses, model)) == [expected] * 3
    assert each_worker(monkeypatch, partial(losses, model, readers="first")) == [expected] * 3
