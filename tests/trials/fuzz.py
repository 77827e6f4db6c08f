"""Random models by random schedules, piped and in one process: whether any bit differs, anything hangs or raises.

    python tests/trials/fuzz.py [--runs 1000] [--first 0] [--seconds 600] [--jobs 1]
    python tests/trials/fuzz.py --workers 2 --transport rpc      # in processes, 25 runs a job
    python tests/trials/fuzz.py --whole  # models with a forward of their own, and anything around
    python tests/trials/fuzz.py --specs --runs 4000  # random specs: checker, state machines and simulator
    python tests/trials/fuzz.py --show 17  # what run 17 is, and what happens; --doubled: in double

A run is one number: model, schedule, workers, microbatches, order, optimizer and calls follow from it. It ends as
`identical`; as `rounding`, where gradients of what several stages use are summed in another order, sparse ones are
merged otherwise than by autograd, or a reentrant checkpoint adds to gradients by itself: then the same in double
precision is equal but for 1e-9, and under autocast, where it grows, all is close up to the first update; as `refused`,
in one sentence; as `illegal`, if one process cannot train it either; or as one of these, which are printed: DIFFERENT,
HANG, TRACEBACK, UNCLEAR (a refusal that is more than a sentence) or UNSETTLED (it cannot be run in double precision).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from trials.fuzz_cases import Case  # noqa: E402
from trials.fuzz_runs import End, run, tried  # noqa: E402

#: nothing has been told of a run for so long
_HANG_S = 300.0
_BAD = ("DIFFERENT", "HANG", "TRACEBACK", "UNCLEAR", "UNSETTLED")


def tell(number: int, end: End, about: str) -> None:
    """Tell the process that counts."""
    print(json.dumps({"number": number, "how": end.how, "detail": end.detail, "about": about}), flush=True)


def _settle() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Scripts would be compiled anew after some runs, and compute otherwise then.
    torch._C._jit_set_profiling_executor(False)
    torch._C._jit_set_profiling_mode(False)


def work(numbers: range, workers: int | None, specs: bool, whole: bool) -> None:
    """Run one after the other, in this process."""
    _settle()
    for number in numbers:
        print(json.dumps({"begins": number}), flush=True)
        if specs:
            from trials.fuzz_specs import tried as tried_spec

            how, detail, about = tried_spec(number)
            end = End(how, detail)
        else:
            end, about = tried(number, workers, whole)
        if end.how != "elsewhere":
            tell(number, end, about)
        if "RANK" in os.environ and not end.goes_on:
            return  # the job is over


class Counted:
    """Counts how runs end, and prints what must not be."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.begin = time.monotonic()

    def take(self, number: int, how: str, detail: str, about: str) -> None:
        """Count a run."""
        self.ends[how] += 1
        if how in ("refused", "illegal"):
            self.refusals[f"{how}: " + re.sub(r"\d+", "N", detail)[:150]] += 1
        if how in _BAD:
            print(f"--- run {number}: {how}: {detail}\n    {about}", flush=True)
        if sum(self.ends.values()) % 500 == 0:
            self.print()

    def print(self) -> None:
        """Print the counts so far."""
        seconds = time.monotonic() - self.begin
        ends = ", ".join(f"{count} {how}" for how, count in self.ends.most_common())
        print(f"{sum(self.ends.values())} runs in {seconds:.0f} s: {ends}", flush=True)
        for refusal, count in self.refusals.most_common(40):
            print(f"{count:6} {refusal}", flush=True)


class Child(threading.Thread):
    """Runs its share of the numbers in a process of its own, and starts it again behind a run that hangs."""

    def __init__(self, numbers: range, typed: argparse.Namespace, told: queue.SimpleQueue[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self._numbers, self._typed, self._told = numbers, typed, told
        self.stop = False

    def run(self) -> None:
        left = self._numbers
        while len(left) and not self.stop:
            at_once = left[: 25 if self._typed.transport != "local" else len(left)]
            done = self._watch(at_once)
            left = left[done:]
        self._told.put({})

    def _watch(self, numbers: range) -> int:
        """Start a process; return how many runs it has ended, one that hangs among them."""
        share = ["--share", f"{numbers.start},{numbers.stop},{numbers.step}"]
        own = [str(Path(__file__)), *share] + ["--specs"] * self._typed.specs + ["--whole"] * self._typed.whole
        command = [sys.executable, *own]
        if self._typed.transport != "local":
            workers = str(self._typed.workers)
            launch = [sys.executable, "-m", "rpc_pipe", "run", "--transport", self._typed.transport]
            command = [*launch, "--workers", workers, own[0], "--", *own[1:], "--workers", workers]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        stdout = process.stdout

        def read() -> None:
            for line in stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        ended: set[int] = set()
        running, said = numbers.start, ""
        while not self.stop:
            try:
                line = lines.get(timeout=_HANG_S)
            except queue.Empty:
                self._told.put({"number": running, "how": "HANG", "detail": f"no end in {_HANG_S:g} s", "about": said})
                ended.add(running)
                break
            if line is None:
                if len(ended) < len(numbers) and not (self._typed.transport != "local" and ended):
                    self._told.put({"number": running, "how": "TRACEBACK", "detail": "process ended", "about": said})
                    ended.add(running)
                break
            found = re.search(r"\{.*\}", line)
            try:
                event = json.loads(found.group()) if found else None
            except ValueError:
                event = None
            if event is None:
                said = (said + line)[-3000:]
            elif "begins" in event:
                running, said = event["begins"], ""
            elif event["number"] not in ended:  # what one worker refuses, others fail of
                self._told.put(event)
                ended.add(event["number"])
        process.kill()
        process.wait()
        return len(ended)


def main() -> None:
    """Run what is typed and print figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--workers", type=int, help="needed with a transport; else drawn")
    parser.add_argument("--transport", choices=["local", "rpc", "zmq"], default="local")
    parser.add_argument("--specs", action="store_true", help="random specs instead of models")
    parser.add_argument("--whole", action="store_true", help="models with a forward of their own alone")
    parser.add_argument("--show", type=int, help="run this one and tell all of it")
    parser.add_argument("--doubled", action="store_true", help="show it in double precision")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.share is not None:
        work(range(*map(int, typed.share.split(","))), typed.workers, typed.specs, typed.whole)
        return
    if typed.show is not None:
        _settle()
        if typed.doubled:
            end, about = run(case := Case(typed.show, typed.workers, doubled=True, whole=typed.whole)), str(case)
        else:
            end, about = tried(typed.show, typed.workers, typed.whole)
        print(about, end.how, end.detail, sep="\n")
        return
    numbers = range(typed.first, typed.first + typed.runs)
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    children = [Child(numbers[job :: typed.jobs], typed, told) for job in range(typed.jobs)]
    for child in children:
        child.start()
    counted, ended = Counted(), 0
    while ended < len(children):
        event = told.get()
        if event:
            counted.take(**event)
        ended += not event
        if time.monotonic() - counted.begin > typed.seconds:
            for child in children:
                child.stop = True
    counted.print()
    sys.exit(any(counted.ends[how] for how in _BAD))


if __name__ == "__main__":
    main()
