"""Random pauses of processes: whether training comes to the same end, whatever the order of events.

    python tests/trials/pauses.py [--count 20] [--seed 0] [--only 7] [--deaths]

A case is a job of several workers with a schedule, a transport and options, and a script of random calls; all are drawn
from the number of the case. It runs twice: once alone, once while processes of the job are stopped for up to 0.3 s, one
after the other. Both have to print the same losses. In half of the elastic jobs a worker is killed, too. A job that
takes longer than a minute shows the stacks of its processes.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

import numpy as np
from fork_server import tree
from processes import start, unmerged

_MOST_S, _PAUSED_S = 60.0, 25.0
_PAUSES_S = 0.001, 0.01, 0.05, 0.3
#: schedule, its workers, stages a worker has, whether it may have replicas
_SCHEDULES = [
    ("1f1b", 3, 1, True), ("gpipe", 3, 1, True), ("zb-h1", 3, 1, True), ("interleaved", 2, 2, True),
    ("zb-v", 2, 2, True), ("chimera", 2, 1, False), ("hanayo", 2, 2, True), ("dualpipev", 2, 2, False),
    ("pipedream", 3, 1, False), ("pipedream-2bw", 3, 1, False), ("varuna", 3, 1, True),
]  # fmt: skip
_CALLS = "train", "train to its end", "step", "evaluate", "predict", "gather", "barrier", "weights", "save"

SCRIPT = """
import os, random, sys
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, tokens

def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

stages, seed, readers, norm, folder, saved, *calls = sys.argv[1:]
layers = [partial(nn.Embedding, 50, 8), *(nn.Tanh for _ in range(int(stages) - 2)), partial(nn.Linear, 8, 50)]
optimizer = partial(torch.optim.SGD, lr=0.1)
training = Training(optimizer=optimizer, max_grad_norm=0.5 if norm == "norm" else None)
pipe = Pipeline(layers, loss_fn, training=training)
with open(saved + "/pid-" + os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()))
source = (lambda: tokens(folder, 4)) if readers == "first" else tokens(folder, 4)
loader = Loader(source, rows=8, readers=readers, seed=int(seed))
found = []
for call in calls:
    if call.startswith("train"):
        for step, loss in enumerate(pipe.train(loader)):
            found.append(loss)
            if step == 2 and call == "train":
                break
            if step == 5:
                break
    elif call in ("step", "evaluate", "predict"):
        for batch in loader:
            out = pipe.predict(batch[0], to=None) if call == "predict" else getattr(pipe, call)(batch)
            found.append(float(out.sum()) if call == "predict" else out)
            break
    elif call == "gather":
        found.append(float(len(pipe.gather("worker", lambda actor: torch.tensor(actor.worker)) or ())))
    elif call == "barrier":
        pipe.barrier()
    elif call == "weights":
        weights = pipe.weights.state_dict() or {}
        found.append(sum(float(each.sum()) for each in weights.values()))
    elif call == "save":
        pipe.checkpoints.save(saved)
print(" ".join(f"{each:.9g}" for each in found) + "\\n", end="")
"""


def drawn(number: int) -> tuple[list[Any], list[Any]]:
    """Return the options of a case for `rpc-pipe run`, and its script's arguments, without folders."""
    draw = random.Random(number)
    schedule, workers, chunks, may_have = draw.choice(_SCHEDULES)
    replicas = draw.choice([1, 2]) if may_have else 1
    transport = draw.choice(["rpc", "zmq"])
    options: list[Any] = ["--schedule", schedule, "--workers", workers * replicas, "--microbatches", 4]
    options += ["--transport", transport]
    if replicas > 1:
        options += ["--replicas", replicas, "--zero", draw.choice([0, 1])]
    if transport == "zmq" and replicas > 1 and options[-1] == 0 and draw.random() < 0.6:
        options += ["--elastic"]
        options += ["--slices", 2] if schedule in ("1f1b", "zb-h1", "zb-v") and draw.random() < 0.5 else []
    elif schedule in ("1f1b", "zb-h1", "zb-v") and draw.random() < 0.3:
        options += ["--slices", 2]
    elif schedule in ("1f1b", "gpipe", "zb-h1", "zb-v") and draw.random() < 0.3:
        options[3] *= 2  # processes
        options += ["--members", 2, "--shard", draw.choice(["fsdp", "fsdp-kept"])]
    readers = draw.choice(["users", "first"]) if "--slices" not in options and "--members" not in options else "users"
    norm = draw.choice(["norm", "none"]) if not schedule.startswith("pipedream") else "none"
    calls = draw.choices(_CALLS, weights=[4, 1, 3, 2, 1, 1, 1, 1, 1], k=6)
    if _dies(number, options):  # the results of these are on one process, which may die
        calls = ["step", *(call for call in calls if call not in ("gather", "weights"))]
    return options, [workers * chunks, number, readers, norm, *calls]


def _dies(number: int, options: list[Any]) -> bool:
    """Return whether a worker of a case is killed."""
    return "--elastic" in options and random.Random(f"dies {number}").random() < 0.5


def write(folder: Path) -> None:
    """Write the script and its data."""
    rng = np.random.default_rng(0)
    for i in range(4):
        rng.integers(50, size=61, dtype=np.uint16).tofile(folder / f"{i}.u16")
    (folder / "train.py").write_text(SCRIPT)


def run(
    options: list[Any], arguments: list[Any], folder: Path, pauses: random.Random | None, dies: bool = False
) -> tuple[int, str]:
    """Run a case, with pauses if numbers are given that draw them, and perhaps a death; return exit code and output."""
    with tempfile.TemporaryDirectory() as saved:
        typed = *options, "--", *arguments[:4], folder, saved, *arguments[4:]
        process = start("-m", "rpc_pipe", "run", folder / "train.py", *typed, merged=True, OMP_NUM_THREADS="1")
        ended = threading.Event()
        if pauses is not None:
            threading.Thread(target=_pause, args=(process.pid, pauses, ended)).start()
        if pauses is not None and dies:
            chosen = random.Random(pauses.random())
            threading.Thread(target=_kill, args=(Path(saved), options[3], chosen, ended)).start()
        try:
            output, _ = process.communicate(timeout=_MOST_S)
        finally:
            ended.set()
            process.kill()
    assert process.returncode is not None
    return process.returncode, output


def _pause(pid: int, draw: random.Random, ended: threading.Event) -> None:
    """Stop processes of a job and let them go on, one after the other."""
    last = time.monotonic() + _PAUSED_S
    while not ended.wait(0.15 * draw.random()) and time.monotonic() < last:
        chosen = draw.choice(tree(pid))
        with suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGSTOP)
            time.sleep(draw.choice(_PAUSES_S))
            os.kill(chosen, signal.SIGCONT)


def _kill(folder: Path, num_workers: int, draw: random.Random, ended: threading.Event) -> None:
    """Kill a worker when all have made their pipelines."""
    while len(made := sorted(folder.glob("pid-*"))) < num_workers and not ended.wait(0.02):
        pass
    if not ended.wait(draw.random()):
        with suppress(ProcessLookupError):
            os.kill(int(draw.choice(made).read_text()), signal.SIGKILL)


def _figures(output: str) -> list[str]:
    return re.findall(r"\| ([-0-9.e+ ]+)$", unmerged(output), re.MULTILINE)


def tried(number: int, folder: Path) -> str:
    """Return what is wrong with a case; nothing if nothing is."""
    options, arguments = drawn(number)
    found = []
    try:
        for pauses in (None, random.Random(number)):
            code, output = run(options, arguments, folder, pauses, _dies(number, options))
            figures = _figures(output)
            if code or not figures:
                return f"ended with {code}{'' if pauses is None else ', paused'}:\n{output}"
            found.append(figures)
    except subprocess.TimeoutExpired as late:
        return "hangs:\n" + "\n".join(late.__notes__)
    return "" if set(found[0]) == set(found[1]) else f"{found[0]} alone, {found[1]} with pauses"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of a case")
    parser.add_argument("--deaths", action="store_true", help="only cases in which a worker is killed")
    options = parser.parse_args()
    numbers = (n for n in count(options.seed) if not options.deaths or _dies(n, drawn(n)[0]))
    cases = list(islice(numbers, options.count)) if options.only is None else [options.only]
    bad = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder)
        for number in cases:
            wrong = tried(number, folder)
            bad += bool(wrong)
            options_of, arguments = drawn(number)
            dies = "a worker dies:" if _dies(number, options_of) else ""
            print(number, *options_of, *arguments, dies, wrong or "right", flush=True)
    print(f"{len(cases) - bad} of {len(cases)} cases are right")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
