"""A producer or a consumer that is killed while payloads of 64 MiB are on their way: who is named, when, what is left.

    python tests/trials/killed_payloads.py [--count 50] [--seed 0] [--transport rpc] [--mib 64]

Every run must end within 10 s of the kill with an error that names the worker, and leave no process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

import psutil

from trials.forked import Forked, prepare

_ROOT = Path(__file__).parents[2]
_MOST_S = 10.0
_SCRIPT = """
import sys
from bench.payload_sizes import multiplying

pipe, batch = multiplying(int(sys.argv[1]), 4)
while True:
    pipe.step(batch)
    if pipe.worker == 0:
        print("stepped", flush=True)
"""


def kill(transport: str, mib: int, rank: int, after_s: float) -> str:
    """Kill worker `rank` so long after the second step; return what is wrong with how the job ends, or nothing."""
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "train.py").write_text(_SCRIPT)
        command = [sys.executable, "-m", "rpc_pipe", "run", str(folder / "train.py"), "--workers", "2"]
        command += ["--transport", transport, "--", str(mib)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "RPC_PIPE_LOGS": "off", "OMP_NUM_THREADS": "1"}
        launcher = Forked(command, text=True, env=environment, cwd=_ROOT)
        said, steps, killed_at, children = [], 0, 0.0, []
        for line in launcher.stdout:
            said.append(line)
            steps += "stepped" in line
            if steps == 2 and not killed_at:
                time.sleep(after_s)
                workers = sorted(
                    psutil.Process(launcher.pid).children(), key=lambda each: (each.create_time(), each.pid)
                )
                children = psutil.Process(launcher.pid).children(recursive=True)
                killed_at = time.monotonic()
                workers[rank].send_signal(signal.SIGKILL)
        code, took_s = launcher.wait(), time.monotonic() - killed_at
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        text = "".join(said)
        if code == 0 or f"worker {rank} was killed by signal 9" not in text:
            return f"exit code {code}, worker {rank} is not named:\n{text[-2000:]}"
        if took_s > _MOST_S or left:
            return f"it took {took_s:.1f} s and left {left}"
        return ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="kills while large payloads are on their way")
    parser.add_argument("--count", type=int, default=50, help="(50)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--mib", type=int, default=64, help="of a payload (64)")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="rpc")
    options = parser.parse_args()
    prepare()
    draw, wrong = random.Random(options.seed), 0
    for number in range(options.count):
        rank, after_s = draw.randrange(2), draw.random()
        if problem := kill(options.transport, options.mib, rank, after_s):
            wrong += 1
            print(f"{number}: worker {rank} killed after {after_s:.3f} s: {problem}", flush=True)
    print(f"{options.count - wrong} of {options.count} runs named the worker within {_MOST_S:g} s and left nothing")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
