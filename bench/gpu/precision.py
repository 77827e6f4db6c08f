"""A GPT in bfloat16 and in float16 with a scaler: losses of a pipeline beside those of the plain loop.

    precision.py DEVICE

Prints `RESULT {name: [losses of two workers, losses of the loop]}`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch

from bench.gpu.models import gpt_layers, token_loss
from rpc_pipe import Pipeline, Training

_COUNT, _STEPS, _LENGTH = 4, 4, 32


def _batches() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(256, (8, _LENGTH + 1), generator=drawn) for _ in range(_STEPS)]


def _plain(device: torch.device, kind: torch.dtype, scaled: bool) -> list[float]:
    model = torch.nn.Sequential(*[make() for make in gpt_layers(64, 2, _LENGTH)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=scaled)
    losses = []
    for batch in _batches():
        total = torch.zeros((), device=device)
        for part in batch.to(device).chunk(_COUNT):
            with torch.autocast(device.type, kind):
                loss = token_loss(model(part[:, :-1]), part[:, 1:]) / _COUNT
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(round(float(total), 5))
    return losses


def _piped(device: torch.device, kind: torch.dtype, scaled: bool) -> list[float]:
    scaler: Any = torch.amp.GradScaler(device.type, init_scale=2.0**10) if scaled else None
    training = Training(optimizer=partial(torch.optim.SGD, lr=0.1), grad_scaler=scaler)
    layers = gpt_layers(64, 2, _LENGTH)
    losses = []
    with Pipeline(
        layers, token_loss, training=training, num_workers=2, num_microbatches=_COUNT, device=str(device), seed=0
    ) as pipe:
        for batch in _batches():
            with torch.autocast(device.type, kind):
                losses.append(round(float(pipe.step((batch[:, :-1], batch[:, 1:]))), 5))
    return losses


def main(where: str) -> None:
    """Compare."""
    device, found = torch.device(where), {}
    for name, kind, scaled in (("bfloat16", torch.bfloat16, False), ("float16 scaled", torch.float16, True)):
        both = []
        for train in (_piped, _plain):
            torch.manual_seed(0)
            both.append(train(device, kind, scaled))
        found[name] = both
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
