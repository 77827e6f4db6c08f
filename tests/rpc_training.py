"""What `test_rpc.py` trains in a job of four workers and once more in threads: each with a schedule of its own kind."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training


class Complex(nn.Module):
    """A layer that hands on a conjugate view, whose bytes alone do not say what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).conj()


class Magnitude(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([z.real, z.imag], -1) @ torch.ones(16, 8)


class Late(torch.autograd.Function):
    """Lets the backward of its stage take its time, so that later stages are done long before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.01)
        return grad


class Hold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Late.apply(x)


def layers(sparse: bool) -> list[Any]:
    first = [partial(nn.Embedding, 11, 8, sparse=sparse), Hold]
    return [*first, partial(nn.Linear, 8, 8), nn.Tanh, Complex, Magnitude, nn.Tanh, partial(nn.Linear, 8, 3)]


class Case(NamedTuple):
    steps: int
    microbatches: int
    #: whether the weights are gathered after each step
    gather: bool = False
    #: whether a gradient is sparse
    sparse: bool = False
    #: norm above which gradients are clipped, in a stream of steps
    clipped: float | None = None


#: by schedule
CASES = {
    "chimera": Case(3, 4, sparse=True),
    "zb-v": Case(3, 4),
    "varuna": Case(3, 24, gather=True),
    "zb-h2": Case(8, 4, clipped=0.7),
}


def train(schedule: str, *, early: bool = True) -> tuple[list[float], dict[str, Tensor] | None]:
    """Return the losses and, on worker 0, the weights; `early`: updates need not wait for the norm of all gradients."""
    steps, microbatches, gather, sparse, clipped = CASES[schedule]
    pipe = Pipeline(
        layers(sparse),
        nn.functional.cross_entropy,
        num_microbatches=microbatches,
        num_workers=4,
        schedule=schedule,
        training=Training(
            partial(torch.optim.SGD, lr=0.1), max_grad_norm=clipped, post_validation=None if clipped is None else early
        ),
        stall_s=60,
    )
    draw = torch.Generator().manual_seed(0)
    sizes = [(2 * microbatches,)] * steps
    batches = [tuple(torch.randint(high, size, generator=draw) for high in (11, 3)) for size in sizes]
    if clipped is not None:
        return list(pipe.train(batches)), pipe.weights.state_dict()
    losses = []
    for batch in batches:
        losses.append(pipe.step(batch))
        if gather:
            pipe.weights.state_dict()
    return losses, pipe.weights.state_dict()


if __name__ == "__main__":
    for schedule in CASES:
        losses, weights = train(schedule)
        if weights is not None:
            torch.save((losses, weights), Path(sys.argv[1]) / schedule)
