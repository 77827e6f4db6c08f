"""rpc-pipe against PiPPy 0.1.1, torch.distributed.pipelining and the physical limit.

    python bench/vs_pippy.py [--quick] [--only emulated,split,...] [--json FILE] [--rounds N]
                             [--host-emulator FILE]

Systems take turns (A B C A B C ...), so that a machine that drifts drifts for all. Same modules, weights, data and
threads for each; forward and backward without update, which PiPPy 0.1.1 cannot do on today's torch. Before a system is
timed its gradients are compared with those of one process. A step's time is the median over steps that follow each
other without a barrier. The limit is the simulator's time of a step with the same times and free communication. Between
hosts, "predicted" is that with their latency, and "bare sockets" is a loop written by hand over TCP, which shows what
the emulator of hosts and the processors leave to anyone.
Peak memory is the sum of the workers' own peaks; peak activations are in microbatches of a worker's whole share.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import group
from bench.scenarios import SCENARIOS, Contest, limit_ms, predicted_ms
from bench.systems import BARE, SYSTEMS, Job, absent

#: gradients may differ from one process's by so much, relatively, where sums are taken in another order
_TOLERANCE = 1e-4
_ON_HOSTS = ("travel", "congestion", "encryption")
console = Console(width=None if sys.stdout.isatty() else 140)


def run(contest: Contest, rounds: int, on_hosts: Callable[[Path], None] | None) -> list[dict[str, Any]]:
    """Run the jobs of a contest in turn and return its rows; `on_hosts(folder)` runs them on several hosts."""
    turns = contest.turns(rounds)
    jobs = turns[: len(turns) // rounds]
    found: dict[int, list[list[group.Outcome]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if on_hosts is not None:
            on_hosts(folder)
        else:
            group.run(turns, folder, range(jobs[0].workers))
        for number, job in enumerate(turns):
            found[number % len(jobs)].append(group.outcomes(job, number, folder))
    return [_row(contest, job, found[i]) for i, job in enumerate(jobs)]


def _two_hosts(emulator: Path, contest: Contest, which: list[str], quick: bool) -> Callable[[Path], None]:
    """Return what runs a contest with half of its workers on each of two emulated hosts."""

    def on_hosts(folder: Path) -> None:
        half = contest.jobs[0].workers // 2
        command = [sys.executable, str(emulator), "--hosts", "2", "--delay", f"{contest.travel_ms:g}ms"]
        command += [f"--{name}={value}" for name, value in contest.network.items()]
        command.append("--per-host")
        for ranks in (f"0-{half - 1}", f"{half}-{2 * half - 1}"):
            node = [sys.executable, "-m", "bench.group", *which, str(folder), "--ranks", ranks]
            command.append(shlex.join([*node, *["--quick"] * quick]))
        subprocess.run(
            command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    return on_hosts


def _row(contest: Contest, job: Job, turns: list[list[group.Outcome]]) -> dict[str, Any]:
    limit, activations = limit_ms(job, contest.cost(job))
    row: dict[str, Any] = {
        "scenario": contest.scenario,
        "system": job.system,
        "schedule": job.label or job.schedule,
        "workers": job.workers,
        "microbatches": job.microbatches,
        "limit_ms": limit,
        "peak_activations": activations,
    }
    if contest.travel_ms:
        row["predicted_ms"] = predicted_ms(job, contest.cost(job), contest.travel_ms)
    failures = [outcome.failure for turn in turns for outcome in turn if outcome.failure]
    if failures:
        return row | {"median_ms": None, "peak_rss_mb": None, "failure": failures[0]}
    steps = [ms for turn in turns for ms in turn[0].step_ms]
    low, median, high = statistics.quantiles(steps, n=4)
    row |= {
        "median_ms": median,
        "quartiles_ms": [low, high],
        "of_limit": limit / median,
        "peak_rss_mb": max(sum(outcome.peak_rss_mb for outcome in turn) for turn in turns),
        "cpu_ms": statistics.median(sum(outcome.cpu_ms for outcome in turn) for turn in turns),
        "gradient_error": max(outcome.error for turn in turns for outcome in turn),
    }
    if contest.travel_ms:
        row["of_predicted"] = row["predicted_ms"] / median
    if contest.rows:
        row["samples_per_s"] = 1e3 * contest.rows / median
    if row["gradient_error"] > _TOLERANCE:
        row["failure"] = f"its gradients differ from one process's by {row['gradient_error']:.1e}: not comparable"
    return row


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row of a contest its speed relative to every row of another system."""
    timed = [row for row in rows if row.get("median_ms") and "failure" not in row]
    for row in timed:
        row["faster_than"] = {
            f"{other['system']} {other['schedule']}": other["median_ms"] / row["median_ms"]
            for other in timed
            if other["system"] != row["system"]
        }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a contest: a table, and who wins."""
    first = rows[0]
    title = f"{first['scenario']}, {first['workers']} workers, {first['microbatches']} microbatches"
    table = Table(title=title, title_justify="left")
    peers = [peer for peer in ("torch", "pippy") if any(row["system"] == peer for row in rows)]
    for column in ("system", "schedule"):
        table.add_column(column)
    for column in (
        "step ms",
        "quartiles",
        "of limit",
        "of predicted",
        *(f"vs {peer}'s best" for peer in peers),
        "CPU ms",
        "activations",
        "RSS MB",
    ):
        table.add_column(column, justify="right")
    best = {p: [r["median_ms"] for r in rows if r["system"] == p and r.get("faster_than") is not None] for p in peers}
    for row in rows:
        if "failure" in row:
            reason = row["failure"].strip().splitlines()[-1]
            table.add_row(row["system"], row["schedule"], "failed", reason, *[""] * (5 + len(peers)))
            continue
        low, high = row["quartiles_ms"]
        ratios = [f"{min(best[p]) / row['median_ms']:.2f}" if best[p] and p != row["system"] else "" for p in peers]
        table.add_row(
            row["system"],
            row["schedule"],
            f"{row['median_ms']:.1f}",
            f"{low:.1f} - {high:.1f}",
            f"{row['of_limit']:.3f}" if row["limit_ms"] else "",
            f"{row['of_predicted']:.3f}" if "of_predicted" in row else "",
            *ratios,
            f"{row['cpu_ms']:.0f}",
            f"{row['peak_activations']:g}",
            f"{row['peak_rss_mb']:.0f}",
        )
    console.print(table)
    timed = [row for row in rows if "faster_than" in row and row["system"] != BARE]
    if timed:
        winner = min(timed, key=lambda row: float(row["median_ms"]))
        console.print(f"fastest: {winner['system']} {winner['schedule']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="rpc-pipe against PiPPy, torch and the limit")
    parser.add_argument("--quick", action="store_true", help="the headline rows, fewer rounds")
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"some of {','.join(SCENARIOS)}")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rounds", type=int, help="turns of each system (3; quick 2)")
    parser.add_argument(
        "--host-emulator", type=Path, help="program that runs --per-host commands with a --delay between"
    )
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown:
        parser.error(f"--only {unknown[0]}: must be some of {', '.join(SCENARIOS)}")
    for system in SYSTEMS:
        if why := absent(system):
            console.print(f"{system} is left out: {why}")
    everything: list[dict[str, Any]] = []
    for name in chosen:
        if name in _ON_HOSTS and options.host_emulator is None:
            console.print(f"{name} is left out: give --host-emulator, which emulates hosts with a delay between them")
            continue
        for number, contest in enumerate(SCENARIOS[name](options.quick)):
            rounds = options.rounds or (2 if options.quick else 3)
            on_hosts = None
            if contest.travel_ms:
                which = [name, str(number), str(rounds)]
                on_hosts = _two_hosts(options.host_emulator, contest, which, options.quick)
            rows = run(contest, rounds, on_hosts)
            compare(rows)
            show(rows)
            everything += rows
            if options.json:
                options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
