"""A script in which something goes wrong on one of three workers: `bench/faults.py` runs it.

rpc-pipe run bench/faulty.py --workers 3 -- FAULT PLACE RANK CALL STALL_S
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline

_WHAT, _PLACE, _RANK, _CALL, _STALL_S = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
_STEPS = 100
_counted: Counter[str] = Counter()


def _fault(x: Any) -> Any:
    """Go wrong as was asked for; return `x` if that is not the end."""
    if _WHAT == "exception":
        raise ArithmeticError("the user's own fault")
    if _WHAT == "StopIteration":
        raise StopIteration
    if _WHAT == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if _WHAT == "recursion":
        return _fault(x)
    if _WHAT == "out of memory":
        torch.empty(2**60)
    if _WHAT == "MemoryError":
        return bytearray(2**60)
    if _WHAT == "nan":
        return x * float("nan")
    if _WHAT == "hang":
        time.sleep(1000)
    _end_somehow()
    return x


def _end_somehow() -> None:
    signals = {"segfault": signal.SIGSEGV, "abort": signal.SIGABRT, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if _WHAT in signals:
        os.kill(os.getpid(), signals[_WHAT])
    if _WHAT == "sys.exit":
        sys.exit(3)
    if _WHAT in ("os._exit", "exit"):
        os._exit(0)
    if _WHAT == "no descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        print(len([open(os.devnull) for _ in range(99)]))
    if _WHAT == "closed descriptors":
        os.closerange(3, 4096)
    if _WHAT == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))
        with open(f"{os.environ['TMPDIR']}/x", "wb") as file:
            file.write(bytes(99999))
    if _WHAT == "forked, killed":
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def _at(place: str, x: Any = None) -> Any:
    _counted[place] += 1
    due = place == _PLACE and _counted[place] == _CALL and os.environ["RANK"] == _RANK
    return _fault(x) if due else x


class Faulty(nn.Module):
    def __init__(self) -> None:
        _at("build")
        super().__init__()

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda grad: _at("backward", grad))
        return _at("forward", x)


class SGD(torch.optim.SGD):
    def step(self, *more: Any) -> Any:
        _at("optimizer")
        return super().step(*more)


class Scheduler(torch.optim.lr_scheduler.StepLR):
    def step(self, *more: Any) -> None:
        _at("scheduler")
        super().step(*more)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(_at("loss", output), target)


def _metric(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.l1_loss(_at("metric", output), target)


def _batches(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(_STEPS):
        _at("data")
        yield x, x


def _losses(pipe: Pipeline, x: Tensor) -> Iterator[float]:
    for batch in _batches(x):
        _at("script")
        yield pipe.step(batch)
        if _PLACE == "metric":
            pipe.evaluate(batch, metric=_metric)


def main() -> None:
    _at("start-up")
    layers = [layer for _ in range(3) for layer in (partial(nn.Linear, 8, 8), Faulty)]
    optimizer, scheduler = partial(SGD, lr=0.1), partial(Scheduler, step_size=10)
    pipe = Pipeline(
        layers, _loss, num_microbatches=4, optimizer=optimizer, lr_scheduler=scheduler, stall_s=_STALL_S
    )  # fmt: skip
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    losses = pipe.train(_batches(x)) if _PLACE == "data" else _losses(pipe, x)
    for step, _ in enumerate(losses):
        if pipe.worker == 0:
            print("step", step, flush=True)
        if pipe.stopped:
            break
        time.sleep(0.02)


if __name__ == "__main__":
    main()
