"""Emulated devices: modules whose compute sleeps, so that many fit on few cores and only the runtime shows.

A device takes exactly as long as it is told, as a busy GPU would: what `time.sleep` oversleeps on an idle
machine is measured once and left out. All systems run the same modules.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: floats of a payload, unless more are asked for
WIDTH = 64
_instantly = False


#: by how much a sleep of so many seconds is too long on this machine when nothing else runs
_oversleep: dict[float, float] = {}


def assume(late: float) -> None:
    """Take a sleep to be so many seconds too long, instead of measuring it: on a machine where others run."""
    _oversleep.clear()
    _oversleep[0.0] = late


def calibrate() -> None:
    """Measure by how much a sleep is too long. On a quiet machine, before any worker starts."""
    if 0.0 in _oversleep:
        return
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: wake up when told, not up to 50 us later
    for seconds in (0.001, 0.002, 0.004, 0.01, 0.02):
        late = []
        for _ in range(15):
            start = time.perf_counter()
            time.sleep(seconds)
            late.append(time.perf_counter() - start - seconds)
        _oversleep[seconds] = statistics.median(late)


class _Queue(threading.local):
    """The device of a thread."""

    #: when the part that it was given last ends
    ends = 0.0


_queue = _Queue()


def work(seconds: float, *, queued: bool = False) -> None:
    """Be busy for `seconds`: from now on, or `queued`, from the end of the part before."""
    if seconds > 0 and not _instantly:
        now = time.perf_counter()
        _queue.ends = (_queue.ends if queued else now) + seconds
        nearest = min(_oversleep, key=lambda known: abs(known - seconds))
        time.sleep(max(0.0, _queue.ends - now - _oversleep[nearest]))


@contextmanager
def instantly() -> Iterator[None]:
    """Let devices of this process take no time, to look at their results only."""
    global _instantly
    _instantly = True
    try:
        yield
    finally:
        _instantly = False


class Times:
    """How long each microbatch takes on a stage, seconds; the same for whoever asks, in every step.

    Args:
        jitter: each time is multiplied by 1 + U(0, jitter), drawn once per microbatch and kind.
    """

    def __init__(self, seconds: float, num_microbatches: int, jitter: float = 0, seed: Any = 0) -> None:
        draw = random.Random(str(seed))
        self.of = [seconds * (1 + jitter * draw.random()) for _ in range(num_microbatches)]


class _Fused(torch.autograd.Function):
    """Forward and the whole backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float, part: int, parts: int
    ) -> Tensor:
        ctx.backward_s, ctx.queued = backward_s, part < parts - 1
        work(forward_s, queued=part > 0)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        work(ctx.backward_s, queued=ctx.queued)
        return grad, grad.sum(0), None, None, None, None


class _Path(torch.autograd.Function):
    """One path of a backward that can be split: towards the inputs, or towards the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        work(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        work(ctx.backward_s)
        return grad, None, None


class Device(nn.Module):
    """A stage whose forward takes `forward` and whose backward takes `backward`, by microbatch in turn.

    Args:
        weights: if given, the backward is in two parts that can run apart: `backward` for the inputs and
            `weights` for the weights.
        part: which of a stage's `parts` devices in a row this is. As on a GPU, which has a queue, a stage's
            parts follow each other at once, in forward and in backward.
    """

    def __init__(
        self,
        forward: Times,
        backward: Times,
        weights: Times | None = None,
        *,
        width: int = WIDTH,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self._place = part, parts
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self._times: Sequence[Times] = (forward, backward, weights or backward)
        self._split = weights is not None
        self._count = 0

    def forward(self, x: Tensor) -> Tensor:
        m = self._count % len(self._times[0].of)
        self._count += 1
        forward, backward, weights = (times.of[m] for times in self._times)
        if not self._split:
            fused: Tensor = _Fused.apply(x, self.weight, forward, backward, *self._place)  # type: ignore[no-untyped-call]
            return fused
        inputs: Tensor = _Path.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        weight: Tensor = _Path.apply(self.weight, 0.0, weights)  # type: ignore[no-untyped-call]
        return inputs + weight


def batch(num_microbatches: int, width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Return (inputs, targets) by microbatch. The inputs owe a gradient, so that all stages work alike."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, width, generator=generator).requires_grad_(), torch.randn(1, width, generator=generator))
        for _ in range(num_microbatches)
    ]
