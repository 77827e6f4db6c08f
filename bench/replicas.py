"""How much of the replicas' exchange is hidden: 2 stages x 2 replicas on emulated devices and a slow uplink.

python bench/replicas.py                 devices of 20 and 40 ms, gradients that take 40 ms on the link: step times as
                                         measured and as simulated, and the share of the exchange that a step does not
                                         become longer by
python bench/replicas.py --replicas 4    the same with more replicas, which share the uplink of each worker

Each worker has an uplink that sends one payload of gradients or parameters after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

from bench import devices
from bench.uplink import Uplink
from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import NO_REDUCTIONS, Action, B, F, G, P, S
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec

_STAGES, _PARTS, _MICROBATCHES, _STEPS = 2, 12, 8, 12
_FORWARD_MS, _BACKWARD_MS, _LINK_MS = 20, 40, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    replicas: int = parsed.replicas
    if parsed.out:
        _train(Path(parsed.out))
        return
    for zero in (0, 1):
        steps = {
            link_ms: (_measured(zero, link_ms, replicas), _simulated(zero, link_ms, replicas))
            for link_ms in (0, _LINK_MS)
        }
        for link_ms, (measured, simulated) in steps.items():
            print(f"zero {zero}, link {link_ms} ms: step {measured:.1f} ms, simulated {simulated:.1f}, "
                  f"{measured / simulated - 1:+.1%}")  # fmt: skip
        exposed = steps[_LINK_MS][0] - steps[0][0]
        whole = _STAGES * _LINK_MS * 2 * (replicas - 1) / replicas
        back = _LINK_MS * (replicas - 1) / replicas * zero  # to the first stage, after its update
        hidden, but_back = 1 - exposed / whole, 1 - (exposed - back) / (whole - back)
        print(
            f"zero {zero}: {exposed:.1f} of {whole:.1f} ms exposed, {hidden:.0%} hidden; without what comes back to "
            f"the first stage {but_back:.0%}",
            flush=True,
        )


def _measured(zero: int, link_ms: float, replicas: int) -> float:
    """Return the median time of a step, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times"
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(_STAGES * replicas)]
        command += ["--replicas", str(replicas), "--zero", str(zero), "--bucket", str(4 * devices.WIDTH / 2**20)]
        command += ["--transport", "zmq", "--", "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "LINK_MS": str(link_ms)}, stdout=subprocess.DEVNULL)
        times: list[float] = json.loads(out.read_text())
        return median(times)


def _simulated(zero: int, link_ms: float, replicas: int) -> float:
    spec = make_spec("1f1b", _STAGES * replicas, _MICROBATCHES, {"replicas": replicas, "zero": zero})
    buckets = _PARTS // replicas
    relation = Relation(spec, _STEPS, NO_REDUCTIONS._replace(buckets=(buckets,) * _STAGES))
    uplinks = dict.fromkeys(range(spec.num_workers), 1.0)

    def payload(action: Action) -> float:  # bytes are such that one takes 1 ms
        return link_ms / replicas / buckets if action.kind in (G, P, S) else 0

    def cost(action: Action) -> float:
        return {F: _FORWARD_MS, B: _BACKWARD_MS}.get(action.kind, 0)

    return simulate(relation, cost, uplinks=uplinks, payload=payload).step_time


def _train(out: Path) -> None:
    """One worker's process; the first writes the times of steps."""
    devices.calibrate()
    torch.set_num_threads(1)
    link_ms = float(os.environ["LINK_MS"])
    if link_ms:
        Uplink(4 * devices.WIDTH * _PARTS / link_ms * 1e3).carry_ours()

    def stage() -> nn.Module:
        each = [devices.Times(ms / 1e3 / _PARTS, 1) for ms in (_FORWARD_MS, _BACKWARD_MS)]
        return nn.Sequential(*[devices.Device(*each, part=part, parts=_PARTS) for part in range(_PARTS)])

    training = Training(lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-9))
    pipe = Pipeline([stage] * _STAGES, nn.functional.mse_loss, training=training, num_microbatches=_MICROBATCHES)
    x = torch.randn(_MICROBATCHES, devices.WIDTH, generator=torch.Generator().manual_seed(0))
    ends = [time.perf_counter() for _ in pipe.train((x, x) for _ in range(_STEPS))]
    if pipe.worker == 0:
        out.write_text(json.dumps([1e3 * (b - a) for a, b in pairwise(ends[2:])]))


if __name__ == "__main__":
    main()
