"""Stop, move and go on: four workers write a checkpoint, two go on from it by another schedule, with the same losses.

python resume.py

As processes, and with a script that knows nothing of checkpoints:
rpc-pipe run lora.py --workers 4 --checkpoint-every 2
rpc-pipe run lora.py --workers 2 --schedule zb-h1 --resume auto -- --steps 10
"""

import argparse
import os
import tempfile
from functools import partial

import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training


class Net(nn.Module):
    """Four blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, which depends on its number alone: no position in the data has to be kept."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :4].sum(1) > 0).long()


def train(num_workers: int, schedule: str, until: int, folder: str | None = None) -> list[float]:
    """Train until so many steps have been done, from what is in `folder` on; return the losses."""
    with Pipeline(
        Net,  # a function that makes the model: its weights follow from the seed
        nn.functional.cross_entropy,
        training=Training(
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100),
            max_grad_norm=1.0,
        ),
        schedule=schedule,
        num_workers=num_workers,
        num_microbatches=8,
        example=batch(0),  # so that it is cut, and weights can be loaded, before the first step
    ) as pipe:
        if folder and os.listdir(folder):
            restored = pipe.checkpoints.load(folder)
            print(f"{num_workers} workers go on from {restored.path.name} by {schedule}")
        losses = [pipe.step(batch(step)) for step in range(pipe.steps_done, until)]
        if folder:
            pipe.checkpoints.save(folder, keep=2)
        return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    undisturbed = train(4, "1f1b", steps)
    with tempfile.TemporaryDirectory() as folder:
        losses = train(4, "1f1b", steps // 2, folder)
        losses += train(2, "zb-h1", steps, folder)
    assert losses == undisturbed, "every bit is the same"
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}, as if nothing had been")


if __name__ == "__main__":
    main()
