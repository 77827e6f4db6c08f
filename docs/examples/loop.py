"""A whole training loop: best weights, early stopping, resuming, a rate that falls on a plateau, samples, a log.

python loop.py                    two workers as threads; again goes on where it has stopped
rpc-pipe run loop.py --workers 2  two processes; Ctrl-C stops after the step and writes a checkpoint
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpc_pipe import Pipeline, Training


class Log:
    """Writes numbers to a file as lines of JSON; `wandb.init(...)` has the same `log`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Write the numbers of a step."""
        print(json.dumps({"step": step, **numbers}), file=self._file, flush=True)


def batches(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches that depend on their numbers alone, alike on every worker."""
    found = []
    for number in range(first, first + count):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
        found.append((x, (x[:, :4].sum(1) > 0).long()))
    return found


def scores(output: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return the metrics of a microbatch: a mean, and a number with the weight that it has among others."""
    hits = (output.argmax(1) == targets).sum()
    return {"loss": nn.functional.cross_entropy(output, targets), "accuracy": (hits, len(targets))}


def show_samples(pipe: Pipeline, step: int) -> None:
    """Show something of the model; every worker calls this, one gets the output."""
    x, y = batches(9000, 1)[0]
    if (output := pipe.predict(x, to=0)) is not None:
        print(f"step {step}: predicted {output.argmax(1)[:8].tolist()}, right is {y[:8].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a better one before the end")
    parser.add_argument("--folder", type=Path, default=Path("loop"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)

    layers = [partial(nn.Linear, 16, 32), nn.Tanh, partial(nn.Linear, 32, 32), partial(nn.Linear, 32, 2)]
    pipe = Pipeline(
        layers,
        nn.functional.cross_entropy,
        training=Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=1.0),
        num_microbatches=4,
        num_workers=int(os.environ.get("WORLD_SIZE", 2)),
    )
    falls = [ReduceLROnPlateau(optimizer, patience=1) for optimizer in pipe.optimizers]  # of this process
    best, waited = float("inf"), 0

    checkpoints = options.folder / "checkpoints"
    if any(checkpoints.glob("step-*")):
        kept = pipe.checkpoints.load(checkpoints).extra
        best, waited = kept["best"], kept["waited"]
        for fall in falls:
            fall.load_state_dict(kept["fall"])

    if pipe.worker == 0:
        log = Log(options.folder / "log.jsonl")
        pipe.on_step(lambda report: log.log(report._asdict(), step=report.step))

    held_out = batches(5000, 4)
    for batch in batches(pipe.steps_done, options.steps - pipe.steps_done):
        pipe.step(batch)
        if pipe.steps_done % options.every == 0 or pipe.stopped:
            found = pipe.evaluate(held_out, metric=scores)  # the same on every worker, so all decide alike
            for fall in falls:
                fall.step(found["loss"])
            is_best = found["loss"] < best
            best, waited = min(best, found["loss"]), 0 if is_best else waited + 1
            if is_best:
                pipe.weights.save(options.folder / "best.safetensors")
            show_samples(pipe, pipe.steps_done)
            if pipe.worker == 0:
                log.log({"held_out": found, "best": is_best, "rate": pipe.learning_rate}, step=pipe.steps_done)
            extra = {"best": best, "waited": waited, "fall": falls[0].state_dict() if falls else {}}
            pipe.checkpoints.save(checkpoints, keep=2, extra=extra)
        if pipe.stopped or waited >= options.patience:
            break
    if pipe.worker == 0:
        print(f"{pipe.steps_done} steps, best held-out loss {best:.3f}")


if __name__ == "__main__":
    main()
