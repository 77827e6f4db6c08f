"""Malformed input of all kinds, drawn at random: is each refused with one clear error, at once, in little memory.

    python tests/trials/malformed.py [--count 1000] [--first 0] [--seed 0] [--only options,csv,...] [--list]

A case is right if the command ends within 5 s with exit code 2 and one error, without a traceback of ours, and no
process takes 500 MB. A case that may as well be legal, such as a plan with a field too many, may be taken too.
Commands and their workers are forks of one process that has imported torch.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

from trials import malformed_cases, malformed_code, malformed_surroundings
from trials.forked import end_with, prepare
from trials.malformed_input import Case, given

_MOST_S, _MOST_MB, _KILL_S = 5.0, 500, 40.0
_MOST_ADDRESSES = 2 * 2**30
_TAKEN = (0, 2)
#: of a model or a script that raises when it runs: its own traceback is shown in a block of this title
_FAILED = " failed ──"
_CASES = (
    malformed_cases.options, malformed_cases.texts, malformed_cases.unknown, malformed_cases.csv,
    malformed_cases.documents, malformed_cases.outputs, malformed_cases.inputs, malformed_cases.environments,
    malformed_code.schedules, malformed_code.models, malformed_surroundings.mangle, malformed_surroundings.together,
    malformed_surroundings.surroundings, malformed_surroundings.calls,
)  # fmt: skip
KINDS = {function.__name__: function for function in _CASES}


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    said: str
    seconds: float
    peak_mb: float

    def wrong(self, case: Case) -> str:
        """Return what is not as it should be, nothing if all is."""
        errors = [line for line in self.said.splitlines() if line.startswith("error: ")]
        if self.seconds > _MOST_S * max(1, os.getloadavg()[0] / (os.cpu_count() or 1)):  # others run here too
            return f"took {self.seconds:.1f} s"
        if self.peak_mb > _MOST_MB:
            return f"took {self.peak_mb:.0f} MB"
        if "Traceback (most recent call last)" in self.said and not (self.code == 1 and _FAILED in self.said):
            return "a traceback"
        if self.code not in ((2,) if case.wrong else (*_TAKEN, *case.codes)):
            return f"exit code {self.code}"
        if self.code == 2 and len(errors) != 1:
            return f"{len(errors)} errors"
        if self.code == 2 and case.option not in errors[0]:
            return f"does not name {case.option}"
        return "an endless error" if any(len(line) > 2000 for line in errors) else ""


def run(typed: list[str], folder: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a command in `folder`."""
    said = folder.with_suffix(".said")
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _be(typed, folder, environment, said)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > begin + _KILL_S:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    seconds = time.monotonic() - begin
    text = said.read_bytes()[: 2**22].decode(errors="replace")
    return Outcome(os.waitstatus_to_exitcode(status), text, seconds, used.ru_maxrss / 1e3)


def _be(typed: list[str], folder: Path, environment: Mapping[str, str], said: Path) -> None:
    """The life of the process of a command."""
    os.setsid()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_AS, (_addresses() + _MOST_ADDRESSES,) * 2)
    end_with(["-m", "rpc_pipe", *typed])


def _addresses() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def try_case(case: Case, number: int, root: Path) -> tuple[Outcome, str]:
    """Run a case in a folder of its own; return what is wrong with how it ended."""
    folder = root / f"case-{number}"
    folder.mkdir()
    case.make(folder)
    environment = {"RPC_PIPE_LOGS": "off", "XDG_CACHE_HOME": str(root / "cache"), **case.environment}
    outcome = run(case.typed, folder, environment)
    if outcome.seconds > _MOST_S:  # the machine may have been busy
        outcome = run(case.typed, folder, environment)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome, outcome.wrong(case)


def main() -> None:
    parser = argparse.ArgumentParser(description="malformed input of all kinds")
    parser.add_argument("--count", type=int, default=1000, help="(1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--list", action="store_true", help="show every case and what was said")
    options = parser.parse_args()
    prepare()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    kinds = options.only.split(",")
    codes: Counter[str] = Counter()
    wrong = 0
    slowest = largest = 0.0
    root = Path(tempfile.mkdtemp())  # no TemporaryDirectory: what a fork inherits would remove it at its end
    try:
        made = given(root / "given", lambda typed, at: run(typed, at, {"RPC_PIPE_LOGS": "off"}))
        for number in range(options.first, options.first + options.count):
            kind = kinds[number % len(kinds)]
            case = KINDS[kind](random.Random(f"{options.seed} {kind} {number}"), made)
            outcome, what = try_case(case, number, root)
            slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.peak_mb)
            codes["taken" if outcome.code == 0 else "refused" if outcome.code == 2 else "other"] += 1
            wrong += bool(what)
            if what or options.list:
                print(f"{number} {kind}: {what or 'right'}: {' '.join(map(_short, case.typed))} {case.note}")
                print(
                    "    " + "\n    ".join(outcome.said.strip().splitlines()[-12 if what else -2 :])[:3000], flush=True
                )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    told = ", ".join(f"{count} {name}" for name, count in sorted(codes.items()))
    print(f"{options.count - wrong} of {options.count} right ({told}); the slowest took {slowest:.1f} s, the largest "
          f"{largest:.0f} MB")  # fmt: skip
    sys.exit(wrong > 0)


def _short(text: str) -> str:
    return repr(text if len(text) < 60 else f"{text[:50]}...{len(text)}")


if __name__ == "__main__":
    main()
