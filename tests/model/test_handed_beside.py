"""Layers of a list that hand tensors on beside what they return: in a dict, or an attribute that the loss reads."""

from __future__ import annotations

from functools import partial
from typing import Any

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
