"""Several hosts of an elastic job lose each other: does exactly one side go on, with the bits of the undisturbed run.

    python tests/trials/hosts_cut.py [--count 20] [--seed 0] [--how cut,kill,...] [--loss 0]

Two hosts (network namespaces) of two workers each: 2 stages x 2 replicas, a replica on each host. At a random moment

    cut        the second host's cable is pulled
    cut-first  the first host's cable is pulled
    kill       the second host's launcher is killed
    power      all processes of the second host are killed at once
    first      the first host's launcher is killed: the job ends
    pause      all processes of the second host stop for half of RPC_PIPE_LOST_AFTER: nothing may happen
    blink      the cable is pulled for a quarter of it: nothing may happen
    join       the second host's launcher is killed, and `rpc-pipe join` comes from there
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
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

import psutil
from hosts import Hosts, why_not

from rpc_pipe.launching.interfaces import make_key

_ROOT = Path(__file__).parents[2]
_STEPS, _MOST_S = 40, 60.0
_GONE, _ENDED = "is gone, or cut off, with workers [1, 3]: epoch", "the workers of this host are ended"


def trial(how: str, draw: random.Random, lost_after_s: float, loss: float) -> str:
    """Return what went wrong; "" if all is as it should be."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-cut-"))
    try:
        make_key(folder / "key")
        with Hosts(delay_s=0.001, loss=loss) as hosts:
            return _trial(hosts, folder, how, draw, lost_after_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _trial(hosts: Hosts, folder: Path, how: str, draw: random.Random, lost_after_s: float) -> str:
    temporary = folder / "tmp"
    temporary.mkdir()
    steps = 400 if how == "join" else _STEPS
    environment = {"TMPDIR": str(temporary), "RPC_PIPE_LOGS": "off", "PYTHONPATH": str(_ROOT), "WAITS": "on",
                   "RPC_PIPE_KEY_FILE": str(folder / "key"), "RPC_PIPE_LOST_AFTER": str(lost_after_s)}  # fmt: skip
    typed = ["run", str(_ROOT / "tests" / "trials" / "mortal.py"), "--workers", "4", "--replicas", "2", "--elastic"]
    typed += ["--transport", "zmq", "--hosts", "2", "--meet", f"{hosts.address(0)}:29400"]
    typed += ["--", str(folder), "step", str(steps), "2"]
    main = _ROOT / "rpc_pipe" / "__main__.py"
    launchers = [hosts.start(host, main, *typed, anew=True, **environment) for host in (0, 1)]
    step, end = draw.randrange(1, 12), time.monotonic() + _MOST_S
    while how != "none" and time.monotonic() < end:
        with suppress(OSError, ValueError):
            if int((folder / "step-0").read_text()) >= step:
                break
        time.sleep(0.005)
    time.sleep(draw.random() / 10)
    _strike(hosts, launchers, how, lost_after_s)
    if how == "join":
        time.sleep(1.0)
        at = f"{hosts.address(0)}:29400"
        launchers[1] = hosts.start(1, main, "join", at, "--key-file", str(folder / "key"), anew=True, **environment)
    said, codes = ["", ""], [0, 0]
    for host, launcher in enumerate(launchers):
        try:
            said[host], _ = launcher.communicate(timeout=_MOST_S)
        except subprocess.TimeoutExpired:
            return f"host {host} hangs"
        codes[host] = launcher.returncode or 0
    wrong = _verdict(folder, how, codes, said, steps)
    if how not in ("kill", "power", "first", "join") and (
        left := [path.name for path in temporary.iterdir() if "inductor" not in path.name]
    ):
        wrong = wrong or f"left behind: {left}"
    return wrong and f"{wrong}\n{said[0][-3000:]}\n-- second host\n{said[1][-3000:]}"


def _strike(hosts: Hosts, launchers: list[Any], how: str, lost_after_s: float) -> None:
    """Let it happen."""
    second = psutil.Process(launchers[1].pid)
    if how == "cut":
        hosts.cut.add(1)
    elif how == "cut-first":
        hosts.cut.add(0)
    elif how in ("kill", "join"):
        second.kill()
    elif how == "first":
        launchers[0].kill()
    elif how == "power":
        for process in [second, *second.children(recursive=True)]:
            process.kill()
    elif how == "pause":
        processes = [second, *second.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(lost_after_s / 2)
        for process in processes:
            process.send_signal(signal.SIGCONT)
    elif how == "blink":
        hosts.cut.add(1)
        time.sleep(lost_after_s / 4)
        hosts.cut.discard(1)


def _verdict(folder: Path, how: str, codes: list[int], said: list[str], steps: int) -> str:
    if how == "first":
        return "" if codes[1] == 1 and _ENDED in said[1] else f"exit codes {codes}"
    if codes[0] != 0:
        return f"exit codes {codes}"
    if how in ("cut", "cut-first", "kill", "power", "join") and _GONE not in said[0]:
        return "the first host says nothing"
    if how in ("cut", "cut-first") and (codes[1] != 1 or _ENDED not in said[1]):
        return f"the second host ends with {codes[1]}"
    if how in ("pause", "blink", "none", "join") and codes[1] != 0:
        return f"the second host ends with {codes[1]}"
    if how in ("pause", "blink") and "epoch" in said[0]:
        return "the job was split"
    if how == "join" and not all(f"worker {rank} is back" in said[0] for rank in (1, 3)):
        return "none has come back"
    return "" if made(folder) == undisturbed(steps) else "other weights"


def made(folder: Path) -> str:
    """Return the hash of the trained weights and losses."""
    found = [folder / "weights.safetensors", folder / "losses"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in found if file.exists())).hexdigest()[:12]


@functools.cache
def undisturbed(steps: int) -> str:
    """Return the hash of a job on one host without a death."""
    from trials.deaths import run

    found, said = run("1f1b", 2, "step", [], [], [], steps)
    assert " " not in found, said
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="hosts lose each other: one side goes on, with the same bits")
    parser.add_argument("--count", type=int, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--how", default="cut,cut-first", help="with commas, in turn (cut,cut-first)")
    parser.add_argument("--lost-after", type=float, default=3.0, help="RPC_PIPE_LOST_AFTER (3)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that are lost (0)")
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    good, kinds = 0, options.how.split(",")
    for number in range(options.count):
        how = kinds[number % len(kinds)]
        begin = time.monotonic()
        wrong = trial(how, random.Random(options.seed + number), options.lost_after, options.loss)
        good += not wrong
        print(f"{options.seed + number} {how}: {wrong or 'good'}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{good} of {options.count} good")
    sys.exit(good != options.count)


if __name__ == "__main__":
    main()
