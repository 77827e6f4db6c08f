"""Loaders in the place of a batch: lists of batches are such, and no call takes a part of one in silence."""

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe import Pipeline
from rpc_pipe.checkpoints.newcomer import Journal, Repetition
from rpc_pipe.checkpoints.resumption import Resumption
from rpc_pipe.dependency import BatchError, NotFinite, PipeError
from rpc_pipe.pipeline import SplitBatch

cross_entropy = nn.functional.cross_entropy


def pair(rows=4):
    return torch.randn(rows, 4), torch.randint(3, (rows,))


def named(rows=4):
    return dict(zip(("x", "labels"), pair(rows), strict=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class WithLoss(Model):
    def forward(self, x, labels=None):
        output = super().forward(x)
        return output if labels is None else {"loss": cross_entropy(output, labels), "logits": output}


def by_name(output, batch):
    return cross_entropy(output, batch["labels"])


def layers():
    return list(Model().blocks)


#: model, loss function, batches, and whether two batches as the first call may be one: `((x, x), (y, y))`
KINDS = {
    "layers, pairs": (layers, cross_entropy, pair, True),
    "dicts, loss inside": (WithLoss, None, named, False),
    "tuples, loss inside": (WithLoss, None, pair, True),
    "pairs, loss function": (Model, cross_entropy, pair, True),
    "dicts, loss function": (Model, by_name, named, False),
}


def pipeline(kind):
    model, loss_fn, *_ = KINDS[kind]
    return Pipeline(model(), loss_fn, num_microbatches=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_batches_is_a_loader(kind):
    """Of two batches in a list the second came back alone, or labels of one with inputs of the other; three failed."""
    *_, make, is_unknown = KINDS[kind]
    torch.manual_seed(1)
    batches = [make(), make(), make()]
    with pipeline(kind) as pipe:
        if is_unknown:
            with pytest.raises(BatchError):
                pipe.evaluate(batches[:2])
        losses = [pipe.evaluate(batch) for batch in batches]
        mean = pytest.approx(sum(losses[:2]) / 2)
        for two in (batches[:2], tuple(batches[:2]), iter(batches[:2]), torch.utils.data.DataLoader(batches[:2], None)):
            assert pipe.evaluate(two) == mean
        assert pipe.evaluate(batches) == pytest.approx(sum(losses) / 3)
        assert pipe.evaluate([SplitBatch(batches[:1]), SplitBatch(batches[1:2])]) == mean
        assert pipe.evaluate(batches[:2], metric=lambda output, batch: torch.tensor(2.0)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_last_batch_shows_that_a_list_is_a_loader(kind):
    first, last = KINDS[kind][2](4), KINDS[kind][2](2)
    with pipeline(kind) as pipe:
        loss = pipe.evaluate([first, last])
        assert loss == pytest.approx((2 * pipe.evaluate(first) + pipe.evaluate(last)) / 3)


def test_a_batch_of_pairs_stays_a_batch():
    class Add(nn.Module):
        def forward(self, xs):
            return xs[0] + xs[1]

    def both(output, targets):
        return sum(nn.functional.mse_loss(output, target) for target in targets)

    batch = (torch.randn(4, 3), torch.randn(4, 3)), (torch.randn(4, 3), torch.randn(4, 3))
    with Pipeline([Add(), nn.Linear(3, 3)], both, num_microbatches=2) as pipe:
        loss = pipe.step(batch)
        assert pipe.evaluate(batch) == loss == pytest.approx(pipe.evaluate([batch, batch]))


@pytest.mark.parametrize("kind", ["dicts, loss inside", "dicts, loss function"])
def test_a_step_takes_no_list_of_batches(kind):
    """A step took the inputs of the first batch with the labels of the second, or the second alone."""
    batches = [named(), named()]
    for call in (Pipeline.step, Pipeline.predict):
        for first in (None, batches[0]):
            with pipeline(kind) as pipe:
                if first is not None:
                    pipe.step(first)
                with pytest.raises(BatchError):
                    call(pipe, batches)
    with pipeline(kind) as pipe:
        for batch in (batches[0], SplitBatch(batches)):
            with pytest.raises(BatchError):
                next(pipe.train(batch))
        assert len(list(pipe.train(batches))) == 2


class Divides(WithLoss):
    """Divides the sum of its losses as Hugging Face's models do."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        output = Model.forward(self, x)
        if labels is None:
            return {"logits": output}
        total = cross_entropy(output, labels, reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels != -100).sum()), "logits": output}


def test_batches_weigh_by_the_labels_by_which_a_step_divides():
    """`num_items_in_batch` was of no account among batches: the mean was of rows, and no perplexity."""
    torch.manual_seed(1)
    batches = [named(4), named(4)]
    batches[0]["labels"][1:] = -100
    with Pipeline(Divides(), None, num_microbatches=2) as pipe:
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        expected = pipe.evaluate({**joined, "num_items_in_batch": 5})
        counted = [{**batch, "num_items_in_batch": (batch["labels"] != -100).sum()} for batch in batches]
        assert pipe.evaluate(counted) == pytest.approx(expected) == pytest.approx(Divides()(**joined)["loss"].item())


def several(output, targets):
    hits = (output.argmax(1) == targets).sum()
    return {"loss": cross_entropy(output, targets), "hits": (hits, len(targets)), "rows": (len(targets), 1), "one": 1}


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"schedule": "zb-v"}, {"schedule": "pipedream-2bw"}])
def test_one_pass_gives_several_metrics(options):
    torch.manual_seed(1)
    batches, spoken = [pair(7), pair(4)], []
    workers = 2 * options.get("replicas", 1)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)]
    model = nn.Sequential(*layers)
    x, y = map(torch.cat, zip(*batches, strict=True))
    hits = (model(x).argmax(1) == y).float().mean().item()
    with Pipeline(layers, cross_entropy, num_microbatches=2, num_workers=workers, **options) as pipe:
        found = pipe.evaluate(batches, metric=several, progress=spoken.append)
        loss = pytest.approx(cross_entropy(model(x), y).item())
        # Two microbatches of each batch, and the mean of their rows, whatever their number
        assert found == {"loss": loss, "hits": pytest.approx(hits), "rows": pytest.approx(11 / 4), "one": 1}
        assert pipe.evaluate(batches) == loss and spoken == [1, 2]
        (x, y), one = batches[0], pipe.evaluate(batches[0], metric=several)
        assert one["loss"] == pytest.approx(cross_entropy(model(x), y).item()) and list(one) == list(found)


def test_a_metric_is_refused_that_has_no_numbers_by_name():
    names = iter("abcdefgh")
    for metric in ({}, {1: 2.0}, {"a": torch.ones(2)}, None):
        with Pipeline(layers(), cross_entropy, num_microbatches=2) as pipe, pytest.raises(PipeError):
            pipe.evaluate(pair(), metric=lambda *_, metric=metric: metric if metric is not None else {next(names): 1.0})


def test_a_newcomer_gets_the_metrics_of_evaluations_from_the_journal(tmp_path):
    first, scores = {"loss": (1.5, 4.0), "hits": (0.5, 3.0)}, {"": (2.0, 7.0)}
    written, read = Journal(tmp_path), Journal(tmp_path)
    for step in range(2):
        written.write(first)
        written.write(scores)
        written.write((step + 1, 0.25, None))
    newcomer = Resumption()
    newcomer.repetition = Repetition(read, lambda: True, lambda: None)
    assert newcomer.evaluated() == first and newcomer.evaluated() == scores
    assert newcomer.skip_step("") == 0.25
    assert newcomer.skip_step("") == 0.25 and not newcomer.behind  # its script has left out two evaluations


@pytest.mark.parametrize("kind", ["layers, pairs", "dicts, loss inside", "dicts, loss function"])
def test_a_microbatch_without_labels_is_named_and_counts_nothing_where_the_model_says_how(kind):
    """Its mean is no number, and the run ended by spoilt weights; in one process the batch has a loss."""
    batch = KINDS[kind][2](4)
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    labels[2:] = -100
    with pipeline(kind) as pipe:
        with refused("evaluate", BatchError):
            pipe.evaluate(iter([batch, batch]))
        with pytest.raises(NotFinite, match=r"microbatch 1 .*-100"):
            pipe.step(batch)
    if isinstance(batch, dict):
        with Pipeline(Divides(), None, num_microbatches=2) as pipe:
            loss = pipe.step({**batch, "num_items_in_batch": 2})
            assert loss == pytest.approx(Divides()(**batch)["loss"].item())
