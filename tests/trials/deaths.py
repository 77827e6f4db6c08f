"""Random deaths of workers in an elastic job: are the trained weights those of the undisturbed run, is anything left.

    python tests/trials/deaths.py [--count 10] [--seed 0] [--schedules 1f1b,zb-h1] [--how step|train] [--of 2x2|3x3]
    python tests/trials/deaths.py --models conv,deferred ...    with running statistics (see `tests/mortal.py`)

A death comes from outside at a random moment, or by the process's own hand when an action of a kind begins: also two at
once, and one within the recovery from another.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
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
_STEPS, _MOST_S = 16, 150.0
_KINDS = "FBUTNDCSG"
#: options of each job, and what the last one has written
_options: list[str] = []
_last_losses = [""]


def run(
    schedule: str,
    of: int,
    how: str,
    kills: list[str],
    outside: list[tuple[int, int, float]],
    more: list[str],
    steps: int = _STEPS,
) -> tuple[str, str]:
    """Return the hash of the trained weights and losses, or what went wrong; and what was printed.

    Args:
        of: stages, and replicas.
        outside: (worker, step, seconds after it) of kills from outside.
    """
    folder = Path(tempfile.mkdtemp(prefix="deaths-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    try:
        process = _started(folder, schedule, of, how, steps, kills, more)
        for worker, step, after in outside:
            _kill_at(folder, worker, step, after, process)
        try:
            said, _ = process.communicate(timeout=_MOST_S + steps / 10)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate()
            return "it hangs", said
        if process.returncode:
            return f"exit code {process.returncode}", said
        if left := [path.name for path in temporary.iterdir() if "inductor" not in path.name]:
            return f"left behind: {left}", said
        return _made(folder), said
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, schedule: str, of: int, how: str, steps: int, kills: list[str], more: list[str]) -> Any:
    script = [str(_ROOT / "tests" / "mortal.py"), "--workers", str(of * of), "--replicas", str(of)]
    script += ["--transport", "zmq", "--elastic", "--schedule", schedule, *_options, *more]
    typed = ["-m", "rpc_pipe", "run", *script, "--", str(folder), how, str(steps), str(of), *kills]
    return start(*typed, merged=True, TMPDIR=str(folder / "tmp"), RPC_PIPE_LOGS="off", PYTHONPATH=_PATHS)


def _made(folder: Path) -> str:
    made = (folder / "weights.safetensors").read_bytes() + (folder / "losses").read_bytes()
    _last_losses[0] = (folder / "losses").read_text()
    return hashlib.sha256(made).hexdigest()[:12]


def _kill_at(folder: Path, worker: int, step: int, after: float, process: Any) -> None:
    end = time.monotonic() + _MOST_S / 2
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, ValueError):
            if int((folder / f"step-{worker}").read_text()) >= step:
                break
        time.sleep(0.005)
    time.sleep(after)
    with suppress(OSError, ValueError):
        os.kill(int((folder / f"pid-{worker}").read_text()), signal.SIGKILL)


@functools.cache
def undisturbed(schedule: str, of: int, how: str, steps: int = _STEPS, model: str = "") -> tuple[str, str]:
    """Return the hash without a death, and the losses and buffers."""
    found, said = run(schedule, of, how, [], [], [], steps)
    print(f"undisturbed {schedule} {of}x{of} {how} {model}: {found}", flush=True)
    if " " in found:
        print(said[-2000:])
    return found, _last_losses[0]


def _differences(one: str, other: str) -> str:
    """Return which losses and buffers differ."""
    (losses, buffers), (others, theirs) = ast.literal_eval(one), ast.literal_eval(other)
    steps = [number for number, pair in enumerate(zip(losses, others, strict=True)) if pair[0] != pair[1]]
    return f"losses {steps}, buffers {[a[0] for a, b in zip(buffers, theirs, strict=True) if a != b]}"


def drawn(draw: random.Random, of: int, how: str) -> tuple[list[str], list[tuple[int, int, float]]]:
    """Return the kills of a trial: by the process's own hand, and from outside."""
    workers = list(range(of * of))
    draw.shuffle(workers)
    first = workers[0]
    other = next(each for each in workers if each // of != first // of)  # of another stage
    step, kinds = draw.randrange(1, _STEPS - 4), list(_KINDS)
    if how == "train":
        kinds += ["evaluate", "predict", "pretrained", "save", "write"] * 2
    kind = draw.choice(kinds)
    step = step // 3 * 3 + 1 if len(kind) > 1 else step
    which = draw.choice(["outside", "outside", "action", "action", "two", "twice", "meet"])
    if which == "outside":
        return [], [(first, step, draw.random() / 4)]
    if which == "action":
        return [f"{first}:{step}:{kind}"], []
    if which == "two":
        return [f"{first}:{step}:{kind}"], [(other, step, draw.random() / 20)]
    if which == "twice":
        return [f"{first}:{step}:{kind}", f"{other}:{step + 3}:{draw.choice(_KINDS)}"], []
    return [f"{first}:{step}:{kind}", f"{other}:{step}:meet"], []


def main() -> None:
    parser = argparse.ArgumentParser(description="random deaths: the weights of the undisturbed run, nothing left")
    parser.add_argument("--count", type=int, default=10, help="(10)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--schedules", default="1f1b", help="with commas (1f1b)")
    parser.add_argument("--how", choices=("step", "train"), default="step", help="(step)")
    parser.add_argument("--of", choices=("2x2", "3x3"), default="2x2", help="stages x replicas (2x2)")
    parser.add_argument("--models", default="", help="with commas: conv, deferred, tied; or none of them")
    parser.add_argument("--device", help="of all workers, such as cuda:0")
    parser.add_argument("--kill", nargs="*", help="these kills, as mortal.py takes them")
    options = parser.parse_args()
    _options.extend(["--device", options.device] if options.device else ())
    same, of, seconds = 0, int(options.of[0]), []
    for number in range(options.count):
        draw = random.Random(options.seed + number)
        schedule = draw.choice(options.schedules.split(","))
        kills, outside = (options.kill, []) if options.kill else drawn(draw, of, options.how)
        os.environ["MODEL"] = model = draw.choice(options.models.split(","))
        whole, losses = undisturbed(schedule, of, options.how, model=model)
        begin = time.monotonic()
        found, said = run(schedule, of, options.how, kills, outside, [])
        seconds.append(time.monotonic() - begin)
        epochs = len(re.findall(r"is gone \(SIGKILL\): epoch", said))
        same += found == whole
        verdict = "same" if found == whole else f"WRONG: {found}"
        if found != whole and " " not in found:
            verdict += f", {_differences(losses, _last_losses[0])}"
        print(f"{options.seed + number} {schedule} {model} {kills} {outside}: {verdict}, {epochs} epochs", flush=True)
        if found != whole:
            print(said[-3000:])
    print(f"{same} of {options.count} have the bits of the undisturbed run")
    sys.exit(same != options.count)


if __name__ == "__main__":
    main()
