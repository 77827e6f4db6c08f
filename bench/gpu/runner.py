"""Runs the commands of `scripts/gpu` within limits, and writes down what they said. Torch-free."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TAIL = 4000
#: said of what CUDA alone has, on another device
NOT_HERE = "not on this device"


def verdict(code: int | str, told: str, typed: str) -> str:
    """Return how close `rpc-pipe verify --json` has found two runs, by its words; "": they differ."""
    if code != 0:
        return ""
    if '"identical": true' in told:
        return "bit for bit"
    # Sums of slices, and of parts of linear layers, round otherwise, which `verify` lets pass.
    return "within rounding" if "--slices" in typed or "--shard tp" in typed else ""


@dataclass
class Outcome:
    """What a command came to."""

    code: int | str
    text: str
    seconds: float

    @property
    def found(self) -> dict[str, Any] | None:
        """What it printed behind `RESULT`."""
        lines = re.findall(r"RESULT (\{.*\})", self.text)
        return json.loads(lines[-1]) if lines else None

    @property
    def last(self) -> str:
        """The last line that it printed."""
        return next((line.strip() for line in reversed(self.text.splitlines()) if line.strip()), "")[:200]


@dataclass
class Runner:
    """The commands of one run.

    Args:
        device: as `--device`.
        until: when, by `time.monotonic`, the whole must have ended.
        folder: for the report and the log.
        quick: few sizes and steps.
        planted: part and error, which a rehearsal must find.
    """

    device: str
    until: float
    folder: Path
    quick: bool
    planted: tuple[str, str]
    site: str = ""
    part: str = ""
    part_until: float = 0.0
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = (self.folder / "log.txt").open("w")
        self._report = (self.folder / "report.txt").open("w")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close report and log."""
        self._log.close()
        self._report.close()

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU, or the host rehearses."""
        return self.device != "cpu"

    @property
    def left(self) -> float:
        """Seconds that are left to the part."""
        return min(self.until, self.part_until) - time.monotonic()

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment of a part's commands."""
        paths = [self.site, str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GPU_DEVICE": self.device,
            "GPU_PLANTED": self.planted[1] if self.planted[0] == part else "",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "RPC_PIPE_LOGS": "off",
        }

    def command(self, typed: Iterable[str]) -> list[str]:
        """Return a command of the part; one that hangs, if that is planted."""
        hangs = self.planted == (self.part, "hang")
        return [sys.executable, *(["-c", "import time; time.sleep(10_000)"] if hangs else typed)]

    def call(self, name: str, command: Iterable[str], limit: float = 90.0, cwd: Path = ROOT) -> Outcome:
        """Run a command in a session of its own, which is killed behind its limit."""
        part, begin, limit = self.part, time.monotonic(), min(limit, self.left)
        if limit <= 1:
            return Outcome("no time left", "no time left", 0.0)
        argv = self.command(command)
        out = self.folder / f"out-{threading.get_ident()}.txt"
        with out.open("w") as file:
            process = subprocess.Popen(
                argv,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment(part),
                cwd=cwd,
                start_new_session=True,
            )
            code: int | str
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"timeout after {limit:.0f} s"
            with _gone_is_fine():
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = out.read_text(errors="replace")
        out.unlink()
        seconds = time.monotonic() - begin
        with self._lock:
            self._log.write(f"\n===== {part}: {name}: {code}, {seconds:.1f} s\n$ {' '.join(argv)}\n{text[-_TAIL:]}\n")
            self._log.flush()
        return Outcome(code, text, seconds)

    def say(self, line: str) -> None:
        """Print a line, and write it to the report."""
        with self._lock:
            print(line, flush=True)
            self._report.write(line + "\n")
            self._report.flush()

    def note(self, name: str, found: Any) -> None:
        """Write a result of the part down."""
        with self._lock:
            self.results.setdefault(self.part, {})[name] = found
            (self.folder / "results.json").write_text(json.dumps(self.results, indent=1))

    def fail(self, name: str, why: str) -> None:
        """Write down that something of the part is wrong."""
        with self._lock:
            self.wrong.setdefault(self.part, []).append(name)
        self.note(name, {"wrong": why})
        self.say(f"  WRONG {name}: {why[-600:]}")

    def together(self, jobs: Iterable[Callable[[], None]], at_once: int) -> None:
        """Run jobs, some at once."""
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()

    def run(
        self, parts: Mapping[str, tuple[Callable[[Runner], None], float, tuple[str, ...]]], wanted: Iterable[str]
    ) -> int:
        """Run parts one after the other, each within its seconds; return how many are wrong or were left out."""
        left_out = []
        for name in wanted:
            part, seconds = (
                parts[name][0],
                parts[name][1] * (1 if self.on_gpu else 4),
            )  # a host has fewer cores, and others use them
            self.part, begin = name, time.monotonic()
            self.part_until = begin + seconds
            if self.until - begin < 5:
                left_out.append(name)
                continue
            self.say(f"== {name} (at most {min(seconds, self.until - begin):.0f} s)")
            try:
                part(self)
            except Exception as error:
                self.fail("the part itself", f"{type(error).__name__}: {error}")
            self.say(f"== {name}: {time.monotonic() - begin:.0f} s, {len(self.wrong.get(name, []))} wrong")
        if left_out:
            self.say(f"NOT RUN for want of time: {', '.join(left_out)}")
        self.say(f"WRONG: {', '.join(self.wrong)}" if self.wrong else "nothing is wrong")
        return len(self.wrong) + len(left_out)


class _gone_is_fine:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is not None and issubclass(kind, ProcessLookupError)
