"""What a forward leaves in the model for the next one: every stage does alike, or it is refused; never left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from refusals import refused
from test_whole import SGD, assert_same_state, made, plain
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training


class Model(nn.Module):
    """Blocks with something before and behind them."""

    mean: Tensor
    count: Tensor
    memory: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen = 0, [0]

    def before(self, x: Tensor) -> Tensor:
        return x

    def behind(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        for block in self.blocks:
            x = block(x)
        self.behind(x)
        return self.head(x)


class CountsInBuffer(Model):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.count % 3)

    def behind(self, x: Tensor) -> None:
        self.count += 1


class CountsInAttribute(Model):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.calls % 3)

    def behind(self, x: Tensor) -> None:
        self.calls += 1


class CountsInList(Model):
    def before(self, x: Tensor) -> Tensor:
        return x * len(self.seen)

    def behind(self, x: Tensor) -> None:
        self.seen = [0] * (1 + len(self.seen) % 3)


class RemembersForOthers(Model):
    def behind(self, x: Tensor) -> None:
        self.memory = x.detach().mean(0)


class AveragesBetween(Model):
    """Between two blocks, where a cut must not part what is written from what is made of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        if self.training:
            self.mean = (self.mean + x.detach().mean(0)) / 2
            self.count.data.add_((x > 0).sum())
        else:
            x = x.mean(1, keepdim=True)  # where fewer bytes would cross
        x = (x - self.mean) * (1 + self.count % 2)
        return self.head(self.blocks[3](self.blocks[2](x)))


class Flags(Model):
    """Sets an attribute for its blocks, and puts it back."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * (2 if self.calls else 1)
        self.calls = 1
        for block in self.blocks:
            x = block(x)
        self.calls = 0
        return self.head(x)


class Halving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.training else 1)


class CallsInEvaluation(Model):
    """Calls a block, which is frozen, once more in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Halving(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        self.blocks[0].eval()
        x = x + self.blocks[0](x)
        self.blocks[0].train(self.training)
        return self.head(self.blocks[3](self.blocks[2](x)))


class AnnealsItsBlocks(Model):
    """Behind all blocks it sets by what their backward goes, so that stages that end before did not."""

    class Block(nn.Linear):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            soft = super().forward(x) / self.temperature
            return x + soft - soft.detach()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(4, 4) for _ in range(4)])

    def behind(self, x: Tensor) -> None:
        for block in self.blocks:
            block.temperature *= 0.95  # type: ignore[operator]


COUNTING = CountsInBuffer, CountsInAttribute, CountsInList, RemembersForOthers, AveragesBetween, AnnealsItsBlocks


@pytest.mark.parametrize(
    ("make", "num_workers"),
    [*((make, 4) for make in (*COUNTING, Flags, CallsInEvaluation)), (CountsInBuffer, 2), (RemembersForOthers, 3)],
)
def test_what_the_end_of_a_forward_counts_is_counted_on_every_stage(make, num_workers):
    """Stages ended their forward when they had all that they hand on, and the first went on with the first numbers."""
    model = made(make)
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 3, 8, 4)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_microbatches=4, num_workers=num_workers)
    losses = [pipe.step(batch) for batch in zip(x, y, strict=True)]
    pieces = [[(pair, {}) for pair in zip(a.chunk(4), b.chunk(4), strict=True)] for a, b in zip(x, y, strict=True)]

    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return loss_fn(alone(inputs), target)

    assert losses == plain(loss, pieces, lambda loss: loss, list(alone.parameters()))
    evaluated = pipe.evaluate((x[0], y[0]))
    alone.eval()
    with torch.no_grad():
        assert evaluated == pytest.approx(sum(float(loss(a, b)) for (a, b), _ in pieces[0]) / 4)
    assert_same_state(pipe, alone)


class Averages(Model):
    def before(self, x: Tensor) -> Tensor:
        return x - self.mean

    @torch.no_grad()
    def behind(self, x: Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.5)


class AveragesAnew(Averages):
    @torch.no_grad()
    def behind(self, x: Tensor) -> None:
        self.mean = (self.mean + x.mean(0)) / 2


class Remembers(RemembersForOthers):
    def before(self, x: Tensor) -> Tensor:
        return x if self.memory is None else x + self.memory


class Remembering(nn.Linear):
    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.state = y.detach().mean(0)
        return y


class AsksItsLastBlock(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering(4, 4) for _ in range(4)])

    def before(self, x: Tensor) -> Tensor:
        state: Any = self.blocks[3].state
        return x if state is None else x + state


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Averages, "model"),
        (AveragesAnew, "model"),
        (Remembers, "model"),
        (AsksItsLastBlock, "model"),
    ],
)
def test_what_a_later_stage_leaves_for_an_earlier_one_is_refused(make, says):
    """Each stage went on with what its own copy of the model had from the beginning, and trained something else."""
    model, x = made(make), torch.randn(4, 4)
    loss_fn = nn.functional.mse_loss
    with refused(says):
        Pipeline(model, loss_fn, training=Training(SGD), num_microbatches=2, num_workers=2, example=(x, x))
    pipe = Pipeline(copy.deepcopy(model), loss_fn, training=Training(SGD), num_microbatches=2, num_workers=1)
    pieces = [(pair, {}) for pair in zip(x.chunk(2), x.chunk(2), strict=True)]

    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return loss_fn(model(inputs), target)

    assert [pipe.step((x, x)) for _ in range(2)] == plain(loss, [pieces] * 2, lambda x: x, list(model.parameters()))


class NormedTwice(Model):
    """Calls a block with running means twice, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[1](self.blocks[0](self.stem(x))))
        return self.head(self.blocks[3](self.blocks[2](x)))


@pytest.mark.parametrize("split", [None, [3, 2]])
def test_running_means_of_a_block_that_one_stage_calls_twice(split):
    """Its counter, written in place by both calls, was taken for something that had left the first one."""
    model = made(NormedTwice)
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 3, 8, 4)
    loss_fn, workers = nn.functional.mse_loss, len(split or [5])
    pipe = Pipeline(
        model, loss_fn, training=Training(SGD), num_microbatches=2, num_workers=workers, split=split, blocks="blocks"
    )
    losses = [pipe.step(batch) for batch in zip(x, y, strict=True)]
    pieces = [[(pair, {}) for pair in zip(a.chunk(2), b.chunk(2), strict=True)] for a, b in zip(x, y, strict=True)]

    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return loss_fn(alone(inputs), target)

    assert losses == plain(loss, pieces, lambda loss: loss, list(alone.parameters()))
    assert_same_state(pipe, alone)


class NormedAnywhere(NormedTwice):
    """Its running means alone, of which torch does not tell that an operator writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][1].num_batches_tracked = None


@pytest.mark.parametrize("make", [NormedTwice, NormedAnywhere])
def test_running_means_of_a_block_that_several_stages_call_are_refused(make):
    """Each stage moved a copy of its own by its own calls alone, and evaluation went by that of one."""
    x = torch.randn(8, 4)
    model, loss_fn = made(make), nn.functional.mse_loss
    with refused("model"):
        Pipeline(
            model,
            loss_fn,
            training=Training(SGD),
            num_microbatches=2,
            num_workers=2,
            split=[1, 4],
            blocks="blocks",
            example=(x, x),
        )
