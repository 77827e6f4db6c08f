"""A GPT's step by the plain loop or a pipeline:  train.py plain|pipe SIZES MICROBATCHES STEPS [compile]

SIZES: width,depth,length,rows. Prints one line, `RESULT {...}`: ms a step, peak memory, losses, host waits a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.models import gpt_layers, token_loss
from bench.gpu.runner import NOT_HERE

_WARM = 3


def main(mode: str, sizes: str, microbatches: str, steps: str, *more: str) -> None:
    """Measure."""
    width, depth, length, rows = map(int, sizes.split(","))
    device, count = torch.device(os.environ.get("GPU_DEVICE", "cpu")), int(microbatches)
    on_gpu = device.type != "cpu"
    drawn = torch.Generator().manual_seed(0)
    data = [torch.randint(256, (rows, length + 1), generator=drawn) for _ in range(4)]
    torch.manual_seed(0)
    layers = gpt_layers(width, depth, length)
    run = (_plain if mode == "plain" else _piped)(layers, device, count, "compile" in more)
    wait: Callable[[], Any] = torch.accelerator.synchronize if on_gpu else lambda: None
    times, losses = [], []
    for number in range(_WARM + int(steps)):
        if number == _WARM and on_gpu:
            torch.accelerator.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        losses.append(run(data[number % 4]))
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    timed = times[_WARM:]
    found: dict[str, Any] = {"ms": round(statistics.median(timed), 2), "min": round(min(timed), 2)}
    if on_gpu:
        found["GiB"] = round(torch.accelerator.max_memory_allocated(device) / 2**30, 2)
        found["waits"] = _host_waits(lambda: run(data[0])) if device.type == "cuda" else NOT_HERE
    found["losses"] = [round(loss, 5) for loss in losses[:_WARM]]
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(found), flush=True)


def _plain(layers: Any, device: torch.device, count: int, compiled: bool) -> Callable[[torch.Tensor], float]:
    model = torch.nn.Sequential(*[make().to(device) for make in layers])
    for block in model if compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(batch: torch.Tensor) -> float:
        total = torch.zeros((), device=device)
        for part in batch.to(device).chunk(count):
            with torch.autocast(device.type, torch.bfloat16):
                loss = token_loss(model(part[:, :-1]), part[:, 1:]) / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def _piped(layers: Any, device: torch.device, count: int, compiled: bool) -> Callable[[torch.Tensor], float]:
    from rpc_pipe import Pipeline, Training

    training = Training(optimizer=partial(torch.optim.AdamW, lr=3e-4))
    pipe = Pipeline(layers, token_loss, training=training, num_microbatches=count, compile=compiled)

    def step(batch: torch.Tensor) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            return float(pipe.step((batch[:, :-1], batch[:, 1:])))

    return step


def _host_waits(step: Callable[[], Any]) -> int:
    """Return how often the host waits for a CUDA device in a step, as far as torch sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
