"""Draw jobs of three values and more of dimensions that are not the default, and compare them with one process.

    python tests/trials/crossings.py [--count 100] [--seed 0] [--members]

Prints each job that is not refused and differs, or fails, with the arguments that repeat it alone (`--only`). With
`--members` jobs are of four processes, several jobs one after the other in each set of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import crossings  # noqa: E402
from crossings import DEFAULTS, DIMENSIONS, described, excluded, tried  # noqa: E402

#: dimensions of a drawn job that have another value than the default, and cases of one set of processes
_MOST, _OF_A_JOB = 5, 40


def drawn(seed: int, with_members: bool) -> dict[str, str]:
    """Return the case of a seed."""
    draw = random.Random(seed)
    while True:
        names = draw.sample(sorted(DIMENSIONS.keys() - {"members"}), draw.randint(2 if with_members else 3, _MOST))
        case = {**DEFAULTS, **{name: draw.choice(DIMENSIONS[name][1:]) for name in names}}
        if with_members:
            case["members"] = draw.choice(DIMENSIONS["members"][1:])
        if not excluded(case):
            return case


def by_processes(cases: list[dict[str, str]]) -> Iterator[tuple[dict[str, str], tuple[str, str]]]:
    """Yield each case with its end, of jobs of four processes; a failure ends a job, and the next one goes on."""
    done = 0
    while done < len(cases):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "cases.json").write_text(json.dumps(cases[done : done + _OF_A_JOB]))
            there = {"WORLD_SIZE": "4", "RPC_PIPE_INIT": f"file://{folder}/meeting", "RPC_PIPE_LOGS": "off"}
            there |= {"CROSSINGS": folder, "OMP_NUM_THREADS": "1"}
            typed = [sys.executable, crossings.__file__, f"{folder}/cases.json"]
            processes = [
                subprocess.Popen(
                    typed, env={**os.environ, **there, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                for rank in range(4)
            ]  # fmt: skip
            try:
                out, _ = processes[0].communicate(timeout=60 + 20 * _OF_A_JOB)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            ends = [json.loads(line) for line in out.splitlines() if line.startswith("[")] or [["FAILED", "no word"]]
            yield from zip(cases[done:], ends, strict=False)
            done += len(ends)


def main() -> None:
    """Run the trials and print what is wrong, and how all ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", action="store_true")
    parser.add_argument("--only", action="store_true", help="the case of --seed alone")
    typed = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(typed.seed, typed.seed + (1 if typed.only else typed.count))
    cases = [drawn(seed, typed.members) for seed in seeds]
    ends = by_processes(cases) if typed.members else ((case, tried(case)) for case in cases)
    counted = Counter[str]()
    for seed, (case, (how, detail)) in zip(seeds, ends, strict=False):
        counted[how] += 1
        if how not in ("same", "refused") or typed.only:
            print(f"--seed {seed} --only: {described(case)}: {how} {detail}", flush=True)
    print(dict(counted))


if __name__ == "__main__":
    main()
