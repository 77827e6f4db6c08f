"""Rows of several lengths, packed or nested, that a stage hands on."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.pipeline import Pipeline

WIDTH = 4


class Packed(nn.Module):
    """Packs rows, and goes on with them as they are packed."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, rows):
        if isinstance(rows, torch.Tensor):
            rows = rnn.pack_padded_sequence(rows, 1 + torch.arange(len(rows)) % 3, True, enforce_sorted=False)
        return self.recurrent(rows)[0]


class Unpacked(Packed):
    def forward(self, rows):
        return rnn.pad_packed_sequence(super().forward(rows), batch_first=True, total_length=3)[0]


class Nested(nn.Module):
    """Computes with nested rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        if not rows.is_nested:
            rows = torch.nested.nested_tensor([row[: 1 + i % 3] for i, row in enumerate(rows)], layout=torch.jagged)
        return self.linear(rows).tanh()


class Padded(Nested):
    def forward(self, rows):
        return nn.functional.pad(super().forward(rows).to_padded_tensor(0.0).sum(1, keepdim=True), (0, 0, 0, 2))


def _loss(kind, schedule="1f1b", **options):
    """Return the loss of a second step, piped and in one process."""
    torch.manual_seed(0)
    layers = [kind[0](), kind[0](), kind[0](), kind[1]()]
    alone, batch = copy.deepcopy(layers), (torch.randn(6, 3, WIDTH), torch.randn(6, 3, WIDTH))
    optimizer = torch.optim.SGD([p for layer in alone for p in layer.parameters()], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for x, y in zip(*(tensor.split(3) for tensor in batch), strict=True):
            for layer in alone:
                x = layer(x)
            loss = loss + nn.functional.mse_loss(x, y) / 2
        loss.backward()
        optimizer.step()
    how = {"optimizer": partial(torch.optim.SGD, lr=0.5), "num_workers": 2, "num_microbatches": 2}
    with Pipeline(layers, nn.functional.mse_loss, schedule=schedule, schedule_options=options, **how) as pipe:
        pipe.step(batch)
        return pipe.step(batch), loss.item()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", [(Packed, Unpacked), (Nested, Padded)])
def test_ragged_rows_are_handed_on(kind, schedule):
    """A PackedSequence was made of what stood for its tensors: no attribute 'device'. Split backward emptied nested
    rows, which torch cannot."""
    piped, alone = _loss(kind, schedule)
    assert piped == pytest.approx(alone)


def test_nested_rows_that_are_recomputed_are_refused_by_name():
    """Torch said: flatten(): not supported for NestedTensor on dim=0."""
    with pytest.raises(WorkerFailure, match="hands on a nested tensor, which cannot be recomputed"):
        _loss((Nested, Padded), recompute="all")
    piped, alone = _loss((Packed, Unpacked), recompute="all")
    assert piped == pytest.approx(alone)
