"""What being watched costs, and whether watchers that are killed or stopped change anything.

    python bench/watching.py [--steps N] [--rounds N] [--kills N]

The same training in turns: without boards, with boards, with a watcher. Then with watchers that attach and are killed
(SIGKILL) at random moments, and with one that is stopped (SIGSTOP) while it reads. The losses must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from rpc_pipe.boards import run_folders

_RUN = [sys.executable, "-m", "rpc_pipe", "run", "--json", "--workers", "2"]
#: for the cost, and for the rest, where many short steps tell more
_LARGE, _SMALL = ["--width", "192"], ["--width", "32", "--context", "64", "--batch", "8", "--microbatches", "4"]
_WATCH = [sys.executable, "-m", "rpc_pipe", "watch"]


def start(steps: int, model: list[str], boards: bool = True) -> subprocess.Popen[str]:
    """Start a training."""
    environment = {**os.environ, **({} if boards else {run_folders.FOLDER: "off"})}
    return subprocess.Popen(
        [*_RUN, *model, "--steps", str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def watch(*options: str) -> subprocess.Popen[bytes]:
    """Start a watcher."""
    return subprocess.Popen([*_WATCH, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def result(training: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a training; return its summary."""
    printed, _ = training.communicate(timeout=600)
    found: dict[str, Any] = json.loads(printed)
    return found


def until_it_trains(training: subprocess.Popen[str]) -> None:
    """Wait until the workers have boards."""
    folder = run_folders.root() / f"run-{training.pid}"
    while training.poll() is None and not list(folder.glob("worker-*")):
        time.sleep(0.05)


def cost(steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the ms of a step of each round, by how it was watched."""
    times: dict[str, list[float]] = {"no boards": [], "boards": [], "a watcher": []}
    for _ in range(rounds):
        for how, found in times.items():
            training = start(steps, _LARGE, boards=how != "no boards")
            watcher = None
            if how == "a watcher":
                until_it_trains(training)
                watcher = watch(f"run-{training.pid}")
            found.append(result(training)["step_ms"])
            if watcher is not None:
                watcher.wait(30)
    return times


def killed(steps: int, kills: int) -> tuple[dict[str, Any], int, int]:
    """Train under watchers that are killed; return the summary, how many were killed, and the workers' growth in MB."""
    training = start(steps, _SMALL)
    until_it_trains(training)
    done, first, last = 0, 0, 0
    dice = random.Random(0)
    while training.poll() is None and done < kills:
        watcher = watch(f"run-{training.pid}", *(["--web", "0"] if done % 4 == 0 else []))
        time.sleep(dice.uniform(0.05, 1.2))
        watcher.send_signal(signal.SIGKILL)
        watcher.wait()
        done += 1
        if training.poll() is None:
            workers = psutil.Process(training.pid).children()
            last = sum(worker.memory_info().rss for worker in workers)
            first = first or last
    return result(training), done, (last - first) // 2**20


def stopped(steps: int) -> dict[str, Any]:
    """Train with a watcher that is stopped while it reads."""
    training = start(steps, _SMALL)
    until_it_trains(training)
    watcher = watch(f"run-{training.pid}")
    time.sleep(2)
    watcher.send_signal(signal.SIGSTOP)
    summary = result(training)
    watcher.kill()
    watcher.wait()
    return summary


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What being watched costs.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=100)
    parsed = parser.parse_args()
    console = Console(highlight=False)
    for how, found in (times := cost(parsed.steps, parsed.rounds)).items():
        ratio = median(a / b for a, b in zip(found, times["no boards"], strict=True))
        shown = ", ".join(f"{ms:.1f}" for ms in found)
        console.print(f"{how:10} {median(found):7.1f} ms a step, {ratio:.3f} x no boards   ({shown})")
    steps = 60 * parsed.kills
    alone = result(start(steps, _SMALL))
    under, kills, growth = killed(steps, parsed.kills)
    halted = stopped(steps // 4)
    calm = result(start(steps // 4, _SMALL))
    same = [alone[key] == under[key] and halted[key] == calm[key] for key in ("loss", "steps")]
    console.print(
        f"{kills} watchers killed in {steps} steps: {under['step_ms']:.1f} ms a step, alone {alone['step_ms']:.1f}; "
        f"workers grew by {growth} MB; one stopped: {halted['step_ms']:.1f} ms, calm {calm['step_ms']:.1f}; "
        f"losses are {'the same bits' if all(same) else 'DIFFERENT'}"
    )
    raise SystemExit(not all(same))


if __name__ == "__main__":
    main()
