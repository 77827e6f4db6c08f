"""Two stages of two members each, against torch.distributed.pipelining with `fully_shard`, in one run over gloo.

    python bench/members.py [--rounds 3] [--steps 6] [--width 256] [--json FILE]

Systems take turns. Both train the same GPT blocks by 1F1B and AdamW, on the same rows, with one thread a process:
gradients are summed once a step. rpc-pipe gathers a block for a forward or backward, unless the last action has ended
with it; torch's pipelining gathers all blocks of a stage for a backward, and keeps them until the next forward. `kept`
keeps gathered blocks for a whole step, as torchtitan does under a pipeline, and holds the memory of no sharding
meanwhile. A step's time is the median over steps that follow each other; CPU seconds a step are of all processes, which
the load of a machine changes less. The losses after the same steps must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

_SYSTEMS = "rpc-pipe", "torch", "rpc-pipe kept", "torch kept"
_BLOCKS, _LENGTH, _MICROBATCHES, _ROWS = 4, 128, 8, 4
_WARM_UP, _PROCESSES = 2, 4


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally, and transform each token."""
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.behind(x))))
        return result


def _blocks(width: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(width) for _ in range(_BLOCKS)]


def _batch(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, _MICROBATCHES * _ROWS, _LENGTH, width, generator=generator)
    return x, y


def _ours(width: int, kept: bool) -> Callable[[], float | None]:
    from rpc_pipe import Pipeline, Training

    training = Training(partial(torch.optim.AdamW, lr=1e-4))
    pipe = Pipeline(
        _blocks(width), nn.functional.mse_loss, num_microbatches=_MICROBATCHES, members=2,
        shard="fsdp-kept" if kept else "fsdp", training=training,
    )  # fmt: skip
    return partial(pipe.step, _batch(width))


def _theirs(width: int, kept: bool) -> Callable[[], float | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, member = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = nn.Sequential(*_blocks(width)[2 * at : 2 * at + 2])
    for block in module:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=not kept)
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=not kept)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stage = PipelineStage(module, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, _MICROBATCHES // 2, loss_fn=nn.functional.mse_loss)
    # A member's microbatches are the ones that rpc-pipe gives it.
    x, y = (torch.cat(t.split(_ROWS)[member::2]) for t in _batch(width))

    def step() -> float | None:
        losses: list[Tensor] = []
        if at == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses or [torch.zeros(())]).mean().detach()
        distributed.all_reduce(loss, group=mesh.get_group("dp"))
        return float(loss) / 2 if losses else None

    return step


def _be(system: str, width: int, steps: int) -> None:
    """Train as one of the processes; one of the last stage prints its times and its loss."""
    torch.set_num_threads(1)
    kept = system.endswith("kept")
    step = _ours(width, kept) if system.startswith("rpc-pipe") else _theirs(width, kept)
    loss = [step() for _ in range(_WARM_UP)][-1]
    took, cpu = [], time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        loss = step()
        took.append(1e3 * (time.perf_counter() - begin))
    line = json.dumps({"ms": took, "loss": loss, "cpu": 1e3 * (time.process_time() - cpu) / steps})
    print(f"{line}\n", end="", flush=True)
    if distributed.is_initialized():
        distributed.barrier()


def _turn(system: str, width: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_PROCESSES)]
    command += [__file__, "--be", system, "--width", str(width), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RPC_PIPE_RUNS": "off"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found = [json.loads(line[line.index('{"ms"') :]) for line in done.stdout.splitlines() if '{"ms"' in line]
    if done.returncode or len(found) != _PROCESSES:
        raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    of_last = next(each for each in found if each["loss"] is not None)
    return {**of_last, "cpu": sum(each["cpu"] for each in found)}


def _layer_ms(width: int) -> float:
    """Return the time of a forward of one block on a microbatch, alone."""
    torch.set_num_threads(1)
    block, x = _blocks(width)[0], _batch(width)[0][:_ROWS]

    def took() -> Iterator[float]:
        for _ in range(10):
            begin = time.perf_counter()
            block(x)
            yield 1e3 * (time.perf_counter() - begin)

    return statistics.median(took())


def main() -> None:
    """Run the race, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--be", choices=_SYSTEMS, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.be:
        _be(typed.be, typed.width, typed.steps)
        return
    layer = _layer_ms(typed.width)
    print(f"a forward of a block takes {layer:.1f} ms; load {os.getloadavg()[0]:.1f}", flush=True)
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in _SYSTEMS}
    for _ in range(typed.rounds):
        for system in _SYSTEMS:
            found[system].append(_turn(system, typed.width, typed.steps))
    losses = [turn["loss"] for turns in found.values() for turn in turns]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise SystemExit(f"losses differ: {losses}")
    rows = {}
    for system, turns in found.items():
        low, median, high = statistics.quantiles([ms for turn in turns for ms in turn["ms"]], n=4)
        cpu = statistics.median(turn["cpu"] for turn in turns)
        rows[system] = {"median_ms": median, "quartiles_ms": [low, high], "cpu_ms": cpu}
    for system, row in rows.items():
        ours = rows["rpc-pipe kept" if system.endswith("kept") else "rpc-pipe"]
        row["speed_of_rpc_pipe"] = row["median_ms"] / ours["median_ms"]
        print(
            f"{system:13} {row['median_ms']:8.1f} ms ({row['quartiles_ms'][0]:.1f} - {row['quartiles_ms'][1]:.1f})"
            f"  {row['cpu_ms']:6.0f} ms of CPU  rpc-pipe is {row['speed_of_rpc_pipe']:.2f} x as fast, "
            f"and takes {ours['cpu_ms'] / row['cpu_ms']:.2f} x the CPU"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    if typed.json:
        typed.json.write_text(json.dumps({"layer_ms": layer, "systems": rows}))


if __name__ == "__main__":
    main()
