"""Random models by random schedules, piped and in one process: whether any bit differs, anything hangs or raises.

    python bench/fuzz.py [--runs 1000] [--first 0] [--seconds 600] [--jobs 1]
    python bench/fuzz.py --workers 2 --transport rpc      # in processes, 25 runs a job
    python bench/fuzz.py --specs --runs 4000              # random specs: checker, state machines and simulator
    python bench/fuzz.py --show 17                        # what run 17 is, and what happens

A run is one number: model, schedule, workers, microbatches, order, optimizer and calls follow from it. It ends as
`identical`; as `rounding`, where gradients of what several stages use are summed in another order, or where a reentrant
checkpoint adds to gradients by itself; as `refused`, in one sentence; as `illegal`, if one process cannot train it
either; or as DIFFERENT, HANG or TRACEBACK, which are printed.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.fuzz_cases import Alone, Case, state_of  # noqa: E402
from rpc_pipe.dependency import ConfigError, PipeError, ScheduleError, Stalled, WorkerFailure  # noqa: E402
from rpc_pipe.pipeline import Pipeline  # noqa: E402
from rpc_pipe.schedules import SCHEDULES  # noqa: E402
from rpc_pipe.workers.actor import WorkerActor  # noqa: E402
from rpc_pipe.workers.transport.payload import Tree, tensors_of  # noqa: E402

_STALL_S = 60.0
#: nothing has been told of a run for so long
_HANG_S = 300.0
#: what workers say on purpose of a model that no pipeline can train
_SENTENCES = re.compile(
    "changed in place after it was used|recomputed activations differ|cannot be recomputed|cannot travel between|"
    "one of the variables needed for gradient computation has been modified by an inplace operation|"
    "always give the same|the gradient of parameter .* is sparse|"
    "use_reentrant=True, torch.utils.checkpoint is incompatible"
)
_BAD = ("DIFFERENT", "HANG", "TRACEBACK")


class End(NamedTuple):
    """How a run ended."""

    how: str
    detail: str = ""
    #: whether a job can go on with another pipeline
    goes_on: bool = True


class Done(NamedTuple):
    """What a pipeline came to: numbers in the order of calls, and by worker what its shards hold."""

    numbers: list[Any]
    held: list[dict[str, Any]]


def run(case: Case) -> End:
    """Train piped and in one process, and compare; in a job, worker 0 does."""
    pipe: Pipeline | None = None
    try:
        with case.settings():
            pipe = case.pipeline(_STALL_S)
            initial = pipe.state_dict() if case.unsplit else None
            done = piped(case, pipe)
        if done is None:
            return End("elsewhere")
    except (ConfigError, ScheduleError) as error:
        return End("refused", str(error).partition("\n")[0], pipe is None)
    except Stalled as error:
        return End("HANG", str(error), False)
    except WorkerFailure as error:
        return _failed(case, str(error), error.summary)._replace(goes_on=False)
    except PipeError as error:
        return _failed(case, f"{type(error).__name__}: {error}", str(error).partition("\n")[0])._replace(goes_on=False)
    except Exception as error:
        return _failed(case, f"{type(error).__name__}: {error}", repr(error))._replace(goes_on=False)
    try:
        alone = Alone(case, pipe.spec, pipe.partition, initial)
        with case.settings():
            expected = unpiped(case, alone)
    except Exception as error:
        return End("illegal", f"{type(error).__name__}: {error}")
    finally:
        if "RANK" not in os.environ:
            pipe.close()
    if not all(math.isfinite(number) for number in expected if isinstance(number, float)):
        return End("illegal", "the loss is not finite")
    return _compared(case, pipe, done, expected, alone)


def _failed(case: Case, text: str, summary: str) -> End:
    """Say how a run ended that raised: perhaps one process raises too."""
    if _SENTENCES.search(summary):
        return End("refused", summary)
    try:
        spec = SCHEDULES["naive"](num_workers=1, num_microbatches=case.microbatches)
        with case.settings():
            numbers = unpiped(case, Alone(case, spec, None, None))
    except Exception as error:
        return End("illegal", f"{type(error).__name__}: {error}")
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        return End("illegal", "the loss is not finite")
    return End("TRACEBACK", text)


def piped(case: Case, pipe: Pipeline) -> Done | None:
    """Do what a case asks for; return what worker 0 knows."""
    numbers: list[Any] = []
    batches = case.batches()
    before = [(x.clone(), y.clone()) for x, y in batches]
    if case.streams and not case.given:
        for step, loss in enumerate(pipe.train(batches)):
            numbers += [loss, *_between(case, pipe, step, batches[step])]
    else:
        for step, batch in enumerate(batches):
            asked = case.asked(batch)
            numbers += [pipe.step(**asked), *_between(case, pipe, step, batch)]
    if any(
        not torch.equal(a, b) for old, new in zip(before, batches, strict=True) for a, b in zip(old, new, strict=True)
    ):
        numbers.append("the user's batch has been written")
    held = pipe.gather("fuzz", held_by)
    return None if held is None else Done(numbers, held)


def _between(case: Case, pipe: Pipeline | Alone, step: int, batch: tuple[Tensor, Tensor]) -> Iterator[Any]:
    """Do what comes between two steps."""
    if case.between[step] == "evaluate":
        yield pipe.evaluate(**case.asked(batch)) if isinstance(pipe, Pipeline) else pipe.evaluate(case.asked(batch))
    elif case.between[step] == "predict":
        yield pipe.predict(batch[0])
    elif case.between[step] == "state" and isinstance(pipe, Pipeline):
        pipe.state_dict()


def held_by(actor: WorkerActor) -> Tree:
    """Return what a worker's shards hold, by stage and route."""
    found = {}
    for (stage, route), shard in actor.shards.items():
        layers = getattr(shard.slice, "layers", None)
        held = shard.state_dict() if layers is None else state_of(layers, shard.optimizer)
        found[f"{stage} {route}"] = {name: t.clone() if isinstance(t, Tensor) else t for name, t in held.items()}
    return found


def unpiped(case: Case, alone: Alone) -> list[Any]:
    """Do the same in this process."""
    numbers: list[Any] = []
    for step, batch in enumerate(case.batches()):
        asked = {"batch": batch} if case.streams and not case.given else case.asked(batch)
        numbers += [alone.step(asked), *_between(case, alone, step, batch)]
    return numbers


def _compared(case: Case, pipe: Pipeline, done: Done, expected: list[Any], alone: Alone) -> End:
    found = [] if len(done.numbers) == len(expected) else ["the numbers of results differ"]
    held_back = case.steps % case.accumulate != 0  # gradients that wait for an update
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(done.numbers, expected, strict=False))]
    for held in done.held:
        for place, state in held.items():
            route = int(place.split()[1])
            if all(pipe.spec.route(m) != route for m in range(case.microbatches)):
                continue  # nothing has run there
            layers = alone.replicas[route]
            if case.unsplit:
                all_of_it = layers[0].state_dict()
            else:
                all_of_it = state_of(list(enumerate(layers)), alone.optimizers[route])
            places = {name.partition(".")[0] for name in state}
            wanted = {n: t for n, t in all_of_it.items() if n in state or n.partition(".")[0] in places}
            if case.unsplit:
                wanted = {name: all_of_it[name] for name in state}
            apart = {name for name in state.keys() ^ wanted.keys() if not (held_back and name.endswith(" gradient"))}
            found += [f"{place}: {name} is held by one only" for name in apart]
            pairs += [(f"stage, route {place}: {n}", state[n], wanted[n]) for n in state.keys() & wanted.keys()]
    differing = [(name, a, b) for name, a, b in pairs if not _same(a, b)]
    if not found and not differing:
        return End("identical")
    shared = case.unsplit and (pipe.partition.shared or case.skips)
    reentrant = any(getattr(module, "reentrant", False) for layer in alone.replicas[0] for module in layer.modules())
    if (shared or reentrant) and not found and all(_close(a, b) for _, a, b in differing):
        return End("rounding", "what several stages hold or use" if shared else "a reentrant checkpoint")
    found += [f"{name}: off by {_off(a, b)}" for name, a, b in differing[:6]]
    return End("DIFFERENT", f"{len(differing)} of {len(pairs)}; " + "; ".join(found[:8]))


def _same(a: Any, b: Any) -> bool:
    """Tell whether two trees have the same bits."""
    some, others = list(tensors_of(a)), list(tensors_of(b))
    if not some and not others:
        return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
    return len(some) == len(others) and all(
        s.shape == o.shape and s.dtype == o.dtype and torch.equal(_bits(s), _bits(o))
        for s, o in zip(some, others, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    """Return a dense tensor in which what is no number equals itself."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).resolve_conj().resolve_neg()
    return torch.nan_to_num(torch.view_as_real(dense) if dense.is_complex() else dense)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6)
    some, others = list(tensors_of(a)), list(tensors_of(b))
    return bool(some) and all(
        s.shape == o.shape and torch.allclose(_bits(s).double(), _bits(o).double(), rtol=1e-2, atol=1e-4)
        for s, o in zip(some, others, strict=True)
    )


def _off(a: Any, b: Any) -> str:
    some, others = list(tensors_of(a)), list(tensors_of(b))
    if len(some) != 1 or len(others) != 1 or some[0].shape != others[0].shape:
        return f"{a!r:.60}, not {b!r:.60}"
    difference = (_bits(some[0]).double() - _bits(others[0]).double()).abs()
    return f"{difference.max() if difference.numel() else 0:.1e}" + f" ({some[0].dtype}, not {others[0].dtype})" * (
        some[0].dtype != others[0].dtype
    )


def tell(number: int, end: End, about: str) -> None:
    """Tell the process that counts."""
    print(json.dumps({"number": number, "how": end.how, "detail": end.detail, "about": about}), flush=True)


def tried(number: int, workers: int | None) -> tuple[End, str]:
    """Run a case; return how it ended and what it is."""
    try:
        case = Case(number, workers)
    except (ConfigError, ScheduleError) as error:
        return End("refused", str(error).partition("\n")[0]), ""
    return run(case), str(case)


def work(numbers: range, workers: int | None, specs: bool) -> None:
    """Run one after the other, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number in numbers:
        print(json.dumps({"begins": number}), flush=True)
        if specs:
            from bench.fuzz_specs import tried as tried_spec

            how, detail, about = tried_spec(number)
            end = End(how, detail)
        else:
            end, about = tried(number, workers)
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
        own = [str(Path(__file__)), *share] + ["--specs"] * self._typed.specs
        command = [sys.executable, *own]
        if self._typed.transport != "local":
            workers = str(self._typed.workers)
            launch = [
                sys.executable,
                "-m",
                "rpc_pipe",
                "run",
                "--transport",
                self._typed.transport,
                "--workers",
                workers,
            ]
            command = [*launch, own[0], "--", *own[1:], "--workers", workers]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        stdout = process.stdout

        def read() -> None:
            for line in stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        done, running, said = 0, numbers.start, ""
        while not self.stop:
            try:
                line = lines.get(timeout=_HANG_S)
            except queue.Empty:
                self._told.put({"number": running, "how": "HANG", "detail": f"no end in {_HANG_S:g} s", "about": said})
                done += 1
                break
            if line is None:
                if done < len(numbers) and not (self._typed.transport != "local" and done):
                    self._told.put({"number": running, "how": "TRACEBACK", "detail": "process ended", "about": said})
                    done += 1
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
            else:
                self._told.put(event)
                done += 1
        process.kill()
        process.wait()
        return done


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
    parser.add_argument("--show", type=int, help="run this one and tell all of it")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.share is not None:
        work(range(*map(int, typed.share.split(","))), typed.workers, typed.specs)
        return
    if typed.show is not None:
        torch.set_num_threads(1)
        end, about = tried(typed.show, typed.workers)
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
    for refusal, count in counted.refusals.most_common(40):
        print(f"{count:6} {refusal}")
    sys.exit(any(counted.ends[how] for how in _BAD))


if __name__ == "__main__":
    main()
