"""The script that `rpc-pipe run --model my_model.py:make` runs: train a model of the user's on its batch."""

import argparse
from functools import partial

import torch

from ..launching import launcher_link as link
from ..pipeline import Pipeline, Training
from ..verifying.proof import seeded


def main() -> None:
    """Train and report the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made = seeded(options.model, options.seed)  # all workers must draw the same batch
    training = Training(partial(torch.optim.AdamW, lr=options.lr))
    example, seed = made.batch, options.seed
    pipe = Pipeline(made.model, made.loss_fn, training=training, num_microbatches=8, example=example, seed=seed)
    for step in range(options.steps):
        loss = pipe.step(made.batch)
        if pipe.worker == 0 and not pipe.replaying:
            link.tell(kind="text", text=f"step {step + 1} of {options.steps}: loss {loss:.4f}")
        if pipe.stopped:
            break
    pipe.barrier()


if __name__.endswith("__main__"):  # with the name of its package before it, so that it may import relatively
    main()
