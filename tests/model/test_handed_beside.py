"""Layers of a list that hand tensors on beside what they return: in a dict, or an attribute that the loss reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from refusals import refused
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training, WorkerFailure

SGD = partial(torch.optim.SGD, lr=0.1)
STORE: dict[str, Tensor] = {}
X, Y = torch.ones(4, 4), torch.arange(4)


class Left(nn.Linear):
    """Leaves what it computes in a dict that it was given, or in an attribute."""

    def __init__(self, store: dict[str, Any] | None = None) -> None:
        super().__init__(4, 4)
        self.store, self.kept = store, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.store is None:
            self.kept = y.mean()
        else:
            self.store["left"] = y
        return y


class Reading(Left):
    def forward(self, x: Tensor) -> Tensor:
        assert self.store is not None
        return nn.Linear.forward(self, x) + self.store["left"].mean()


class Global(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + (STORE["left"].mean() if "left" in STORE else 0)
        STORE["left"] = y
        return y


class Rotary(Left):
    """Keeps what is computed of no weight in a dict that all layers share, as many tables of positions are."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.store is not None
        table = self.store.setdefault("table", torch.arange(4.0))
        return nn.Linear.forward(self, x) * table


def _pipe(layers, loss_fn=nn.functional.cross_entropy):
    return Pipeline(layers, loss_fn, training=Training(SGD), num_microbatches=2, num_workers=2)


def test_a_tensor_in_a_dict_of_two_stages_is_refused():
    """torch said "backward through the graph a second time", or the numbers were other ones by timing."""
    store: dict[str, Any] = {}
    for layers in ([Left(store), Reading(store)], [Global(4, 4), Global(4, 4)]):
        with refused("model", WorkerFailure):
            _pipe(layers).step((X, Y))


def test_what_a_loss_reads_of_a_layer_on_another_stage_is_refused():
    first = Left()
    with refused("model", WorkerFailure):
        _pipe([first, nn.Linear(4, 4)], lambda x, y: nn.functional.cross_entropy(x, y) + first.kept).step((X, Y))
    last = Left()
    pipe = _pipe([nn.Linear(4, 4), last], lambda x, y: nn.functional.cross_entropy(x, y) + last.kept)
    assert pipe.step((X, Y)) > 0


def test_tables_in_a_dict_of_two_stages_are_not_refused():
    store: dict[str, Any] = {}
    assert _pipe([Rotary(store), Rotary(store)]).step((X, Y)) > 0
    assert _pipe([Left(), Left()]).step((X, Y)) > 0


class Noting(Left):
    """Notes a number of its output, in one of the ways in which people do."""

    def __init__(self, how: str, store: dict[str, Any]) -> None:
        super().__init__(store)
        self.how = how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        number = y.detach().square().mean()
        if self.how == "buffer":
            self.seen.copy_(number)
        elif self.how == "number":
            self.kept = number.item()  # type: ignore[assignment]
        elif self.how == "tensor":
            self.kept = number
        else:
            assert self.store is not None
            self.store["kept"] = number
        return y

    def penalty(self) -> float:
        return float(self.kept)


class Judge:
    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x, y) + 0.1 * sum(layer.penalty() for layer in self.layers)


class Whole(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _reads(layer: Noting) -> list[Any]:
    """Return loss functions that read what a layer notes, and one that does not."""
    store, entropy = layer.store or {}, nn.functional.cross_entropy
    how: Any = {
        "buffer": lambda x, y: entropy(x, y) + layer.seen.item(),
        "number": Judge([layer]).loss,
        "tensor": partial(lambda x, y, of: entropy(x, y) + float(getattr(of, "kept")), of=layer),  # noqa: B009
        "dict": lambda x, y: entropy(x, y) + store["kept"],
    }
    return [how[layer.how], lambda x, y: entropy(x, y) + layer.bias.detach().sum()]


@pytest.mark.parametrize("how", ["buffer", "number", "tensor", "dict"])
def test_a_detached_number_of_another_stage_is_refused_where_the_loss_reads_it(how):
    """The loss took the number of an earlier microbatch, or zero, in silence."""
    first = Noting(how, {"kept": torch.zeros(())})
    bad, good = _reads(first)
    with refused("model", WorkerFailure):
        _pipe([first, nn.Linear(4, 4)], bad).step((X, Y))
    assert _pipe([first, nn.Linear(4, 4)], good).step((X, Y)) > 0, "the number is noted for others"
    assert _pipe([nn.Linear(4, 4), first], bad).step((X, Y)) > 0, "both are on the last stage"


@pytest.mark.parametrize("how", ["buffer", "number"])
def test_whole_models_refuse_the_same(how):
    first = Noting(how, {})
    with refused("model", WorkerFailure):
        _pipe(Whole([first, nn.Linear(4, 4)]), _reads(first)[0]).step((X, Y))
