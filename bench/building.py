"""What the making of a worker's part needs in memory, as a share of that part: every worker a process of its own.

    python -m bench.building [--workers 4] [--mb 512] [--only factory,layers,...]

For each way to give a model: the high-water mark of a worker's resident memory while `Pipeline(...)` (and then
`load_pretrained`) runs, less what the process had when a small model of the same kind had been made, divided by the
bytes of the worker's own parameters. The largest over all workers counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rpc_pipe import Pipeline

_DEPTH = 16
_ROOT = Path(__file__).parents[1]


def config(mb: float) -> Any:
    """Return the configuration of a GPT-2 of so many MB, a third of a block of which is its embedding."""
    from transformers import GPT2Config

    width = max(32, 8 * round(math.sqrt(mb * 2**20 / 4 / (12 * _DEPTH)) / 8))
    return GPT2Config(
        n_layer=_DEPTH, n_embd=width, n_head=4, vocab_size=4 * width, n_positions=128, bos_token_id=0, eos_token_id=0
    )


def gpt2(mb: float) -> nn.Module:
    """Return the model whole."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(config(mb))


def whole(mb: float) -> Pipeline:
    """A function that makes a module."""
    ids = torch.zeros(4, 16, dtype=torch.long)
    return Pipeline(
        partial(gpt2, mb), num_microbatches=4, example={"input_ids": ids, "labels": ids}, schedule="1f1b"
    )  # fmt: skip


def _width(mb: float) -> int:
    return round(math.sqrt(mb * 2**20 / 4 / _DEPTH))


def layers(mb: float) -> Pipeline:
    """A list of functions that make layers."""
    width = _width(mb)
    return Pipeline([partial(nn.Linear, width, width)] * _DEPTH, nn.functional.mse_loss, num_microbatches=4)


class Builder:
    """A builder of stages, which is told its layers."""

    num_layers = _DEPTH

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, stage: Any) -> list[nn.Module]:
        """Return the layers of a stage."""
        return [nn.Linear(self.width, self.width) for _ in stage.layers]


def builder(mb: float) -> Pipeline:
    """A builder of stages."""
    return Pipeline(Builder(_width(mb)), nn.functional.mse_loss, num_microbatches=4)


CASES: dict[str, Callable[[float], Pipeline]] = {
    "factory": whole,
    "layers": layers,
    "builder": builder,
    "pretrained": whole,
}


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def work(case: str, mb: float, folders: list[str], told: str) -> None:
    """Measure in one worker; write the figures into the folder `told`."""
    make = CASES[case]

    def build(size: float, folder: str) -> Pipeline:
        pipe = make(size)
        if folder:
            pipe.weights.load_pretrained(folder)
        return pipe

    first = build(1, folders[0])
    first.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    pipe = build(mb, folders[1])
    peak = _status("VmHWM") - before
    shards = pipe.actors[0].shards.values()
    share = sum(parameter.nbytes for shard in shards for parameter in shard.parameters())
    pipe.barrier()
    (Path(told) / f"{pipe.worker}.json").write_text(json.dumps({"peak": peak, "share": share}))


def measured(case: str, workers: int, mb: float, folders: list[str]) -> list[dict[str, int]]:
    """Run a job of so many workers; return what each has told."""
    with tempfile.TemporaryDirectory() as told:
        command = ["-m", "rpc_pipe", "run", str(Path(__file__)), "--workers", str(workers), "--"]
        typed = ["--case", case, "--mb", str(mb), "--told", told, "--folders", *folders]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        subprocess.run([sys.executable, *command, *typed], check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(told).iterdir())]


def main() -> int:
    """Print a line for each way; fail if one needs more than 1.3 times the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=512, help="size of the whole model")
    parser.add_argument("--only", default=",".join(CASES))
    for inner in ("--case", "--told"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    if options.case:
        work(options.case, options.mb, options.folders or ["", ""], options.told)
        return 0
    most = 0.0
    with tempfile.TemporaryDirectory() as root:
        for case in options.only.split(","):
            folders = ["", ""]
            if case == "pretrained":
                folders = [f"{root}/small", f"{root}/large"]
                for folder, mb in zip(folders, (1, options.mb), strict=True):
                    gpt2(mb).save_pretrained(folder, max_shard_size="50MB")  # type: ignore[operator]
            found = measured(case, options.workers, options.mb, folders)
            ratios = [each["peak"] / each["share"] for each in found]
            shares = ", ".join(f"{each['share'] / 2**20:.0f}" for each in found)
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{case:10} shares {shares} MB; peak while building {each} of the share", flush=True)
            most = max(most, *ratios)
    print(f"at most {most:.2f} (bar: 1.3)")
    return int(most > 1.3)


if __name__ == "__main__":
    sys.exit(main())
