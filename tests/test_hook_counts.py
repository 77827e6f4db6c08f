"""Hooks of gradients that count what forwards read: in a pipeline other forwards run before a backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline
from rpc_pipe.dependency.errors import WorkerFailure

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SGD = partial(torch.optim.SGD, lr=0.1)


class Counted(nn.Linear):
    """Its weight's hook counts; nobody reads it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count, self.norms = 0, [0.0]
        self.register_buffer("seen", torch.zeros(()))
        self.weight.register_hook(self.note)

    def note(self, grad: Tensor) -> None:
        self.count += 1
        self.norms.append(float(grad.norm()))
        self.seen.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ReadsNumber(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.count % 2)


class ReadsBuffer(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.factor()

    def factor(self) -> Tensor:
        return 1 + self.seen % 2


class ReadsList(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.norms[-1])


class BeginsAnew(Counted):
    """Reads what it has just written itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = 1
        return super().forward(x) * self.count


class Whole(nn.Module):
    def __init__(self, kind: type[Counted]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(kind: type[Counted], whole: bool) -> nn.Module:
    torch.manual_seed(0)
    return Whole(kind) if whole else nn.Sequential(*[kind() for _ in range(4)])


def losses(model: nn.Module, workers: int, schedule: str = "1f1b") -> list[float]:
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(model, loss_fn, optimizer=SGD, schedule=schedule, num_workers=workers, num_microbatches=4)
    return [pipe.step((X, X)) for _ in range(2)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind, name", [(ReadsNumber, "count"), (ReadsBuffer, "seen"), (ReadsList, "norms")])
def test_what_hooks_count_and_forwards_read_is_refused_where_others_are_under_way(kind, name, whole):
    """Forwards read what it had been before the backwards that one process runs first, silently."""
    alone, expected = made(kind, whole), []
    optimizer = SGD(alone.parameters())
    for _ in range(2):
        total = 0.0
        for x in X.chunk(4):
            part = nn.functional.mse_loss(alone(x), x) / 4
            part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert losses(made(kind, whole), 1) == expected
    for schedule in ("1f1b", "zb-h1"):
        with pytest.raises(
            WorkerFailure, match=f"backward, as by a hook of a gradient, changed {name} of a {kind.__name__}"
        ):
            losses(made(kind, whole), 2, schedule)


@pytest.mark.parametrize("kind", [Counted, BeginsAnew])
def test_what_hooks_count_and_no_forward_reads_is_not_refused(kind):
    assert losses(made(kind, False), 2) == losses(made(kind, True), 3, "zb-h1") == losses(made(kind, False), 1)
