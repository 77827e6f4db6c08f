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
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import LlamaConfig, LlamaForCausalLM

from rpc_pipe import Pipeline, Training


class Log:
    """Writes numbers to a file as lines of JSON; `wandb.init(...)` has the same `log`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Write the numbers of a step."""
        print(json.dumps({"step": step, **numbers}), file=self._file, flush=True)


def batches(first: int, count: int) -> list[dict[str, Tensor]]:
    """Return batches that depend on their numbers alone, alike on every worker: rows that count by 1 to 4."""
    found = []
    for number in range(first, first + count):
        draws = torch.Generator().manual_seed(number)
        begin, by = torch.randint(32, (32, 1), generator=draws), torch.randint(1, 5, (32, 1), generator=draws)
        rows = (begin + by * torch.arange(12)) % 32
        found.append({"input_ids": rows, "labels": rows})
    return found


def scores(output: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the metrics of a microbatch: a mean, and a number with the weight that it has among others."""
    guesses, right = output.logits[:, 1:-1].argmax(-1), batch["labels"][:, 2:]  # two tokens tell how a row counts
    return {"loss": output.loss, "accuracy": ((guesses == right).sum(), right.numel())}


def show_samples(pipe: Pipeline, step: int) -> None:
    """Show how the model counts; every worker calls this, and gets the text."""
    text = pipe.generate(torch.tensor([[1, 2], [3, 6]]), max_new_tokens=6, do_sample=False)
    if pipe.worker == 0:
        print(f"step {step}: {text.tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a better one before the end")
    parser.add_argument("--folder", type=Path, default=Path("loop"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    pipe = Pipeline(
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)),
        training=Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=1.0),
        num_microbatches=4,
        num_workers=int(os.environ.get("WORLD_SIZE", 2)),
        example=batches(0, 1)[0],  # cuts the model now, so that there are optimizers
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
