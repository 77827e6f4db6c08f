"""Plans that are run as a user would: predicted, measured, and the best that was measured.

    python -m bench.plan                      all cases
    python -m bench.plan --case bert unequal  some of them
    python -m bench.plan --emulated, --real   of one kind
    python -m bench.plan --host-emulator FILE a worker on each of two hosts, which that program emulates

Each case calls `rpc-pipe plan`, which measures the model with all workers at once, and `rpc-pipe run --plan` for the
best plans of different schedules; nothing of it is told to the planner. Layers that sleep emulate devices; the others
compute, on two workers of one thread each, which needs a quiet machine. Milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

_MODELS = Path(__file__).parent / "plan_models.py"
_ROOT = Path(__file__).parents[1]
#: of the batches of layers that sleep
_ROWS = 16


@dataclass(frozen=True)
class Case:
    """A model on workers."""

    name: str
    make: str
    workers: int
    #: of `rpc-pipe plan`
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    emulated: bool = True
    #: options of the program that emulates hosts, if each worker is on one of its own
    network: Sequence[str] = ()

    def model(self) -> str:
        """Return how it is named on the command line."""
        return f"{_MODELS}:{self.make}"


CASES = (
    Case("even", "make_even", 4, ["--microbatches", "4"]),
    Case("unequal", "make_even", 4, ["--microbatches", "4"], {"SLOW": "1,2,1,1.5"}),
    Case("two", "make_seven", 2, ["--microbatches", "4"], {"SLOW": "1,3"}),
    Case("memory", "make_wide", 4, ["--microbatches", "4", "--memory", "16MB"]),
    Case("many", "make_many", 4, ["--microbatches", "8"]),
    Case("uneven", "make_uneven", 3, ["--microbatches", "4,8"]),
    Case("far", "make_seven", 2, ["--microbatches", "8"], network=["--delay", "10ms", "--rate", "100mbit"]),
    Case("gpt", "make_gpt", 2, ["--microbatches", "4,8"], emulated=False),
    Case("bert", "make_bert", 2, ["--microbatches", "4,8"], emulated=False),
    Case("resnet", "make_resnet", 2, ["--microbatches", "4,8"], emulated=False),
    Case("t5", "make_t5", 2, ["--microbatches", "4,8"], emulated=False),
)


def rpc_pipe(arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Run a command and return what it prints as JSON."""
    command = [sys.executable, "-m", "rpc_pipe", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {ran.stderr.strip().splitlines()[-1:]}")
    return json.loads(ran.stdout)


def on_hosts(arguments: Sequence[str], case: Case, emulator: Path) -> Any:
    """Run a command with a worker on each of two emulated hosts, and return what the first prints as JSON."""
    torchrun = (
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
    )
    inside = f"{torchrun} --rdzv-endpoint $HOST_ADDR_0:29400 -m rpc_pipe {shlex.join([*arguments, '--json'])}"
    command = [sys.executable, str(emulator), *case.network, "--timeout", "120", "--", "sh", "-c", inside]
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "RPC_PIPE_TRUST_NETWORK": "on", **case.environment}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150, check=False)
    told = [line[len("[h0] ") :] for line in ran.stdout.splitlines() if line.startswith("[h0] {")]
    if not told:
        raise RuntimeError(f"{' '.join(arguments)}: {ran.stderr.strip().splitlines()[-1:]}")
    return json.loads(told[-1])


def planned(case: Case, folder: Path, emulator: Path | None) -> Any:
    """Return what `rpc-pipe plan` says."""
    profile = ["--profile", str(folder / f"{case.name}.json")]
    asked = ["--workers", str(case.workers), "--seconds", "6", *profile, *case.options]
    if not case.network:
        return rpc_pipe(["plan", case.model(), "--again", *asked], case.environment)
    assert emulator is not None
    counts = case.options[list(case.options).index("--microbatches") + 1].split(",")
    rows = ",".join(str(_ROWS // int(count)) for count in counts)
    on_hosts(["profile", case.model(), *profile, "--rows", rows], case, emulator)
    return rpc_pipe(["plan", "--batch", str(_ROWS), *asked], case.environment)


def run(case: Case, folder: Path, options: argparse.Namespace) -> list[tuple[dict[str, Any], float]]:
    """Return the best plans of different schedules, and the time of a step of each.

    They run in turn, as a machine that others use too is faster at one time than at another.
    """
    found = planned(case, folder, options.host_emulator)
    plans: dict[str, dict[str, Any]] = {}
    for plan in found["plans"]:
        plans.setdefault(plan["schedule"], plan)
    best = list(plans.values())[: options.plans]
    took: list[list[float]] = [[] for _ in best]
    for _ in range(options.rounds):
        for number, plan in enumerate(best):
            path = folder / f"{case.name}-{number}.json"
            path.write_text(json.dumps({"plans": [plan]}))
            asked = ["run", "--model", case.model(), "--plan", str(path), "--steps", str(options.steps)]
            took[number].append(rpc_pipe(asked, case.environment)["step_ms"])
    return [(plan, median(times)) for plan, times in zip(best, took, strict=True)]


def name_of(plan: Mapping[str, Any]) -> str:
    """Return a plan's schedule with its parameters and microbatches."""
    parameters = ",".join(f"{key}={value}" for key, value in plan["parameters"].items())
    again = f" recompute {'+'.join(map(str, plan['recompute']))}" if plan["recompute"] else ""
    return f"{plan['schedule']} {parameters}".strip() + f" M={plan['num_microbatches']}{again}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", default=[case.name for case in CASES], help="names of cases (all)")
    parser.add_argument("--emulated", action="store_true", help="only those whose layers sleep")
    parser.add_argument("--real", action="store_true", help="only those whose layers compute")
    parser.add_argument("--plans", type=int, default=3, help="that are run of each case (3)")
    parser.add_argument("--steps", type=int, default=16, help="of each plan (16); the median of the last 12 counts")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run, in turn; the median counts (3)")
    parser.add_argument("--host-emulator", type=Path, help="program that runs a command in two emulated hosts")
    options = parser.parse_args()
    print(f"{'case':<9}{'plan':<34}{'predicted':>10}{'measured':>10}{'off':>8}{'to best':>8}  cut")
    for case in CASES:
        kinds = case.emulated or not options.emulated, not case.emulated or not options.real
        if case.name not in options.case or not all(kinds) or (case.network and options.host_emulator is None):
            continue
        with TemporaryDirectory() as folder:
            ran = run(case, Path(folder), options)
        best = min(took for _, took in ran)
        for plan, took in ran:
            predicted = plan["predicted_ms"]
            print(
                f"{case.name:<9}{name_of(plan):<34}{predicted:10.2f}{took:10.2f}{predicted / took - 1:+8.1%}"
                f"{took / best - 1:+8.1%}  {','.join(map(str, plan['cut']))}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
