"""What a block hands on beside its output, and what does not travel, in models cut as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from in_turn import floats, stages_of
from refusals import refused
from test_whole import SGD, assert_trains_alike, made, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rpc_pipe.model.observed_model import observe
from rpc_pipe.pipeline import Pipeline, Training


class Skips(nn.Module):
    """Its blocks hand on what they got, or not, as the numbers say: on ones, as when the model is observed, they do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            if x.sum() > 0:
                return x, seen
            return x + self.linear(x), seen + x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([self.Block() for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        seen = x.sum(1)
        for block in self.blocks:
            x, seen = block(x, seen)
        return {"loss": (x.square().mean(1) + seen).mean()}


class Packed(Skips):
    """The same in dicts and lists."""

    class Block(Skips.Block):
        def forward(self, x: Tensor, seen: Tensor) -> dict[str, Any]:  # type: ignore[override]
            x, seen = super().forward(x, seen)
            return {"x": x, "more": [seen, None]}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        seen = x.sum(1)
        for block in self.blocks:
            out = block(x, seen)
            x, (seen, _) = out["x"], out["more"]
        return {"loss": (x.square().mean(1) + seen).mean()}


class Routes(nn.Module):
    """Its blocks choose experts by numbers, and hand on a bias that the first of them makes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({f"expert {i}": nn.Linear(4, 4) for i in range(2)})

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            bias = x.mean(0) if bias is None else bias
            chosen = (x[:, 0] > 0).long()
            for number in chosen.unique():
                rows = (chosen == number).nonzero()[:, 0]
                x = x.index_add(0, rows, self.experts[f"expert {number}"](x[rows]) + bias)
            return x, bias

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([self.Block() for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, bias = self.first(x), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("make", [Skips, Packed, Routes])
def test_what_a_block_hands_on_reaches_the_next_stage(make, num_workers):
    """What it was given when the model was observed was sent instead, or counted as a constant and was not sent."""
    model = made(make)
    batches = [[((torch.randn(6, 4) - 0.2 * i,), {}) for i in range(4)] for _ in range(2)]
    pipe = Pipeline(copy.deepcopy(model), training=Training(SGD), num_workers=num_workers, num_microbatches=4)
    losses = [pipe.step(microbatches=[{"x": args[0]} for args, _ in pieces]) for pieces in batches]
    assert losses == plain(model, batches)
    for name, value in pipe.weights.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


class Beside(nn.Module):
    """Its blocks return more than tensors that they have made: something else with every call."""

    class Block(nn.Linear):
        calls = 0

        def __init__(self, what: str) -> None:
            super().__init__(8, 8)
            self.what = what

        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            x, self.calls = super().forward(x), self.calls + 1
            if self.what == "number":
                return x, mask * 1, 1 / self.calls
            return (x, *[mask * 1] * self.calls)

    def __init__(self, what: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(what) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        for block in self.blocks:
            x, mask, *_ = block(x, mask)
        return x * mask


@pytest.mark.parametrize("what", ["number", "length"])
def test_what_does_not_travel_must_be_what_was_observed(what):
    """Later stages went on with what had been observed, and trained something else in silence."""
    x = floats(2, 8)
    stage = stages_of(observe(Beside(what), [x]), 2)[0]
    stage.run((), [x], {})
    with refused("model"):
        stage.run((), [x], {})


class Looked(nn.Module):
    """What passes on is a view that was made without gradients; before, it is kept where anyone may look at it."""

    seen: Tensor | None = None

    def __init__(self, use: Any) -> None:
        super().__init__()
        last = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), last])
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x = self.blocks[1](self.blocks[0](x))
        x = self.use(self.blocks[2], x)
        return x


def _of_a_view(block: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        x = x.view_as(x)
    return block(x)


def _checkpointed(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("use", [_of_a_view, _checkpointed])
def test_views_without_gradients_and_what_is_kept_on_another_stage(schedule, use):
    """Backward began at the view, which has no history; what stood for the other stage's tensor was compared with what
    it had been, to see what a checkpoint changes, and has no numbers."""
    model, x = made(lambda: Looked(use)), floats(4, 4)
    alone = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        nn.functional.mse_loss,
        training=Training(SGD),
        schedule=schedule,
        num_microbatches=2,
        num_workers=2,
        blocks="blocks",
    )
    assert_trains_alike(pipe, alone, x)
