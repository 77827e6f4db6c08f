"""Run exported schedules in torch's own pipeline runtime on gloo and compare gradients with one process.

Arguments: rank, number of ranks, rendezvous file, folder of CSV files. Prints "equal NAME" for each file.
"""

import csv
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ROWS = 8, 2


def layer(stage: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(stage)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    for parameter in linear.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return nn.Sequential(linear, nn.Tanh())


def run(path: Path, rank: int) -> None:
    rows = list(csv.reader(path.open()))
    stages_of = [sorted({int(cell.split(kind)[0]) for cell in row for kind in "FBIW" if kind in cell}) for row in rows]
    count = 1 + max(stage for stages in stages_of for stage in stages)
    microbatches = sum(cell.startswith("0F") for row in rows for cell in row)
    generator = torch.Generator().manual_seed(99)
    x, y = torch.randn(2, microbatches * ROWS, WIDTH, generator=generator, dtype=torch.float64)

    layers = {stage: layer(stage) for stage in stages_of[rank]}
    stages = [PipelineStage(layers[s], s, count, torch.device("cpu")) for s in stages_of[rank]]
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(path), format="compute_only")
    inputs = (x,) if 0 in stages_of[rank] else ()
    targets = {"target": y} if count - 1 in stages_of[rank] else {}
    schedule.step(*inputs, **targets)

    whole = nn.Sequential(*(layer(stage) for stage in range(count)))
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        (nn.functional.mse_loss(whole(part), target) / microbatches).backward()
    for stage, module in layers.items():
        for found, expected in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)
    print(f"equal {path.stem}", flush=True)


def main() -> None:
    rank, ranks, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=limit)
    for path in sorted(folder.glob("*.csv")):
        run(path, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
