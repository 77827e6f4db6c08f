"""A script that is killed and resumed: it trains on tokens and notes which samples its first layer was given.

rpc-pipe run bench/killed.py --workers 4 --checkpoint-every 3 --resume auto -- SHARDS NOTES STEPS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, tokens

CONTEXT, ROWS, WINDOW, VOCABULARY = 4, 12, 2, 4096
_seen: list[int] = []


def loader(folder: str) -> Loader:
    """Return what is trained on: sample n begins with token CONTEXT n."""
    return Loader(tokens(folder, CONTEXT), rows=ROWS, window=WINDOW, memory="1MB")


class Noting(nn.Embedding):
    """Notes the samples that it is given to train on."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            _seen.extend(n // CONTEXT for n in x[:, 0].tolist())
        return super().forward(x)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.set_num_threads(1)
    folder, notes, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    layers: list[Callable[[], nn.Module]] = [
        partial(Noting, VOCABULARY, 4),
        nn.Tanh,
        nn.Tanh,
        partial(nn.Linear, 4, VOCABULARY),
    ]
    pipe = Pipeline(layers, _loss, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=4)
    with open(notes, "a") as file:
        for step, loss in enumerate(pipe.train(loader(folder))):
            if pipe.worker == 0 and _seen:  # else it is behind, and only told again
                samples, _seen[:ROWS] = _seen[:ROWS], []
                note = {"step": step, "workers": pipe.num_workers, "loss": loss, "samples": samples}
                file.write(json.dumps(note) + "\n")
                file.flush()
            if step + 1 == steps:
                break


if __name__ == "__main__":
    main()
