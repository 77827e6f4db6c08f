"""Random departures of an elastic job: are weights and checkpoints those of the undisturbed run, or is the end the
documented one.

    python tests/trials/departures.py making [--count 40] [--seed 0]    a worker dies while all make their pipelines
    python tests/trials/departures.py pairs [--count 60] [--seed 0]     two of SIGTERM and SIGKILL, with --rejoin
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

from processes import start

_ROOT = Path(__file__).parents[2]
_PATHS = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
_EVERY, _MOST_S = 5, 200.0
#: where a worker dies in the making of its pipeline, as in `mortal.py`
_MAKING = "hosted", "tell_ready", "_heed_eviction", "follow", "claim", "every", "begin"
#: ends that docs/elastic.md lists
_LOST, _EARLY, _STOPPED = (
    "no live (replica|worker)",
    "goes on without a worker when all have made",
    "all stop after a step",
)


def run(
    of: tuple[int, int], kills: list[str], signals: list[tuple[int, int, float, int]], steps: int, **how: Any
) -> Any:
    """Return what a job has made: its verdict, hash, steps of its checkpoints, and what it has printed.

    Args:
        of: stages, and replicas.
        signals: (worker, step, seconds after it, signal) from outside; step -1: its process has begun.
    """
    folder = Path(tempfile.mkdtemp(prefix="departures-"))
    (folder / "tmp").mkdir()
    script = [str(Path(__file__).with_name("mortal.py")), "--workers", str(of[0] * of[1]), "--replicas", str(of[1])]
    script += ["--transport", "zmq", "--elastic", "--schedule", how["schedule"], *how["more"]]
    script += ["--checkpoint-every", str(_EVERY), "--checkpoint-folder", str(folder / "series")]
    typed = ["-m", "rpc_pipe", "run", *script, "--", str(folder), how["how"], str(steps), str(of[0]), *kills]
    env = {"TMPDIR": str(folder / "tmp"), "RPC_PIPE_LOGS": "off", "PYTHONPATH": _PATHS, **how.get("env", {})}
    process = start(*typed, merged=True, **env)
    try:
        for worker, step, after, number in signals:
            _send(folder, worker, step, after, number, process)
        try:
            said, _ = process.communicate(timeout=_MOST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate()
            return "it hangs", "", [], said
        left = [path.name for path in (folder / "tmp").iterdir() if "inductor" not in path.name]
        weights = folder / "weights.safetensors"  # a script that stops saves none
        made = weights.read_bytes() if weights.exists() else b""
        series = [int(path.parent.name[5:]) for path in sorted((folder / "series").glob("step-*/manifest.json"))]
        found = f"left behind: {left}" if left else f"exit code {process.returncode}"
        return found, hashlib.sha256(made).hexdigest()[:12], series, said
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send(folder: Path, worker: int, step: int, after: float, number: int, process: Any) -> None:
    """Send a worker a signal when it has made a step."""
    end = time.monotonic() + _MOST_S / 2
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, ValueError):
            if (folder / f"begun-{worker}").exists() if step < 0 else _step(folder, worker) >= step:
                break
        time.sleep(0.005)
    time.sleep(after)
    with suppress(OSError, ValueError):
        os.kill(int((folder / f"begun-{worker}").read_text()), number)


def _step(folder: Path, worker: int) -> int:
    return int((folder / f"step-{worker}").read_text())


def making(draw: random.Random) -> tuple[Any, ...]:
    """Return the job and the death of a trial: while the workers make their pipelines."""
    of = draw.choice([(1, 2), (2, 2), (1, 3)])
    worker, schedule = draw.randrange(of[0] * of[1]), draw.choice(["1f1b", "zb-h1", "interleaved"])
    how = {"schedule": schedule, "how": draw.choice(["step", "train"]), "more": draw.choice([[], ["--rejoin"]])}
    if draw.random() < 0.3:
        return of, [], [(worker, -1, draw.random() * 2, signal.SIGKILL)], how
    return of, [f"{worker}:{draw.choice([0, -1])}:{draw.choice(_MAKING)}"], [], how


def pairs(draw: random.Random) -> tuple[Any, ...]:
    """Return the job and the signals of a trial."""
    of = draw.choice([(1, 2), (2, 2), (2, 2)])
    first = draw.randrange(of[0] * of[1])
    same_stage = [each for each in range(of[0] * of[1]) if each // of[1] == first // of[1] and each != first]
    second = draw.choice([*same_stage, *same_stage, draw.randrange(of[0] * of[1])])
    step, kinds = draw.randrange(1, 8), [signal.SIGTERM, signal.SIGKILL]
    gap = draw.choice([0.0, draw.random(), draw.random() * 3, 3 + draw.random() * 6])
    signals = [(first, step, draw.random() / 4, draw.choice(kinds)), (second, -1, gap, draw.choice(kinds))]
    how = {"schedule": draw.choice(["1f1b", "zb-v", "interleaved"]), "how": draw.choice(["step", "train"])}
    return of, [], signals, how | {"more": ["--rejoin"], "env": {"WAITS": "long"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="random departures: weights and checkpoints as undisturbed")
    parser.add_argument("campaign", choices=("making", "pairs"))
    parser.add_argument("--count", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--steps", type=int, default=0, help="(16, 40 for pairs)")
    options = parser.parse_args()
    steps = options.steps or {"making": 16, "pairs": 40}[options.campaign]
    wholes: dict[str, str] = {}
    tally: dict[str, int] = {}
    for number in range(options.seed, options.seed + options.count):
        of, kills, signals, how = globals()[options.campaign](random.Random(number))
        if (key := json.dumps([of, how["schedule"], how["how"]])) not in wholes:
            wholes[key] = run(of, [], [], steps, **how | {"more": [], "env": {}})[1]
        found, made, series, said = run(of, kills, signals, steps, **how)
        asked = [n for n in range(_EVERY, steps + 1, _EVERY)]
        left_out = {int(n) for n in re.findall(r"/\.step-(\d+)\..*training goes on without it", said)}
        if found == "exit code 0" and made == wholes[key] and series == [n for n in asked if n not in left_out]:
            verdict = "same"
        elif found == "exit code 1" and re.search(f"{_LOST}|{_EARLY}", said):
            verdict = "documented end"
        elif found in ("exit code 0", "exit code 130") and _STOPPED in said and series:
            verdict = "all stopped"
        else:
            verdict = f"WRONG: {found}, {made} for {wholes[key]}, {series}"
        tally[verdict.partition(":")[0]] = tally.get(verdict.partition(":")[0], 0) + 1
        print(f"{number} {of} {how} {kills} {[(*s[:3], s[3].name) for s in signals]}: {verdict}", flush=True)
        if verdict != "same":
            print("".join(f"    {line}\n" for line in said.splitlines()[-25:]))
    print(f"{options.campaign}: {tally}")
    sys.exit("WRONG" in tally)


if __name__ == "__main__":
    main()
