"""Kill a job while it saves, over and over: the checkpoint before must load each time.

    python bench/checkpoints.py [--kills 50] [--mb 20]

Prints how many of the kills fell into a save, and what could be loaded afterwards. Exits non-zero if anything was lost.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rpc_pipe.checkpoints import folder
from rpc_pipe.checkpoints.reading import Checkpoint

_CODE = """
import sys
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training

width = int((float(sys.argv[2]) * 2**20 / 4 / 3 / 4) ** 0.5)
layers = [partial(nn.Linear, width, width) for _ in range(4)]
pipe = Pipeline(layers, nn.functional.mse_loss, training=Training(partial(torch.optim.AdamW, lr=1e-3)), num_workers=2,
                num_microbatches=2)
x = torch.ones(2, width)
pipe.step((x, x))
while True:
    print(pipe.checkpoints.save(sys.argv[1], keep=3).name, flush=True)
    pipe.step((x, x))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mb", type=float, default=20, help="size of a checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, lost, inside, took = random.Random(options.seed), 0, 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        place = Path(root) / "checkpoints"
        for _ in range(options.kills):
            job = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(place), str(options.mb)], stdout=subprocess.PIPE, text=True
            )
            assert job.stdout is not None
            names = [job.stdout.readline().strip()]
            begin = time.perf_counter()
            names.append(job.stdout.readline().strip())
            took = time.perf_counter() - begin
            time.sleep(chance.uniform(0, 2 * took))
            job.kill()
            names += [line.strip() for line in job.communicate()[0].splitlines()]
            inside += any(path.name.startswith(".step-") for path in place.iterdir())
            lost += not _loads(place, names[-1])
    print(f"{options.kills} kills, {inside} of them while saving (a save takes {1e3 * took:.0f} ms): {lost} lost")
    return int(lost > 0)


def _loads(place: Path, last: str) -> bool:
    """Whether the newest checkpoint is whole and at least as new as the last that was said to be complete."""
    checkpoint = Checkpoint(place)
    tensors = checkpoint.tensors("model", checkpoint.names)
    newest = folder.complete(place)[-1]
    return newest.name >= last and all(tensor.isfinite().all() for tensor in tensors.values())


if __name__ == "__main__":
    sys.exit(main())
