"""A training loop with what loops have: clipping, a schedule of the learning rate, evaluation, saving.

python stream.py                              all workers are threads of this process
rpc-pipe run stream.py --workers 2 -- --steps 50
torchrun --nproc-per-node 2 stream.py
"""

import argparse
from functools import partial

import torch
from torch import nn

from rpc_pipe import Pipeline, Training


def batches(steps: int, rows: int = 64):
    """The same on every worker: each draws from its own generator with the same seed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(rows, 16, generator=generator)
        yield x, (x[:, :4].sum(1) > 0).long()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), block(), block(), nn.Linear(64, 2)]
    pipe = Pipeline(
        layers,
        nn.functional.cross_entropy,
        training=Training(
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
            max_grad_norm=1.0,
        ),
        schedule="zb-h1",
        num_microbatches=8,
        num_workers=2,
    )
    (held_out,) = batches(1, rows=256)
    for step, loss in enumerate(pipe.train(batches(steps)), 1):
        if step % 20 == 0 or step == steps:
            print(f"step {step}: loss {loss:.3f}, norm {pipe.grad_norm:.2f}, held out {pipe.evaluate(held_out):.3f}")
    pipe.weights.save("model.safetensors")


if __name__ == "__main__":
    main()
