"""A script in which something goes wrong on one of three workers: `tests/trials/faults.py` runs it.

rpc-pipe run tests/trials/faulty.py --workers 3 -- FAULT PLACE RANK CALL STALL_S
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training

_WHAT, _PLACE, _RANK, _CALL, _STALL_S = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
_STEPS = 100
_counted: Counter[str] = Counter()
#: more memory than this a worker that is short of it does not get
_SHORT = 2**27


class Unkind(Exception):
    """Can neither be shown nor be sent."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> NoReturn:
        raise TypeError("no bytes")

    __repr__ = __str__


def _fault(x: Any) -> Any:
    """Go wrong as was asked for; return `x` if that is not the end."""
    if _WHAT in _RAISED:
        raise _RAISED[_WHAT]
    if _WHAT in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[_WHAT])
    if _WHAT == "nan":
        return x * float("nan")
    if _WHAT == "recursion":
        return _fault(x)
    if _WHAT in _ENDLESS:
        _ENDLESS[_WHAT]()
    if _WHAT in _SHORTAGES:
        _SHORTAGES[_WHAT]()
    if _WHAT in _ENDS:
        _ENDS[_WHAT]()
    return x


_RAISED: dict[str, BaseException] = {
    "exception": ArithmeticError("the user's own fault"),
    "StopIteration": StopIteration(),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "long text": ArithmeticError("again " * 2**22),
    "unkind": Unkind(),
}
_SIGNALS = {
    "segfault": signal.SIGSEGV, "abort": signal.SIGABRT, "bus error": signal.SIGBUS, "illegal": signal.SIGILL,
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP,
}  # fmt: skip


def _print_for_ever() -> NoReturn:
    while True:
        print("again and " * 40)


def _spin() -> NoReturn:
    while True:
        pass


def _sleep() -> None:
    time.sleep(1000)


def _hold_the_lock() -> None:
    """Keep all threads of this process from running: what never ends is in C."""
    re.match(r"(a+)+$", "a" * 64 + "b")


#: what comes to no end
_ENDLESS: dict[str, Callable[[], None]] = {
    "hang": _sleep, "endless loop": _spin, "hang in C": _hold_the_lock, "prints": _print_for_ever
}  # fmt: skip


def _allocate() -> None:
    """Take memory piece by piece until there is none."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SHORT,) * 2)
    taken = [torch.ones(2**18)]
    while True:
        taken.append(torch.ones(2**18))


def _open_many() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print(len([open(os.devnull) for _ in range(99)]))


def _fill_the_disk() -> None:
    _allow_no_files()
    Path(os.environ["TMPDIR"], "x").write_bytes(bytes(99999))


def _allow_no_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))


_SHORTAGES: dict[str, Callable[[], Any]] = {
    "out of memory": partial(torch.empty, 2**60), "MemoryError": partial(bytearray, 2**60),
    "memory used up": _allocate, "no descriptors": _open_many, "disk full": _fill_the_disk,
    "full later": _allow_no_files,
}  # fmt: skip


def _leave_a_child() -> None:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_connections() -> None:
    """End every connection of this process, as a firewall may that forgets them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone, or no connection
            continue


def _close_output() -> None:
    os.close(1)
    print("nobody hears this", flush=True)


_ENDS: dict[str, Callable[[], Any]] = {
    "sys.exit": partial(sys.exit, 3), "os._exit": partial(os._exit, 0), "exit": partial(os._exit, 0),
    "closed descriptors": partial(os.closerange, 3, 4096), "forked, killed": _leave_a_child,
    "lost connections": _lose_connections, "closed output": _close_output,
}  # fmt: skip


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
        layers, _loss, num_microbatches=4, training=Training(optimizer, lr_scheduler=scheduler), stall_s=_STALL_S
    )  # fmt: skip
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    losses = pipe.train(_batches(x)) if _PLACE == "data" else _losses(pipe, x)
    for step, _ in enumerate(losses):
        if pipe.worker == 0:
            print("step", step, flush=True)
        if pipe.stopped:
            break
        time.sleep(0.02)
    Path(os.environ["TMPDIR"], f"done-{pipe.worker}").touch()


if __name__ == "__main__":
    main()
