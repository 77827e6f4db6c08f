"""Forwards that write, through `.data`, what is there already: neither versions nor numbers tell."""

from __future__ import annotations

import copy

import pytest
import torch
from test_whole import SGD, assert_same_state, made, plain
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training


class Momentum(nn.Module):
    """A second encoder follows the first, of which it begins as a copy; a place in a queue says which way it goes."""

    place: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        nn.init.constant_(self.query[2].bias, 0.5)  # type: ignore[arg-type]
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor = self.query(x)
        with torch.no_grad():
            if self.training:
                for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
            key = self.key(x)
            alike = query @ self.queue.clone().T
            if self.training:
                begin = int(self.place)
                self.queue[begin : begin + len(x)] = key
                self.place.fill_((begin + len(x)) % 8)
        return query * (query * key).sum(1, keepdim=True) + alike[:, :4]


class Fades(nn.Linear):
    """Multiplies a buffer, that backward reads, by one at first."""

    factor: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("factor", torch.ones(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.factor.data.mul_(torch.where(self.count > 3, 0.5, 1.0))
        return super().forward(x) * self.factor


class Faded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Fades() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("make", [Momentum, Faded])
def test_what_the_first_forward_has_written_with_what_was_there(make, num_workers):
    """A weight that the first forward had left as it was counted as one that forwards do not write: the second one went
    another way, was run again, and wrote it twice. A buffer was read by backward as later forwards had left it."""
    model, loss_fn = made(make), nn.functional.mse_loss
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 3, 4, 4)
    pipe = Pipeline(
        model, loss_fn, training=Training(SGD), schedule="gpipe", num_microbatches=2, num_workers=num_workers
    )
    losses = [pipe.step(batch) for batch in zip(x, y, strict=True)]
    pieces = [[(pair, {}) for pair in zip(a.chunk(2), b.chunk(2), strict=True)] for a, b in zip(x, y, strict=True)]

    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return loss_fn(alone(inputs), target)

    trained = [parameter for parameter in alone.parameters() if parameter.requires_grad]
    expected = plain(loss, pieces, lambda loss: loss, trained)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_same_state(pipe, alone, exactly=False)
    if num_workers == 1 or make is Faded:
        assert losses == expected
        assert_same_state(pipe, alone)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, dict(pipe.weights.state_dict() or {})[name]), "the user's own module has them too"
