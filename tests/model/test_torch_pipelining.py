"""What torch's own pipelining is tested with, as it is: every model and scenario trains as in one process.

After pytorch/test/distributed/pipelining: model_registry.py, test_pipe.py, test_unflatten.py, test_transformer.py and
test_schedule_multiproc.py. The models keep the marks at which torch splits them; here they count where blocks are few.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from in_turn import floats
from refusals import refused
from test_whole import SGD, assert_same_state, made, plain, whole_loss
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training


def pipe_split() -> None:
    """Mark a place as torch's users do. Torch's module takes a second, in all processes if it is imported above."""
    from torch.distributed import pipelining

    pipelining.pipe_split()


class BareParameters(nn.Module):
    """Parameters and a buffer used around its only modules, one of them twice, and a skip past all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(0.3 * torch.randn(6, 6)) for _ in range(2))
        self.constant = nn.Buffer(torch.randn(6))
        self.lin0, self.lin1, self.lin2 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = skip = x @ self.first
        constant = self.constant.clone()  # crosses marks, and needs no gradient
        x = self.lin0((x + y).relu())
        pipe_split()
        x = self.lin1((x.relu() + constant) @ self.second)
        pipe_split()
        x = self.lin2((x @ self.first).relu() + skip)
        pipe_split()
        return (x @ self.second).relu()


class Aliases(nn.Module):
    """Two names for one parameter, and for one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(0.3 * torch.randn(6, 6))
        self.lin0 = self.lin1 = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lin0(x @ self.first + y).relu()
        pipe_split()
        return self.lin1(x @ self.second).relu()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return self.down(self.act(self.up(x)))


class Children(nn.Module):
    """No list; the second input is taken after the last child alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp0, self.mlp1, self.mlp2, self.mlp3 = (Mlp() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.mlp1(self.mlp0(x))
        pipe_split()
        return self.mlp3(self.mlp2(x)) - y


class Listed(nn.Module):
    """A list of blocks; a keyword that nothing takes, with a tensor for its default."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(count)])

    def forward(self, x: Tensor, unused: Tensor = torch.zeros(1)) -> Tensor:  # noqa: B008
        for layer in self.layers:
            x = layer(x, unused=unused)
        return x


class Keywords(nn.Module):
    """Arguments by keyword, one with a tensor for its default, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(
        self, x: Tensor, y: Tensor | None = None, z: Tensor = torch.ones(6), *, scale: float = 1.0  # noqa: B008
    ) -> Tensor:  # fmt: skip
        for i, layer in enumerate(self.layers):
            x = layer(x).relu() + (y if i == 2 and y is not None else z)
        return x * scale


class InPlace(nn.Module):
    """Blocks that are split inside, and add a keyword's tensor in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lin0 = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(6, 6)
            self.act, self.lin1 = nn.ReLU(), nn.Linear(6, 6)

        def forward(self, x: Tensor, constant: Tensor | None = None) -> Tensor:
            x = self.lin0(self.conv(x))
            pipe_split()
            x.add_(constant)
            return self.act(self.lin1(x))

    def __init__(self) -> None:
        super().__init__()
        self.block0, self.block1 = self.Block(), self.Block()

    def forward(self, x: Tensor, constant: Tensor | None = None) -> Tensor:
        x = self.block0(x, constant=constant)
        pipe_split()
        return self.block1(x, constant=constant)


class SeveralOfEach(nn.Module):
    """Blocks that take and return several values, None and numbers among them."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor, nothing: None, count: int) -> tuple[Tensor, Tensor, None, int]:
            return self.a(y).tanh(), self.b(x).tanh() + count, nothing, count + 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Both() for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        nothing, count = None, 0
        for block in self.blocks:
            x, y, nothing, count = block(x, y, nothing, count)
        return {"sum": x + y, "product": x * y * count}


class Unequal(nn.Module):
    """Layers of different widths, in a sequence that is not the model."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, 3, 12, 5, 9, 6]
        self.layers = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh()


class OwnBackward(nn.Module):
    """Blocks with a backward of their own, which hand on what they were given and keep an output in an attribute."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return x, weight

        @staticmethod
        def backward(ctx: Any, grad_x: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
            return grad_x, grad_weight

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x.mm(weight.t())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad.mm(weight), grad.t().mm(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = (nn.Parameter(0.3 * torch.randn(3, 3)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            a, b = torch.split(x, [3, 3], dim=1)
            a, weight = OwnBackward.Both.apply(a, self.weight)
            self.hidden = OwnBackward.Product.apply(a @ weight, self.other).relu()
            return torch.cat([self.hidden, b], 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scenario(NamedTuple):
    """A model, what it is trained on, and how.

    Args:
        exactly: whether sums have the same order; else gradients of what two stages use are summed stage by stage.
    """

    make: Any
    batch: Any
    num_workers: int = 3
    schedule: str = "1f1b"
    split: list[int] | None = None
    exactly: bool = True


X, Y = floats(4, 6), floats(5, 6)[:4]
IMAGES, CONSTANT = floats(4, 2, 6, 6), floats(5, 2, 6, 6)[:4]
SCENARIOS = {
    "skips and a parameter used twice": Scenario(BareParameters, (X, Y), exactly=False),
    "marks beside few blocks": Scenario(BareParameters, (X, Y), 4, exactly=False),
    "marks beside aliases": Scenario(Aliases, (X, Y), 3, exactly=False),
    "aliases": Scenario(Aliases, (X, Y), 2, exactly=False),
    "two inputs and no list": Scenario(Children, (X, Y), 4),
    "a keyword that nothing takes": Scenario(Listed, {"x": X, "unused": torch.zeros(1)}, 4, "gpipe"),
    "its default": Scenario(Listed, {"x": X}, 4),
    "keywords": Scenario(Keywords, {"x": X, "y": Y, "scale": 0.5}, 3, "zb-h1"),
    "a tensor for a default": Scenario(Keywords, {"x": X}),
    "None by keyword": Scenario(Keywords, {"x": X, "y": None}),
    "in place, split inside": Scenario(InPlace, {"x": IMAGES, "constant": CONSTANT}, 2),
    "more stages than blocks": Scenario(InPlace, {"x": IMAGES, "constant": CONSTANT}, 4),
    "several of each, and None": Scenario(SeveralOfEach, (X, Y)),
    "unequal layers": Scenario(Unequal, (X,), 3, split=[1, 3, 1]),
    "interleaved": Scenario(partial(Listed, 8), {"x": X}, 2, "interleaved"),
    "breadth first": Scenario(partial(Listed, 8), {"x": X}, 2, "bfs"),
    "in a V": Scenario(partial(Listed, 4), {"x": X}, 2, "zb-v"),
    "a backward of its own": Scenario(OwnBackward, (X,), 4),
    "a backward of its own, split": Scenario(OwnBackward, (X,), 2, "zb-h1"),
}


def pipeline(scenario: Scenario, model: nn.Module, loss_fn: Any = whole_loss) -> Pipeline:
    return Pipeline(
        model, loss_fn, training=Training(SGD), num_workers=scenario.num_workers, schedule=scenario.schedule,
        split=scenario.split, num_microbatches=2,
    )  # fmt: skip


def halves(batch: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    def half(value: Any, i: int) -> Any:
        return value.tensor_split(2)[i] if isinstance(value, Tensor) and len(value) == 4 else value

    if isinstance(batch, dict):
        return [((), {name: half(value, i) for name, value in batch.items()}) for i in range(2)]
    return [(tuple(half(value, i) for value in batch), {}) for i in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_models_that_torch_splits_train_as_in_one_process(name):
    scenario = SCENARIOS[name]
    model = made(scenario.make)
    expected = copy.deepcopy(model)
    pipe = pipeline(scenario, model)
    losses = [pipe.step(scenario.batch) for _ in range(2)]
    expected_losses = plain(expected, [halves(scenario.batch)] * 2)
    assert losses == expected_losses if scenario.exactly else losses == pytest.approx(expected_losses, rel=1e-6)
    assert_same_state(pipe, expected, exactly=scenario.exactly)


def test_evaluation_between_steps_and_outputs_put_together():
    """Twenty steps, with an evaluation before, between and after them, and outputs in the order of the rows."""
    scenario = SCENARIOS["in place, split inside"]
    model = made(scenario.make)
    expected = copy.deepcopy(model)
    pipe = pipeline(scenario, model, lambda output, batch: output.square().mean())
    losses = []
    for _ in range(20):
        with torch.inference_mode():
            evaluated = pipe.evaluate(scenario.batch)
        losses.append(pipe.step(scenario.batch))
        assert evaluated == pytest.approx(losses[-1], rel=1e-6)
    assert losses == plain(expected, [halves(scenario.batch)] * 20, lambda output: output.square().mean())
    output = pipe.predict(scenario.batch)
    assert torch.equal(output, torch.cat([expected(**kwargs) for _, kwargs in halves(scenario.batch)]))


def test_rows_that_do_not_agree_are_told():
    pipe = pipeline(SCENARIOS["two inputs and no list"], made(Children))
    with refused("batch"):
        pipe.step((X, Y[:3]))
