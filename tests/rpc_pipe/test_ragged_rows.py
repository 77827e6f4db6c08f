"""Rows of several lengths, packed or nested, that a stage hands on."""

import copy
from functools import partial

import pytest
import torch
from processes import rpc_pipe
from refusals import failed
from torch import nn
from torch.nn.utils import rnn
from training_options import pipeline_with

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


class Viewed(Nested):
    """Hands on nested rows that are a view of others."""

    def forward(self, rows):
        rows = super().forward(rows)
        return torch.nested.nested_tensor_from_jagged(rows.values(), rows.offsets())


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
    with pipeline_with(layers, nn.functional.mse_loss, schedule=schedule, schedule_options=options, **how) as pipe:
        pipe.step(batch)
        return pipe.step(batch), loss.item()


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ((Packed, Unpacked), "1f1b"),
        ((Nested, Padded), "zb-h1"),
        ((Viewed, Padded), "zb-h1"),
        ((Viewed, Padded), "1f1b"),
    ],
)
def test_ragged_rows_are_handed_on(kind, schedule):
    """A PackedSequence was made of what stood for its tensors: no attribute 'device'. Split backward emptied nested
    rows, which torch cannot, and a view of such was met by: NotImplementedError: aten.alias.default."""
    piped, alone = _loss(kind, schedule)
    assert piped == pytest.approx(alone)


def test_packed_rows_are_recomputed_and_torch_refuses_nested_ones():
    with failed(RuntimeError):
        _loss((Nested, Padded), recompute="all")
    piped, alone = _loss((Packed, Unpacked), recompute="all")
    assert piped == pytest.approx(alone)


def test_nested_rows_between_processes_are_refused_in_a_sentence(tmp_path):
    """A TypeError with the traceback of a sender's thread said so."""
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    done = rpc_pipe("run", script, "--workers", 2)
    assert done.returncode and "Traceback" not in done.stdout + done.stderr
    assert "payload of 0F0: a NestedTensor on cpu cannot travel between workers: hand on its `values()`" in done.stderr


NESTED = """
import torch
from torch import nn
from rpc_pipe import Pipeline

class Nested(nn.Linear):
    def forward(self, rows):
        return torch.nested.nested_tensor(list(super().forward(rows).split([1, 3])), layout=torch.jagged)

class Padded(nn.Linear):
    def forward(self, rows):
        return super().forward(rows).values()

pipe = Pipeline([Nested(2, 2), Padded(2, 2)], nn.functional.mse_loss, num_microbatches=1)
pipe.step((torch.ones(4, 2), torch.ones(4, 2)))
"""
