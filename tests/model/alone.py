"""A model trained in one process, to compare a pipeline of it with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from in_turn import PADDED, ids, loss_of
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline

SGD = partial(torch.optim.SGD, lr=0.001, momentum=0.9)


def made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plain(
    model: nn.Module,
    batches: list[list[tuple[tuple[Any, ...], dict[str, Any]]]],
    loss: Any = loss_of,
    parameters: Any = None,
) -> list[float]:
    """Train by plain accumulation over equal microbatches; return the losses."""
    optimizer = SGD(parameters or model.parameters())
    losses = []
    for pieces in batches:
        total = 0.0
        for args, kwargs in pieces:
            part = loss(model(*args, **kwargs)) / len(pieces)
            part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def whole_loss(output: Any, batch: Any) -> Tensor:
    return loss_of(output)


def assert_same_state(pipe: Pipeline, model: nn.Module, *, exactly: bool = True) -> None:
    state, expected = pipe.weights.state_dict(), model.state_dict()
    assert state is not None and list(state) == list(expected)
    for name, tensor in expected.items():
        if exactly:
            assert torch.equal(state[name], tensor), name
        else:
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


def lm_batch(rows: int = 4) -> dict[str, Tensor]:
    return {"ids": ids(rows, 5), "mask": PADDED[:1].expand(rows, 5), "labels": ids(rows, 5)}


def rows_of(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in batch.items()}
