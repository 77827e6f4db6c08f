"""Random faults, one after the other: whether the first cause is named, how soon, and whether anything is left.

    python tests/trials/faults.py [--count 10] [--seed 0] [--transport zmq] [--only "kill in loss"]
        [--exec | --torchrun]

Each fault hits a training of three workers: something in a worker's own code, wherever that is called, a signal from
outside, or what is around the launcher. It counts as right if the block on the console names the worker and what
happened, the exit code is not 0, and no process and no file is left in TMPDIR and in the folder of runs; what must be
survived, if training goes on to its end. Launcher and workers are forks of a process that has imported torch; with
--exec, and where a signal comes early, each is started as usual. With --torchrun that starts the workers, forks too,
and in one kind two agents do, of which one is killed with all its workers, as a node that dies; times are then those
until the cause is named, as the end is torchrun's.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

import psutil

from rpc_pipe.tracing import run_folders
from trials import fault_kinds
from trials.fault_kinds import AROUND, FROM_OUTSIDE, NODE, STRANGERS, TO_LAUNCHER
from trials.forked import Forked, prepare

_ROOT = Path(__file__).parents[2]
_STALL_S, _MOST_S, _START_S, _STOP_S = 6, 10.0, 15.0, 3.0
#: three interpreters load torch in so long
_TORCHRUN_S = 30.0
_WORKERS = 3
#: a worker that prints for ever fills no memory of ours
_MOST_LINES = 2000
_IN_FULL_MEMORY = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16k tmpfs /dev/shm && exec "$@"', "sh"]


class Outcome(NamedTuple):
    """What became of a fault."""

    wrong: str
    seconds: float


class Trial:
    """A training in which a fault happens.

    Args:
        forked: whether processes are forks, and not started as usual.
        torchrun: whether that starts the workers.
    """

    def __init__(self, what: str, draw: random.Random, transport: str, *, forked: bool, torchrun: bool) -> None:
        self._what, self._draw, self._transport = what, draw, transport
        self._forked, self._torchrun = forked and "early" not in what and what not in AROUND, torchrun
        self._kind = fault_kinds.kind_of(what)
        last = self._kind.place in ("loss", "metric")  # who has the last stage
        self._rank = _WORKERS - 1 if last else draw.randrange(_WORKERS)
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        #: this trial's own, with their children
        self._launchers: list[subprocess.Popen[str] | Forked] = []
        self._workers: list[psutil.Process] = []
        self._last = time.monotonic()
        #: when the cause was named, where the end is torchrun's
        self._named = 0.0
        must = fault_kinds.of_torchrun(what) if torchrun else fault_kinds.said_of(what)
        self._must = re.compile(must.replace("@", str(self._rank)), re.DOTALL)
        self._done = False
        self._port = _free_port()

    def run(self) -> Outcome:
        """Train, let the fault happen, and judge what is said and left."""
        # No TemporaryDirectory: what a fork inherits would remove it at its end.
        temporary = Path(tempfile.mkdtemp())
        try:
            self._start(temporary)
            self._follow()
            codes = [launcher.wait() for launcher in self._launchers]
            seconds = (self._named or time.monotonic()) - self._last
            wrong = self._wrong(codes[0], seconds, temporary) or self._left(temporary)
            if wrong:
                print("".join(line[:300] for line in list(self._lines)[-60:]))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Outcome(wrong, seconds)

    # --- starting

    def _start(self, temporary: Path) -> None:
        fault, place = self._kind
        first, behind = self._kind.first_call
        script = [str(Path(__file__).with_name("faulty.py"))]
        options = [fault, place, str(self._rank), str(self._draw.randrange(first, behind)), str(_STALL_S)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(temporary), "RPC_PIPE_LOGS": "off"}
        environment |= {"RPC_PIPE_JOIN_TIMEOUT": str(_START_S), "RPC_PIPE_STOP_TIMEOUT": str(_STOP_S)}
        environment |= {"RPC_PIPE_TRANSPORT": self._transport}
        if self._torchrun:
            self._start_torchrun([*script, *options], environment)
            return
        command = [sys.executable, "-m", "rpc_pipe", "run", *script, "--workers", str(_WORKERS)]
        if fault == "full later":
            command += ["--checkpoint-every", "2", "--checkpoint-folder", str(temporary / "checkpoints")]
        command += ["--", *options]
        if not self._forked:
            output: IO[str] | int = open("/dev/full", "w") if "full" in self._what else subprocess.PIPE
            command = [*_IN_FULL_MEMORY, *command] if "memory is" in self._what else command
            self._launchers.append(_opened(command, environment, subprocess.PIPE if "memory" in self._what else output))
        else:
            self._launchers.append(Forked(command, text=True, env=environment, cwd=_ROOT))

    def _start_torchrun(self, script: list[str], environment: dict[str, str]) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", str(self._port)]
        if self._what != NODE:
            self._start_node([*torchrun, "--nproc-per-node", "3", *script], environment)
            return
        environment |= {"RPC_PIPE_INTERFACE": "lo", "RPC_PIPE_TRUST_NETWORK": "on"}
        for number, workers in enumerate(("2", "1")):
            node = [*torchrun, "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", workers]
            self._start_node([*node, *script], environment)

    def _start_node(self, command: list[str], environment: dict[str, str]) -> None:
        forked = partial(Forked, text=True, env=environment, cwd=_ROOT)
        self._launchers.append(forked(command) if self._forked else _opened(command, environment))

    # --- what happens

    def _follow(self) -> None:
        """Read what the launcher says to its end, and do from outside what is to be done."""
        launcher = self._launchers[0]
        if "early" in self._what:
            self._last += (after := self._draw.random() * 4)
            threading.Timer(after, launcher.send_signal, [TO_LAUNCHER[self._what]]).start()
        if launcher.stdout is None:  # nobody reads it
            return
        for line in launcher.stdout:
            if "again and again" in line:
                if self._what.startswith("one prints"):
                    self._act()
                continue
            self._lines.append(line)
            if self._torchrun and not self._named and self._must.search("".join(self._lines)):
                self._named = time.monotonic()
            if re.search(r"^(worker 0 \| )?step \d+$", line) and "early" not in self._what:
                self._last = time.monotonic()
                self._workers = self._workers or self._in_order()
                if line.endswith("step 5\n") and not self._what.startswith("one prints"):
                    self._act()
            if self._done and self._what == "nobody reads":
                launcher.stdout.close()
                return

    def _act(self) -> None:
        """Do from outside what is to be done, once."""
        if self._done:
            return
        self._done, launcher = True, self._launchers[0]
        if self._what in FROM_OUTSIDE:
            self._workers[self._rank].send_signal(FROM_OUTSIDE[self._what])
        if self._what in STRANGERS:
            _disturb(self._workers[self._rank])
        if self._what == NODE:
            _kill_all(self._launchers[1].pid)
        if self._what in TO_LAUNCHER:
            if "stopped" in self._what:
                self._workers[self._rank].send_signal(signal.SIGSTOP)
            launcher.send_signal(TO_LAUNCHER[self._what])
            if "twice" in self._what:
                time.sleep(0.01 + self._draw.random() / 20)  # two at once are one: signals do not count
                with suppress(ProcessLookupError):
                    launcher.send_signal(TO_LAUNCHER[self._what])

    def _in_order(self) -> list[psutil.Process]:
        """Return the workers by rank, which is the order in which they were started."""
        found = [child for launcher in self._launchers for child in psutil.Process(launcher.pid).children()]
        return sorted(found, key=lambda worker: (worker.create_time(), worker.pid))

    # --- what is judged

    def _wrong(self, code: int, seconds: float, temporary: Path) -> str:
        said = "".join(self._lines)
        if fault_kinds.survives(self._what):
            ended = len(list(temporary.glob("done-*")))
            if self._kind.fault == "full later" and not self._must.search(said):
                return "it is not told"
            return "" if code == 0 and ended == _WORKERS else f"exit code {code}, {ended} workers came to the end"
        if code == 0:
            return "exit code 0"
        if self._what in TO_LAUNCHER:
            number = TO_LAUNCHER[self._what]
            # A signal that comes before anything runs ends the interpreter as it ends any.
            if code not in (128 + number, *([-number] if number == signal.SIGKILL or "early" in self._what else [])):
                return f"exit code {code}"
        if not self._must.search(said):
            return "the cause is not named"
        if seconds > _MOST_S + self._known_after():
            return f"it took too long: {seconds:.1f} s (load {os.getloadavg()[0]:.1f})"
        own = re.search(r'launching/(launcher|attempt)\.py", line \d+, in (run|watch|_)', said)  # not a worker's
        return "a traceback of the launcher" if own else ""

    def _known_after(self) -> float:
        """Return for how long nobody can know that something is wrong."""
        fault, place = self._kind
        more = 0.0
        if fault in ("hang", "endless loop", "hang in C", "prints", "stop") or self._what == "stopped from outside":
            more += _STALL_S
        if place in ("build", "start-up") or "early" in self._what:
            more += _START_S
        if self._what == "hang in start-up":
            more += _START_S  # which is how long others wait for it
        if self._torchrun and not self._workers:  # in the first step, and all have to start
            more += _TORCHRUN_S
        return more

    def _last_is_killed(self) -> bool:
        """Tell whether torchrun kills who cannot end; the next run there removes what that one has left."""
        return self._torchrun and (self._kind.fault in ("stop", "hang in C") or self._what == NODE)

    def _left(self, temporary: Path) -> str:
        alive = [worker for worker in psutil.wait_procs(self._workers, timeout=2)[1] if not _is_zombie(worker)]
        if alive:
            return f"{len(alive)} processes are left"
        ours = {"x", "checkpoints", *(f"done-{rank}" for rank in range(_WORKERS))}
        left = [path for path in temporary.iterdir() if path.name not in ours and "torchelastic" not in path.name]
        for launcher in self._launchers:
            left += [path for path in run_folders.root().glob(f"run-{launcher.pid}*") if _is_of(path, launcher.pid)]
        if not self._last_is_killed():
            left += run_folders.root().glob(f"torchrun-{self._port}-*")
        listening = [str(self._port)] if self._torchrun and not _is_free(self._port) else []
        return f"left behind: {left or listening}" if left or listening else ""


def _opened(
    command: list[str], environment: dict[str, str], output: IO[str] | int = subprocess.PIPE
) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment, cwd=_ROOT)


def _disturb(worker: psutil.Process) -> None:
    """Ask for a page at every port that a worker listens at."""
    for connection in worker.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            with suppress(OSError), socket.create_connection(connection.laddr, timeout=1) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")


def _kill_all(pid: int) -> None:
    """Kill a process and all below it at once."""
    above = psutil.Process(pid)
    for process in (above, *above.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _is_of(path: Path, pid: int) -> bool:
    """Tell whether a folder is that of a launcher, and not of one with a longer number."""
    return re.fullmatch(rf"run-{pid}(\D.*)?", path.name) is not None


def _is_zombie(process: psutil.Process) -> bool:
    """Tell whether a process has ended, and only its new parent has not noticed yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description="random faults: are they named, and is anything left")
    parser.add_argument("--count", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--only", metavar="KINDS", help="some kinds, with semicolons")
    parser.add_argument("--list", action="store_true", help="list the kinds, and what must be said of each")
    parser.add_argument("--transport", choices=("rpc", "zmq"), default="zmq")
    parser.add_argument("--exec", action="store_true", help="start every process as usual, not as a fork")
    parser.add_argument("--torchrun", action="store_true", help="let torchrun start the workers")
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job would hand on that it is ignored
    prepare()
    chosen = (
        options.only.split("; ") if options.only else fault_kinds.kinds(options.transport, torchrun=options.torchrun)
    )
    if options.list:
        said = fault_kinds.of_torchrun if options.torchrun else fault_kinds.said_of
        sys.exit("\n".join(f"{what:32} {said(what)}" for what in chosen))
    draw = random.Random(options.seed)
    draw.shuffle(chosen)
    outcomes = []
    for number in range(options.count):
        what = chosen[number % len(chosen)]
        found = Trial(what, draw, options.transport, forked=not options.exec, torchrun=options.torchrun).run()
        outcomes.append(found)
        print(f"{what:38} {found.seconds:6.1f} s  {found.wrong or 'right'}", flush=True)
    right = sum(not outcome.wrong for outcome in outcomes)
    times = sorted(outcome.seconds for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right; from the last step to the end {statistics.median(times):.1f} s in the "
          f"middle, {times[-1]:.1f} at most (a hang is known after {_STALL_S} s)")  # fmt: skip
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    main()
