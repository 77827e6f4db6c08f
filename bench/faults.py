"""Random faults, one after the other: whether the first cause is named, how soon, and whether anything is left.

    python bench/faults.py [--count 10] [--seed 0] [--transport zmq] [--only "kill in loss"] [--exec]

Each fault hits a training of three workers: something in a worker's own code, wherever that is called, or a signal from
outside. It counts as right if the block on the console names the worker and what happened, the exit code is not 0, and
no process and no file is left in TMPDIR and in the folder of runs. Launcher and workers are forks of a process that has
imported torch; with --exec, and where a signal comes early, each is started as usual.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from bench.forked import Forked, prepare
from rpc_pipe.tracing import run_folders

_ROOT = Path(__file__).parents[1]
_STALL_S, _MOST_S, _START_S = 6, 10.0, 15.0
#: by place of the user's code, what a worker is said to do there
_DOING = {
    "forward": r"running @F\d", "backward": r"running @B\d", "loss": r"running @F\d", "metric": r"running @F\d",
    "optimizer": r"running @U0", "scheduler": r"running @U0", "script": "", "data": "", "build": "starting up",
    "start-up": "starting up",
}  # fmt: skip
_OUTSIDE = ("script", "data", "build", "start-up")  # of the pipeline's own calls
_ALL = tuple(_DOING)
#: by fault, where it happens, and what the block must say; @: the worker, DOING: as above, FAILED: that it raised there
_FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "exception": (_ALL, "FAILED.*ArithmeticError"),
    "KeyboardInterrupt": (("forward", "backward", "optimizer", *_OUTSIDE), "FAILED.*KeyboardInterrupt"),
    "StopIteration": (("forward", "loss", "optimizer", "metric"), "FAILED.*StopIteration"),
    "recursion": (("forward", "loss"), "FAILED.*RecursionError"),
    "out of memory": (("forward", "optimizer"), "FAILED.*RuntimeError.*(memory|size)"),
    "MemoryError": (("forward", "script"), "FAILED.*MemoryError"),
    "no descriptors": (("forward", "script"), "FAILED.*OSError.*Too many open files"),
    "disk full": (("forward", "script"), "FAILED.*OSError.*File too large"),
    "sys.exit": (("forward", "backward", "optimizer", *_OUTSIDE), "FAILED.*SystemExit"),
    "os._exit": (("forward", "backward", "optimizer", "script", "data", "build"), "exit code 0 while DOING"),
    "nan": (("forward",), "the loss is nan"),
    "hang": (("forward", "backward", "loss", "optimizer", *_OUTSIDE), "HANGS"),
    "stop": (("forward", "script"), "worker @ was stopped by a signal"),
    "segfault": (("forward", "backward"), r"worker @ was killed by signal 11 \(SIGSEGV\) while DOING"),
    "abort": (("forward",), r"worker @ was killed by signal 6 \(SIGABRT\) while DOING"),
    "kill": (
        ("forward", "backward", "optimizer", *_OUTSIDE),
        r"worker @ was killed by signal 9 \(SIGKILL\) while DOING",
    ),
    "forked, killed": (("forward",), r"worker @ was killed by signal 9 \(SIGKILL\) while DOING"),
    "closed descriptors": (("forward",), r"worker @ (was killed|ended|failed)|lost worker @"),
    "exit": (("start-up",), "worker @ has ended without a Pipeline"),
}
_FROM_OUTSIDE = {"killed from outside": signal.SIGKILL, "terminated from outside": signal.SIGTERM}
_TO_LAUNCHER = {
    "launcher killed": signal.SIGKILL,
    "worker stopped, launcher killed": signal.SIGKILL,
    "launcher interrupted": signal.SIGINT,
    "launcher interrupted twice": signal.SIGINT,
    "launcher terminated": signal.SIGTERM,
    "launcher hung up": signal.SIGHUP,
    "launcher interrupted early": signal.SIGINT,
    "launcher terminated early": signal.SIGTERM,
}
#: where a fault happens after a few calls, not after many
_RARE = ("optimizer", "scheduler", "script", "data")


def kinds() -> list[str]:
    """Return the names of all kinds of faults."""
    own = [f"{fault} in {place}" for fault, (places, _) in _FAULTS.items() for place in places]
    return [*own, *_FROM_OUTSIDE, *_TO_LAUNCHER]


def said_of(what: str) -> str:
    """Return what must be said of a kind of fault, as a regular expression."""
    if what in _FROM_OUTSIDE:
        name = _FROM_OUTSIDE[what]
        return rf"worker @ was killed by signal {name.value} \({name.name}\) while "
    if what in _TO_LAUNCHER:
        return "stopping after this step" if what.split()[-1] in ("interrupted", "terminated", "up") else ""
    fault, _, place = what.partition(" in ")
    doing = _DOING[place]
    failed = rf"worker @ failed \({doing}, step \d+\): " if place not in _OUTSIDE else "worker @ failed"
    hangs = f"worker @ hangs: {doing}"
    if place in ("build", "start-up"):
        hangs = "worker @ (has not begun|has made no [Pp]ipeline)"
    text = _FAULTS[fault][1].replace("FAILED", failed).replace("HANGS", hangs)
    return text.replace("DOING", doing)


class Outcome(NamedTuple):
    """What became of a fault."""

    wrong: str
    seconds: float


def _draw_call(place: str, draw: random.Random) -> int:
    if place in ("build", "start-up"):
        return 1
    return draw.randrange(2, 9) if place in _RARE else draw.randrange(5, 40)


def inflict(what: str, draw: random.Random, transport: str, *, anew: bool = False) -> Outcome:
    """Train, let a fault happen, and judge what is said and left; `anew`: not in forks."""
    fault, _, place = what.partition(" in ")
    rank = 2 if place in ("loss", "metric") else draw.randrange(3)  # who has the last stage
    temporary = Path(tempfile.mkdtemp())  # no TemporaryDirectory: what a fork inherits would remove it at its end
    try:
        script = str(Path(__file__).with_name("faulty.py"))
        command = [sys.executable, "-m", "rpc_pipe", "run", script, "--workers", "3", "--transport", transport]
        command += ["--", fault, place, str(rank), str(_draw_call(place, draw)), str(_STALL_S)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(temporary), "RPC_PIPE_LOGS": "off"}
        environment["RPC_PIPE_JOIN_TIMEOUT"] = str(_START_S)
        launcher: subprocess.Popen[str] | Forked
        if anew or "early" in what:
            launcher = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=_ROOT
            )
        else:
            launcher = Forked(command, text=True, env=environment, cwd=_ROOT)
        lines, workers, seconds = _follow(launcher, what, rank, draw)
        code = launcher.wait()
        wrong = _wrong(what, rank, code, "".join(lines))
        more: float = _STALL_S if fault in ("hang", "stop") else 0
        more += _START_S if place in ("build", "start-up") or "early" in what else 0
        more += _START_S if what == "hang in start-up" else 0  # which is how long others wait for it
        if not wrong and seconds > _MOST_S + more:
            wrong = f"it took too long (load {os.getloadavg()[0]:.1f})"
        alive = [worker for worker in psutil.wait_procs(workers, timeout=2)[1] if not _is_zombie(worker)]
        if not wrong and alive:
            wrong = f"{len(alive)} processes are left"
        left = [*temporary.glob("rpc-pipe*"), *run_folders.root().glob(f"run-{launcher.pid}*")]
        if not wrong and left:
            wrong = f"files are left: {left}"
        if wrong:
            print("".join(lines[-40:]))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Outcome(wrong, seconds)


def _follow(
    launcher: subprocess.Popen[str] | Forked, what: str, rank: int, draw: random.Random
) -> tuple[list[str], list[psutil.Process], float]:
    """Read what the launcher says to its end; return it, the workers, and how long it took since the last step."""
    assert launcher.stdout is not None
    lines: list[str] = []
    workers: list[psutil.Process] = []
    last = time.monotonic()
    if "early" in what:
        last += (after := draw.random() * 4)
        threading.Timer(after, launcher.send_signal, [_TO_LAUNCHER[what]]).start()
    for line in launcher.stdout:
        lines.append(line)
        if not re.search(r"\| step \d+$", line) or "early" in what:
            continue
        last, workers = time.monotonic(), workers or _in_order(psutil.Process(launcher.pid).children())
        if "step 5" not in line:
            continue
        if what in _FROM_OUTSIDE:
            workers[rank].send_signal(_FROM_OUTSIDE[what])
        if what in _TO_LAUNCHER:
            if "stopped" in what:
                workers[rank].send_signal(signal.SIGSTOP)
            launcher.send_signal(_TO_LAUNCHER[what])
            if "twice" in what:
                time.sleep(draw.random() / 20)
                with suppress(ProcessLookupError):
                    launcher.send_signal(_TO_LAUNCHER[what])
    return lines, workers, time.monotonic() - last


def _in_order(workers: list[psutil.Process]) -> list[psutil.Process]:
    """Return the workers by rank, which is the order in which they were started."""
    return sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))


def _is_zombie(process: psutil.Process) -> bool:
    """Tell whether a process has ended, and only its new parent has not noticed yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wrong(what: str, rank: int, code: int, said: str) -> str:
    if code == 0:
        return "exit code 0"
    if what in _TO_LAUNCHER:
        number = _TO_LAUNCHER[what]
        # A signal that comes before anything runs ends the interpreter as it ends any.
        if code not in (128 + number, *([-number] if number == signal.SIGKILL or "early" in what else [])):
            return f"exit code {code}"
    if not re.search(said_of(what).replace("@", str(rank)), said, re.DOTALL):
        return "the cause is not named"
    own = re.search(r'launching/(launcher|attempt)\.py", line \d+, in (run|watch|_)', said)  # not a worker's
    return "a traceback of the launcher" if own else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="random faults: are they named, and is anything left")
    parser.add_argument("--count", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--only", metavar="KINDS", help="some kinds, with semicolons")
    parser.add_argument("--list", action="store_true", help="list the kinds, and what must be said of each")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    parser.add_argument("--exec", action="store_true", help="start every process as usual, not as a fork")
    options = parser.parse_args()
    prepare()
    chosen = options.only.split("; ") if options.only else kinds()
    if options.list:
        sys.exit("\n".join(f"{what:32} {said_of(what)}" for what in chosen))
    draw = random.Random(options.seed)
    draw.shuffle(chosen)
    outcomes = []
    for number in range(options.count):
        what = chosen[number % len(chosen)]
        found = inflict(what, draw, options.transport, anew=options.exec)
        outcomes.append(found)
        print(f"{what:32} {found.seconds:6.1f} s  {found.wrong or 'right'}", flush=True)
    right = sum(not outcome.wrong for outcome in outcomes)
    times = sorted(outcome.seconds for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right; from the last step to the end {statistics.median(times):.1f} s in the "
          f"middle, {times[-1]:.1f} at most (a hang is known after {_STALL_S} s)")  # fmt: skip
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    main()
