"""Random models by random schedules, piped and in one process: whether any bit differs, anything hangs or raises.

    python tests/trials/fuzz.py [--runs 1000] [--first 0] [--seconds 600]
    python tests/trials/fuzz.py --whole  # models with a forward of their own, and anything around
    python tests/trials/fuzz.py --show 17  # what run 17 is, and what happens; --doubled: in double

A run is one number: model, schedule, workers, microbatches, order, optimizer and calls follow from it. It ends as
`identical`; as `rounding`, where gradients of what several stages use are summed in another order, sparse ones are
merged otherwise than by autograd, or a reentrant checkpoint adds to gradients by itself: then the same in double
precision is equal but for 1e-9, and under autocast, where it grows, all is close up to the first update; as `refused`,
in one sentence; as `illegal`, if one process cannot train it either; or as one of these, which are printed: DIFFERENT,
HANG, TRACEBACK, UNCLEAR (a refusal that is more than a sentence) or UNSETTLED (it cannot be run in double precision).
A run without an end in five minutes shows the stacks of all threads and ends the program; `--first` goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from trials.fuzz_cases import Case  # noqa: E402
from trials.fuzz_runs import run, tried  # noqa: E402

_HANG_S = 300.0
BAD = ("DIFFERENT", "HANG", "TRACEBACK", "UNCLEAR", "UNSETTLED")


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
        if how in BAD:
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


def main() -> None:
    """Run what is typed and print figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--whole", action="store_true", help="models with a forward of their own alone")
    parser.add_argument("--show", type=int, help="run this one and tell all of it")
    parser.add_argument("--doubled", action="store_true", help="show it in double precision")
    typed = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if typed.show is not None:
        if typed.doubled:
            end, about = run(case := Case(typed.show, doubled=True, whole=typed.whole)), str(case)
        else:
            end, about = tried(typed.show, typed.whole)
        print(about, end.how, end.detail, sep="\n")
        return
    counted = Counted()
    for number in range(typed.first, typed.first + typed.runs):
        if time.monotonic() - counted.begin > typed.seconds:
            break
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        end, about = tried(number, typed.whole)
        counted.take(number, end.how, end.detail, about)
    faulthandler.cancel_dump_traceback_later()
    counted.print()
    sys.exit(any(counted.ends[how] for how in BAD))


if __name__ == "__main__":
    main()
