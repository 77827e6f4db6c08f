"""The parts of `scripts/gpu`. Torch-free: all that computes is a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.runner import NOT_HERE, Outcome, Runner, verdict

_MODELS = "bench/gpu/models.py"
_SCHEDULES = "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "hanayo", "dualpipev"
_OF_FOUR = "zb-v", "chimera", "hanayo", "dualpipev"
_TRANSPORTS = "local", "rpc", "zmq"
#: sizes and steps of a small GPT, on a GPU or not
_SMALL = {True: ("512,8,128,64", "8"), False: ("32,2,16,8", "4")}
#: how a payload of 64 MiB must come inside a host, as workers say at INFO
_WAY, _WAY_ON_DEVICE = (
    re.compile(rf"{payloads} of worker \d+ are (.*)") for payloads in ("large payloads", "payloads on the device")
)

_ABOUT = """
import json, os, platform, sys, importlib.util as u, torch
kind = torch.accelerator.current_accelerator(check_available=True)
print("RESULT", json.dumps({"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
  "devices": torch.accelerator.device_count(), "kind": kind and kind.type,
  "device": kind and torch.get_device_module(kind).get_device_name(0),
  "GiB": kind and torch.accelerator.get_memory_info(0)[1] >> 30,
  "lacks": [m for m in ("zmq", "rich", "safetensors", "numpy", "transformers", "pytest", "psutil", "pippy")
            if u.find_spec(m) is None]}))
"""


def about(run: Runner) -> None:
    """Say what machine this is."""
    done = run.call("about", ["-c", _ABOUT], 60)
    _told(run, "machine", done)


def _told(run: Runner, name: str, done: Outcome) -> dict[str, Any] | None:
    """Write down what a command found; return it, None if it failed."""
    found = done.found
    if found is None or done.code != 0:
        run.fail(name, f"{done.code}: {done.text[-600:]}")
        return None
    run.note(name, found)
    run.say(f"  {name:30s} {json.dumps(found)}  [{done.seconds:.0f} s]")
    return found


def ways(run: Runner) -> None:
    """Time each way of a payload by itself."""
    sizes = "1,16,64" if run.on_gpu else "1" if run.quick else "1,16"
    found = _told(run, "ways alone, ms", run.call("ways", ["-m", "bench.gpu.ways", run.device, sizes], 80)) or {}
    for name, each in found.items():
        if isinstance(each, str) and each != NOT_HERE:
            run.fail(name, each)


def payloads(run: Runner) -> None:
    """Time payloads between the workers of a pipeline, ms a crossing; once where CUDA's handles are refused."""
    sizes, steps = ("1,16,64", "8") if run.on_gpu else ("1", "1") if run.quick else ("1,16", "3")
    rows = [(transport, "") for transport in (_TRANSPORTS[1:2] if run.quick else _TRANSPORTS)]
    cuda, missing = run.device.startswith("cuda"), run.planted == ("payloads", "missing")
    if not cuda:
        run.say(f"  crossing without handles: {NOT_HERE}")
    for transport, refused in [*rows, *([("zmq", "1")] if cuda else [])]:
        name = transport + " without handles" * bool(refused)
        program = ["bench/gpu/payload.py", "--workers", "2", "--device", run.device, "--transport", transport]
        with _environment(RPC_PIPE_SHARED_MEMORY="off" if missing else None, GPU_REFUSED=refused):
            done = run.call(
                name, ["-m", "rpc_pipe", "run", *program, "--", sizes[-2:] if refused else sizes, "8", steps], 60
            )
        _told(run, f"crossing by {name}, ms", done)
        said = sorted(set((_WAY_ON_DEVICE if run.on_gpu else _WAY).findall(done.text)))
        run.say(f"    {'; '.join(said) or 'no way was told'}")
        # Devices other than those of CUDA go by the host, and say nothing of their own.
        worse = ("copied by", "brought by", *(["copied through"] if not refused else ["copied from"]))
        told = said or (run.on_gpu and not cuda)
        if transport != "local" and (not told or any(each.startswith(worse) for each in said)):
            run.fail(f"way by {name}", "; ".join(said) or "none was told: payloads went as messages")


class _environment:
    """A context with other variables of the environment; None: as they are."""

    def __init__(self, **variables: str | None) -> None:
        self._set = {name: value for name, value in variables.items() if value is not None}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._set}
        os.environ.update(self._set)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _rows(run: Runner, sizes: str, rows: list[tuple[int, str]], steps: str, *more: str) -> None:
    """Time steps of a GPT of these sizes (width, depth, length, rows); losses must be those of the first row."""
    count, first = "8" if run.on_gpu else "4", None
    for workers, transport in rows:
        typed = ["plain" if transport == "plain" else "pipe", sizes, count, steps, *more]
        command = ["bench/gpu/train.py", *typed]
        if transport != "plain":
            how = ["--workers", str(workers), "--device", run.device, "--transport", transport]
            command = ["-m", "rpc_pipe", "run", command[0], *how, "--", *typed]
        name = " ".join([sizes.partition(",")[0], "wide:", str(workers), transport, *more])
        found = _told(run, name, run.call(name, command, 60))
        first = first or found
        if found and first and found["losses"] != first["losses"]:
            run.fail(f"losses of {name}", f"{found['losses']}, not {first['losses']}")


def speed(run: Runner) -> None:
    """Time a GPT whose device time dominates."""
    sizes = "4096,4,1024,16" if run.on_gpu else "64,4,32,8"
    rows = [(1, "plain"), (2, "rpc")] if run.quick else [(1, "plain"), (1, "local"), (2, "rpc")]
    _rows(run, sizes, rows, "4" if run.on_gpu else "2")


def small(run: Runner) -> None:
    """Time a small GPT, which launches bind."""
    sizes, steps = _SMALL[run.on_gpu]
    _rows(run, sizes, [(1, "plain"), (2, "rpc")], steps)


def compiled(run: Runner) -> None:
    """Time the small GPT with compiled blocks, beside the plain loop over compiled blocks."""
    sizes, steps = _SMALL[run.on_gpu]
    _rows(run, sizes, [(1, "plain"), (1, "local"), (2, "rpc")], steps, "compile")


def _verify(run: Runner, name: str, typed: list[str], steps: str) -> Callable[[], None]:
    def job() -> None:
        done = run.call(name, ["-m", "rpc_pipe", "verify", *typed, "--device", run.device, "--steps", steps, "--json"])
        found = verdict(done.code, done.text, " ".join(typed))
        told = "\n".join(line for line in done.text.splitlines() if not line.startswith("{"))
        run.note(name, [found, round(done.seconds, 1)])
        if not found:
            run.fail(name, f"{done.code}: {told[-500:]}")

    return job


def _checks(run: Runner, label: str, jobs: dict[str, list[str]], steps: str) -> Callable[[], None]:
    """Return what runs `verify` for several models or schedules in one process."""

    def job() -> None:
        typed = [f"{name}={' '.join(args)}" for name, args in jobs.items()]
        done = run.call(label, ["-m", "bench.gpu.checks", run.device, steps, *typed], 120)
        found = {each["name"]: each for each in map(json.loads, re.findall(r"CHECK (\{.*\})", done.text))}
        for name in jobs:
            each = found.get(name, {"found": "", "why": f"{done.code}: {done.last}", "s": 0})
            run.note(name, [each["found"], each["s"]])
            if not each["found"]:
                run.fail(name, each["why"])

    return job


def _at_once(run: Runner) -> int:
    return max(1, ((os.cpu_count() or 2) - 2) // 2)


def matrix(run: Runner) -> None:
    """Compare schedules, models and transports with one process, bit for bit."""
    models = ("mlp", "conv", "gpt") if run.on_gpu else ("mlp", "gpt") if not run.quick else ("mlp",)
    schedules = _SCHEDULES if not run.quick else _SCHEDULES[1:3]
    jobs: list[Callable[[], None]] = []
    for schedule in schedules:
        workers = "4" if schedule in _OF_FOUR else "2"
        typed = ["--schedule", schedule, "--workers", workers, "--transport", "local"]
        many = {f"{schedule} {model} local": [f"{_MODELS}:{model}", *typed] for model in models}
        jobs.append(_checks(run, f"{schedule} local", many, "2"))
    for transport in _TRANSPORTS[1:]:
        for schedule in schedules if run.on_gpu else schedules[1:2]:
            model = models[len(jobs) % len(models)]
            typed = [f"{_MODELS}:{model}", "--schedule", schedule, "--transport", transport]
            typed += ["--workers", "4" if schedule in _OF_FOUR and schedule != "zb-v" else "2"]
            jobs.append(_verify(run, f"{schedule} {model} {transport}", typed, "2"))
    _compare(run, jobs)


def _compare(run: Runner, jobs: list[Callable[[], None]]) -> None:
    run.together(jobs, _at_once(run))
    found = [each for each in run.results.get(run.part, {}).values()]
    count = Counter(each[0] for each in found if isinstance(each, list))
    told = [f"{count[how]} {how}" for how in ("bit for bit", "within rounding") if count[how]]
    run.say(f"  of {len(found)} runs {' and '.join(told) or 'none'} as one process")
    if not told:
        run.fail("all", "nothing was compared")


def options(run: Runner) -> None:
    """The same for transformers, replicas, slices, recomputation and clipping."""

    def of(model: str, *typed: str) -> list[str]:
        return [f"{_MODELS}:{model}", "--workers", "2", *typed]

    local, replicas = ("--transport", "local"), ("--workers", "4", "--replicas", "2")
    inside = {
        "replicas": {
            "replicas local": of("mlp", *local, *replicas),
            "zero local": of("mlp", *local, *replicas, "--zero", "1"),
        },
        "recompute": {
            "recompute": of("mlp", *local, "--set", "recompute=all"),
            "clipped": of("mlp", *local, "--max-grad-norm", "0.1"),
            "pipedream": of("mlp", *local, "--schedule", "pipedream"),
            "pipedream-2bw": of("mlp", *local, "--schedule", "pipedream-2bw"),
        },
        "slices": {"slices gpt2": of("gpt2_without_dropout", *local, "--slices", "4")},
    }
    alone = {f"hf {kind} rpc": of(kind) for kind in ("gpt2", "llama", "qwen3", "mixtral", "bert", "t5")}
    alone |= {"slices llama rpc": of("llama", "--slices", "4"), "zero rpc": of("mlp", *replicas, "--zero", "1")}
    if run.quick:
        inside, alone = {"recompute": {"recompute": inside["recompute"]["recompute"]}}, {}
    elif not run.on_gpu:
        alone = {name: alone[name] for name in ("hf llama rpc", "zero rpc")}
    jobs = [_checks(run, label, many, "2") for label, many in inside.items()]
    _compare(run, [*jobs, *[_verify(run, name, typed, "2") for name, typed in alone.items()]])


def members(run: Runner) -> None:
    """The same for workers of two processes each, which share every parameter, or linear layers."""
    if run.on_gpu and run.results.get("about", {}).get("machine", {}).get("devices") == 1:
        return run.say(f"  members of a worker need a device each: {NOT_HERE}")
    jobs = []
    for model, shard, schedule in (
        ("mlp", "fsdp", "1f1b"), ("mlp", "fsdp-kept", "zb-h1"), ("gpt", "fsdp", "zb-v"), ("llama", "tp", "1f1b"),
    )[:: 1 if run.on_gpu else 2]:  # fmt: skip
        typed = [f"{_MODELS}:{model}", "--workers", "4", "--members", "2", "--shard", shard, "--schedule", schedule]
        jobs.append(_verify(run, f"{shard} {model} {schedule}", typed, "2"))
    _compare(run, jobs)


def elastic(run: Runner) -> None:
    """Kill workers of a job of two replicas, which goes on: the weights must be those of the undisturbed job."""
    trials = [("step", "1f1b"), ("train", "zb-h1")] if run.on_gpu else [("step", "1f1b")]
    kills = {"step": ["1:4:B"], "train": ["2:4:U"]}

    def trial(how: str, schedule: str) -> Callable[[], None]:
        typed = ["tests/trials/deaths.py", "--device", run.device, "--count", "1", "--schedules", schedule]
        typed += ["--how", how, "--kill", *(["0:3:F", "1:3:F"] if run.planted == ("elastic", "wrong") else kills[how])]

        def job() -> None:
            done = run.call(f"{how} {schedule}", typed)
            told = [line for line in done.text.splitlines() if "undisturbed run" in line] or [done.last]
            run.note(how, [told[-1], round(done.seconds, 1)])
            run.say(f"  {how} {schedule}: {told[-1]}  [{done.seconds:.0f} s]")
            if done.code != 0:
                run.fail(how, f"{done.code}: {done.text[-1500:]}")

        return job

    run.together([trial(*each) for each in trials], _at_once(run) // 2 or 1)


def precision(run: Runner) -> None:
    """Train in bfloat16 and float16 with a scaler, and compare losses with the plain loop; tests marked `gpu`."""
    done = run.call("precision", ["-m", "bench.gpu.precision", run.device], 60)
    found = _told(run, "precision", done) or {}
    for name, (ours, plain) in found.items():
        if ours != plain:
            run.fail(name, f"losses {ours}, not {plain}")


def tests(run: Runner) -> None:
    """Run the tests marked `gpu`."""
    selected = "nothing" if run.planted == ("tests", "missing") else ""
    typed = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "-k",
        selected,
        "tests/workers/test_gpu.py",
        "--timeout",
        "60",
    ]
    done = run.call("tests", ["-m", "pytest", *typed], 100)
    run.note("tests", [done.code, done.last])
    run.say(f"  {done.last}")
    if done.code != 0:
        run.fail("tests", done.text[-1500:])


def kill(run: Runner) -> None:
    """Kill a worker by signal 9: the launcher restarts from the checkpoint, and nothing is left on the device."""
    folder = Path(tempfile.mkdtemp())
    steps = "120" if run.on_gpu else "60"
    typed = [
        "--workers",
        "2",
        "--device",
        run.device,
        "--steps",
        steps,
        "--checkpoint-every",
        "20",
        "--max-restarts",
        "1",
    ]
    command = run.command(["-m", "rpc_pipe", "run", *typed, "--checkpoint-folder", str(folder / "k")])
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=run.environment("kill"), cwd=folder,
            start_new_session=True,
        )  # fmt: skip
    timer = threading.Timer(max(1, run.left - 5), os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    killed = False
    planted = run.planted == ("kill", "wrong")
    while process.poll() is None:
        if not killed and not planted and len(list((folder / "k").glob("step*"))) >= 1:
            workers = _descendants(process.pid)
            if workers:
                os.kill(workers[-1], signal.SIGKILL)
                killed = True
        time.sleep(0.1)
    timer.cancel()
    text = log.read_text(errors="replace")
    restarted = "starting again" in text or "restart" in text
    run.note("kill", [process.returncode, killed, restarted])
    run.say(f"  killed {killed}, restarted {restarted}, ended with {process.returncode}: {text.strip()[-160:]!r}")
    if not (killed and restarted and process.returncode == 0):
        run.fail("kill", text[-800:])
    shutil.rmtree(folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """Return the processes below a process that run no further ones, in order of their numbers."""
    found, leaves = [pid], []
    while found:
        each = found.pop()
        try:
            tasks = Path(f"/proc/{each}/task").iterdir()
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            children = []
        found += children
        if not children and each != pid:
            leaves.append(each)
    return sorted(leaves)


def peers(run: Runner) -> None:
    """Compare with PiPPy and torch on the machine's cores."""
    for only in ("emulated",) if run.quick else ("emulated", "bert", "resnet"):
        path = run.folder / f"vs-{only}.json"
        done = run.call(only, ["bench/vs_pippy.py", "--quick", "--only", only, "--json", str(path)], 150)
        if done.code != 0 or not path.exists():
            run.fail(only, f"{done.code}: {done.text[-500:]}")
            continue
        for row in json.loads(path.read_text()):
            shown = ("scenario", "workers", "system", "schedule", "median_ms", "limit_ms")
            run.say(f"    {[row.get(key) for key in shown]}")


#: name -> the part, its seconds, and what can be planted beside a hang
PARTS: dict[str, tuple[Callable[[Runner], None], float, tuple[str, ...]]] = {
    "about": (about, 12, ()), "ways": (ways, 35, ("wrong", "missing")),
    "payloads": (payloads, 75, ("wrong", "missing")),
    "speed": (speed, 85, ("wrong",)), "small": (small, 50, ("wrong",)), "matrix": (matrix, 70, ("wrong",)),
    "options": (options, 55, ("wrong",)), "tests": (tests, 12, ("missing",)), "precision": (precision, 16, ("wrong",)),
    "members": (members, 35, ("wrong",)), "elastic": (elastic, 45, ("wrong",)), "kill": (kill, 50, ("wrong",)),
    "compiled": (compiled, 180, ("wrong",)), "peers": (peers, 300, ()),
}  # fmt: skip
#: what runs without a word, in this order: tables first
USUAL = tuple(name for name in PARTS if name not in ("compiled", "peers"))
#: what a rehearsal of a minute runs
QUICK = "about", "ways", "payloads", "speed", "matrix", "options", "precision"
