"""Runs jobs one after the other, each in processes of its own: forks of this one, which has imported torch.

    python -m bench.group SCENARIO CONTEST ROUNDS FOLDER --ranks 0-3        one host's share of the workers

Rank r writes FOLDER/NUMBER-r.json. A job that fails or outlasts its deadline is ended, said why, and the next begins.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpc_pipe.boards import run_folders

from .devices import calibrate, instantly
from .systems import SYSTEMS, Job, reference

_DEADLINE_S = 60.0


class Outcome(NamedTuple):
    """What one rank found."""

    #: how long each step took, ms
    step_ms: list[float]
    #: the largest difference of a gradient to one process's, relative to the largest gradient
    error: float
    peak_rss_mb: float
    #: processor time of a step, all threads, ms
    cpu_ms: float = 0
    failure: str | None = None


def run(jobs: Iterable[Job], folder: Path, ranks: Sequence[int], first: int = 0) -> None:
    """Run this host's `ranks` of all `jobs`, in turn; jobs are numbered from `first`."""
    calibrate()
    for number, job in enumerate(jobs, first):
        children = {}
        here = [rank for rank in ranks if rank < job.workers]
        for rank in here:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                os.environ["LOCAL_WORLD_SIZE"] = str(len(here))  # as torchrun tells it
                _be(job, rank, folder, number)
            children[child] = rank
        _wait(children, time.monotonic() + _DEADLINE_S)


def outcomes(job: Job, number: int, folder: Path) -> list[Outcome]:
    """Read what the ranks of a job wrote; a rank that wrote nothing was killed."""
    found = []
    for rank in range(job.workers):
        path = folder / f"{number}-{rank}.json"
        lost = Outcome([], 0, 0, 0, f"worker {rank} did not end within {_DEADLINE_S:g} s")
        found.append(Outcome(*json.loads(path.read_text())) if path.exists() else lost)
    return found


def _wait(children: dict[int, int], deadline: float) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            del children[pid]
            if status:
                deadline = min(deadline, time.monotonic() + 5)  # the others cannot go on for long
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)


def _be(job: Job, rank: int, folder: Path, number: int) -> None:
    """The life of a worker. What the systems print is kept apart from the tables."""
    status = 1
    try:
        log = os.open(folder / f"{number}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _environment(job, rank, folder, number)
        outcome = _measure(job, rank)
        status = 0
    except BaseException as error:
        outcome = Outcome([], 0, 0, 0, "".join(traceback.format_exception(error)))
    (folder / f"{number}-{rank}.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(status)


def _environment(job: Job, rank: int, folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.workers), run_folders.FOLDER: str(folder)}
    host = os.environ.get("HOST_ADDR_0")
    if host is None:
        meeting = f"file://{folder}/meet-{number}"
        os.environ |= {"BENCH_MEETING": meeting, "RPC_PIPE_INIT": f"{meeting}-0"}
    else:
        port = 20000 + number * 10
        interface = os.environ["HOST_IFACE"]
        os.environ |= {"RPC_PIPE_TRUST_NETWORK": "on", "RPC_PIPE_INTERFACE": interface}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "BENCH_MEETING": f"{host}:{port // 10}"}
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}


def _measure(job: Job, rank: int) -> Outcome:
    system = SYSTEMS[job.system](job, rank)
    system.step()
    error = _difference(system.gradients(), job)
    for _ in range(job.warm_up - 1):
        system.step()
    cpu, ends = time.process_time(), [time.perf_counter()]
    for _ in range(job.steps):
        system.step()
        ends.append(time.perf_counter())
    steps = [1e3 * (b - a) for a, b in pairwise(ends)]
    cpu_ms = 1e3 * (time.process_time() - cpu) / job.steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    system.close()
    return Outcome(steps, error, peak, cpu_ms)


def _difference(own: dict[int, Any], job: Job) -> float:
    with instantly():
        wanted = reference(job.workload, job.num_stages)
    worst = 0.0
    for stage, gradients in own.items():
        assert len(gradients) == len(wanted[stage]), f"stage {stage} has {len(gradients)} gradients"
        for gradient, right in zip(gradients, wanted[stage], strict=True):
            if gradient is None:  # another worker's, of a system that divides them
                continue
            worst = max(worst, float((gradient - right).abs().max() / right.abs().max().clamp_min(1e-30)))
    return worst


if __name__ == "__main__":
    from .scenarios import SCENARIOS

    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("contest", type=int, help="number of the contest in its scenario")
    parser.add_argument("rounds", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    low, high = map(int, options.ranks.split("-"))
    chosen = list(SCENARIOS[options.scenario](options.quick))[options.contest]
    run(chosen.turns(options.rounds), options.folder, range(low, high + 1))
