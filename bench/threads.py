"""Which threads a step costs, and how long they wait for a core: ours, ours by RPC alone, torch's, in turns.

    python bench/threads.py [--workers 8] [--ms 2] [--rounds 2]

Compute sleeps, so all processor time is the runtime's and that of the operators around the sleep. Sums over workers,
for a step; from Linux's scheduler (proc(5), schedstat).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import group
from bench.scenarios import emulated
from bench.systems import SYSTEMS, System

_WARM_UP = 2
#: what threads are for, by their names
_PURPOSES = {"TP_UV_loop": "network", "gloo_tcp_loop": "network", "pt_thread_pool": "RPC threads"}


class Usage(NamedTuple):
    """Of a kind of thread."""

    cpu_ms: float
    #: ready to run, while others had the cores
    waiting_ms: float
    #: how often it began to wait for something
    sleeps: float


def usage() -> dict[str, Usage]:
    """Return what the threads of this process have used so far, by purpose."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        purpose = "compute" if task.name == str(os.getpid()) else _PURPOSES.get(name, "others")
        cpu_ns, waiting_ns, _ = map(int, (task / "schedstat").read_text().split())
        status = (task / "status").read_text()
        sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for i, value in enumerate((cpu_ns / 1e6, waiting_ns / 1e6, sleeps)):
            found[purpose][i] += value
    return {purpose: Usage(*values) for purpose, values in found.items()}


def observed(cls: type[System]) -> type[System]:
    """Return the system with its threads' usage written down at the end."""

    class Observed(cls):  # type: ignore[misc, valid-type]
        _done = 0
        _before: dict[str, Usage]

        def step(self) -> None:
            if self._done == _WARM_UP:
                self._before = usage()
            self._done += 1
            super().step()

        def close(self) -> None:
            steps = self._done - _WARM_UP
            found = {
                purpose: [(b - a) / steps for a, b in zip(self._before.get(purpose, (0, 0, 0)), after, strict=True)]
                for purpose, after in usage().items()
            }
            (Path(os.environ["BENCH_THREADS"]) / f"{self.rank}.json").write_text(json.dumps(found))
            super().close()

    return Observed


def measure(system: str, schedule: str, workers: int, ms: float) -> tuple[float, dict[str, Usage]]:
    """Return the median ms of a step, and the usage of all workers together, by purpose."""
    contest = emulated(workers, 2 * workers, {"F": ms, "B": 2 * ms}, 12, [(system, schedule)], scenario="threads")
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    with tempfile.TemporaryDirectory() as name:
        os.environ["BENCH_THREADS"] = name
        (job,) = contest.jobs
        group.run([job], Path(name), range(workers))
        outcomes = group.outcomes(job, 0, Path(name))
        for rank in range(workers):
            found: dict[str, Any] = json.loads((Path(name) / f"{rank}.json").read_text())
            for purpose, values in found.items():
                total[purpose] = [a + b for a, b in zip(total[purpose], values, strict=True)]
    step_ms = statistics.median(max(steps) for steps in zip(*(outcome.step_ms for outcome in outcomes), strict=True))
    return step_ms, {purpose: Usage(*values) for purpose, values in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="which threads a step costs")
    parser.add_argument("--workers", type=int, default=8, help="(8)")
    parser.add_argument("--ms", type=float, default=2, help="t_F; t_B is twice that (2)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    options = parser.parse_args()
    contestants = {"rpc-pipe": "1f1b", "rpc-pipe by RPC": "1f1b", "torch": "1F1B"}
    for name in contestants:
        SYSTEMS[f"observed {name}"] = observed(SYSTEMS[name])
    table = Table("system", "step ms", "threads", "cpu ms", "waiting for a core, ms", "sleeps")
    for _ in range(options.rounds):
        for name, schedule in contestants.items():
            step_ms, found = measure(f"observed {name}", schedule, options.workers, options.ms)
            for purpose, used in found.items():
                if used.cpu_ms >= 0.5:
                    row = (f"{used.cpu_ms:.1f}", f"{used.waiting_ms:.1f}", f"{used.sleeps:.0f}")
                    table.add_row(name, f"{step_ms:.0f}", purpose, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
