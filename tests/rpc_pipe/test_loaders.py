"""Loaders in the place of a batch: lists of batches are such, and no call takes a part of one in silence."""

import pytest
import torch
from torch import nn

from rpc_pipe import Pipeline
from rpc_pipe.dependency import BatchError
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
