"""What overtaken updates cost in loss: a GPT on the demo's text, by schedule and optimizer, three seeds each.

    python bench/convergence.py --svg docs/convergence.svg

Every run is a replay in one process of the versions that the schedule declares on 8 workers: it has the bits of the
pipeline, as `rpc-pipe verify` shows, and costs a fraction of it. Time is simulated: a microbatch takes 1 forward and 2
backward on each of 8 devices. Results are kept in --folder, so several commands may share the work.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bench.replaying import held_out, replay_of
from rpc_pipe.demo.corpus import Corpus
from rpc_pipe.demo.gpt import gpt_layers, next_byte_loss
from rpc_pipe.demo.settings import GPTConfig
from rpc_pipe.dependency import B, F
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.compute.modules.randomness import Randomness

_P, _M = 8, 8
_CONFIG = GPTConfig(width=128, depth=6, heads=4, context=64)
#: steps whose mean loss is one point of a curve
_SMOOTHED = 10
Named = Sequence[tuple[str, nn.Parameter]]


class Together(Optimizer):
    """Several optimizers as one, each for some of the parameters."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def adamw(named: Named, lr: float) -> Optimizer:
    return AdamW([parameter for _, parameter in named], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def nadam(named: Named, lr: float) -> Optimizer:
    parameters = [parameter for _, parameter in named]
    return NAdam(parameters, lr=lr, betas=(0.99, 0.999), weight_decay=0.1, decoupled_weight_decay=True)


def muon(named: Named, lr: float) -> Optimizer:
    """Muon for the matrices of blocks, AdamW for the rest: embeddings, the head, norms and biases."""
    inner = [p for name, p in named if p.ndim == 2 and 0 < int(name.split(".")[0]) <= _CONFIG.depth]
    outer = [pair for pair in named if not any(pair[1] is p for p in inner)]
    parts: list[Optimizer] = [Muon(inner, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")] if inner else []
    return Together(parts + ([adamw(outer, lr)] if outer else []))


class Case(NamedTuple):
    """A curve of the picture."""

    name: str
    schedule: str
    optimizer: Callable[..., Optimizer]
    lr: float
    colour: str
    dashed: bool = False


#: an update after every microbatch is one of an eighth of the rows, so it gets a smaller step
CASES = (
    Case("AdamW, 1f1b", "1f1b", adamw, 2e-3, "#0072b2"),
    Case("AdamW, pipedream-2bw", "pipedream-2bw", adamw, 2e-3, "#0072b2", True),
    Case("Muon, 1f1b", "1f1b", muon, 2e-3, "#d55e00"),
    Case("Muon, pipedream-2bw", "pipedream-2bw", muon, 2e-3, "#d55e00", True),
    Case("AdamW, pipedream", "pipedream", adamw, 7e-4, "#009e73", True),
    Case("NAdam 0.99, pipedream", "pipedream", nadam, 7e-4, "#cc79a7", True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="of the cases, those whose names contain this")
    parser.add_argument("--folder", default="convergence-runs")
    parser.add_argument("--svg", default="")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(parsed.folder)
    folder.mkdir(exist_ok=True)
    for seed in range(parsed.seeds):
        for case in CASES:
            if parsed.only in case.name:
                _run(case, seed, parsed.steps, parsed.rows, folder)
    found = {case: [_load(case, seed, folder) for seed in range(parsed.seeds)] for case in CASES}
    if all(all(runs) for runs in found.values()):
        _tell(found, parsed.rows)
        if parsed.svg:
            Path(parsed.svg).write_text(_draw(found, parsed.rows))


def _file(case: Case, seed: int, folder: Path) -> Path:
    return folder / f"{case.name.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def _load(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    path = _file(case, seed, folder)
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _run(case: Case, seed: int, steps: int, rows: int, folder: Path) -> None:
    if _file(case, seed, folder).is_file():
        return
    begin, corpus = time.process_time(), Corpus(None, _CONFIG.context)
    spec, randomness = make_spec(case.schedule, _P, _M), Randomness(seed)
    partition = LayerPartition(list(gpt_layers(_CONFIG)), _P, None, next_byte_loss)
    layers = [module for stage in range(_P) for _, module in partition.build(stage, randomness)]
    updates = steps * (_M if case.schedule == "pipedream" else 1)
    replay = replay_of(
        spec, layers, partition.ranges, next_byte_loss, partial(case.optimizer, lr=case.lr), randomness,
        lr_scheduler=partial(_warmed_up, updates=updates), max_grad_norm=1.0,
    )  # fmt: skip
    losses = list(replay.train(_batch(corpus, rows, seed, step) for step in range(steps)))
    loss = statistics.mean(held_out(replay, *batch) for batch in corpus.held_out_batches(16, 16))
    seconds = time.process_time() - begin
    _file(case, seed, folder).write_text(json.dumps({"losses": losses, "held_out": loss, "seconds": seconds}))
    print(f"{case.name}, seed {seed}: held-out {loss:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)


def _batch(corpus: Corpus, rows: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return random samples of the text that is not held out, the same for all cases."""
    generator = torch.Generator().manual_seed(hash((seed, step)) & 0x7FFFFFFFFFFFFFFF)
    which = torch.randint(len(corpus.training), (rows,), generator=generator).tolist()
    offsets = torch.randint(corpus.chunk - corpus.context, (rows,), generator=generator).tolist()
    starts = [corpus.training[i] * corpus.chunk + offset for i, offset in zip(which, offsets, strict=True)]
    return corpus.rows(starts)


def _warmed_up(optimizer: Optimizer, updates: int) -> LambdaLR:
    warmup = max(1, updates // 10)

    def factor(update: int) -> float:
        return min(1, (update + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, update / updates))))

    return LambdaLR(optimizer, factor)


def _times(schedule: str, steps: int) -> list[float]:
    """Return when each step ends, simulated on 8 devices."""
    return list(simulate(make_spec(schedule, _P, _M), uniform({F: 1, B: 2}), steps=steps).step_ends)


def _tell(found: dict[Case, list[dict[str, Any]]], rows: int) -> None:
    held = {case.name: [run["held_out"] for run in runs] for case, runs in found.items()}
    steps = len(next(iter(found.values()))[0]["losses"])
    parameters = sum(p.numel() for layer in gpt_layers(_CONFIG) for p in layer().parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {steps} steps of {rows} x {_CONFIG.context} bytes, {_M} microbatches")
    print(f"{'':<24}{'held-out loss':>14}{'of seeds':>24}{'time of all steps':>20}")
    for case in found:
        each = "  ".join(f"{value:.4f}" for value in held[case.name])
        print(
            f"{case.name:<24}{statistics.mean(held[case.name]):>14.4f}{each:>24}{_times(case.schedule, steps)[-1]:>20g}"
        )
    for name in ("AdamW", "Muon"):
        first, second = (statistics.mean(held[f"{name}, {s}"]) for s in ("1f1b", "pipedream-2bw"))
        print(
            f"{name}: pipedream-2bw {100 * (second / first - 1):+.2f} % of the held-out loss of 1f1b at equal samples"
        )
    print(f"{sum(run['seconds'] for runs in found.values() for run in runs):.0f} s of processor time")


def _draw(found: dict[Case, list[dict[str, Any]]], rows: int) -> str:
    """Draw loss against samples, and against simulated time."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="920" height="400" viewBox="0 0 920 400" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="920" height="400" fill="#ffffff"/>',
    ]
    for panel, title in enumerate(("bytes seen, thousands", "simulated time, steps of 1f1b")):
        lines += _panel(found, rows, panel, title)
    for number, case in enumerate(found):
        x, y = 60 + 290 * (number % 3), 362 + 20 * (number // 3)
        dash = ' stroke-dasharray="6 3"' if case.dashed else ""
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x + 34}" y2="{y}" stroke="{case.colour}" stroke-width="2"{dash}/>')
        lines.append(f'<text x="{x + 42}" y="{y + 4}">{case.name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _panel(found: dict[Case, list[dict[str, Any]]], rows: int, panel: int, title: str) -> Iterator[str]:
    left, top, width, height = 60 + 450 * panel, 20, 390, 280
    curves, step_time = {}, _times("1f1b", 1)[0]
    for case, runs in found.items():
        steps = len(runs[0]["losses"])
        ends = [end / step_time for end in _times(case.schedule, steps)]
        seen = [rows * _CONFIG.context * (step + 1) / 1000 for step in range(steps)]
        points = []
        for at in range(_SMOOTHED, steps + 1, _SMOOTHED):
            means = [statistics.mean(run["losses"][at - _SMOOTHED : at]) for run in runs]
            points.append(((ends if panel else seen)[at - 1], min(means), statistics.mean(means), max(means)))
        curves[case] = points
    right = max(points[-1][0] for points in curves.values())
    low = math.floor(10 * min(p[1] for points in curves.values() for p in points)) / 10
    high = max(points[2][3] for points in curves.values())

    def place(x: float, y: float) -> str:
        share = (min(y, high) - low) / (high - low)
        return f"{left + width * x / right:.1f},{top + height * (1 - share):.1f}"

    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999999"/>'
    for tick in range(5):
        loss, x = low + (high - low) * tick / 4, right * tick / 4
        yield f'<text x="{left - 6}" y="{top + height * (1 - tick / 4) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
        yield f'<text x="{left + width * tick / 4:.1f}" y="{top + height + 16}" text-anchor="middle">{x:.0f}</text>'
    yield f'<text x="{left + width / 2}" y="{top + height + 34}" text-anchor="middle">{title}</text>'
    yield f'<text x="{left + width - 6}" y="{top + 16}" text-anchor="end">training loss, nats a byte</text>'
    for case, points in curves.items():
        band = [place(x, least) for x, least, _, _ in points] + [place(x, most) for x, _, _, most in reversed(points)]
        dash = ' stroke-dasharray="6 3"' if case.dashed else ""
        line = " ".join(place(x, mean) for x, _, mean, _ in points)
        yield f'<polygon points="{" ".join(band)}" fill="{case.colour}" opacity="0.12"/>'
        yield f'<polyline points="{line}" fill="none" stroke="{case.colour}" stroke-width="2"{dash}/>'


if __name__ == "__main__":
    main()
