"""Random specs: what the checker accepts must run to its end at any timing, in its memory, and as it is simulated."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from random_specs import random_spec, random_stream

from rpc_pipe.dependency import Action, Order, PipeError, ScheduleError, Spec, check, check_all
from rpc_pipe.dependency.memory import Memory
from rpc_pipe.dependency.parallelism import Parallelism
from rpc_pipe.dependency.replicating import replicated
from rpc_pipe.planning.simulator import simulate

_TESTS = Path(__file__).parents[1]
sys.path += [str(_TESTS / "rpc_pipe"), str(_TESTS / "dependency")]
from antichain import most_held  # noqa: E402
from state_machines import run_state_machines  # noqa: E402

#: so many actions are looked at from the definition of what may be held
_FEW = 250
#: steps of a stream
_STEPS = 6


class Tried(NamedTuple):
    """How it ended, as the ends of `fuzz.py`."""

    how: str
    detail: str
    about: str


def tried(number: int) -> Tried:
    """Check, run and simulate a spec."""
    if number % 8 == 7:
        return _stream(number)
    spec = random_spec(number)
    if number % 2:  # one that claims enough, so that the bound of memory does not refuse it
        spec = replace(spec, claims=(3 * spec.num_microbatches,) * spec.num_workers)
    about = f"random_spec({number}): {spec}, {vars(spec.draw)}"
    # Some are tried as all their replicas together.
    tries = _replicated(spec, random.Random(number)) if number % 8 in (1, 3) else spec
    try:
        return Tried(*_tried(tries, random.Random(number)), f"{tries} of {about}")
    except Exception:
        return Tried("TRACEBACK", traceback.format_exc(), about)


def _tried(spec: Spec, draw: random.Random) -> tuple[str, str]:
    refusal = _refusal(partial(check_all, spec))
    alone = [_refusal(partial(check, spec, w)) for w in range(spec.num_workers)]
    if (refusal is None) != all(each is None for each in alone):
        return "DIFFERENT", f"all workers together: {refusal}; each alone: {alone}"
    if refusal is not None:
        return "refused", refusal
    memory = Memory(spec)
    bounds = [memory.at_any_timing(w, lambda lives: False)[0].most[-1] for w in range(spec.num_workers)]
    if sum(len(memory.program(w)) for w in range(spec.num_workers)) <= _FEW and (truth := most_held(spec)) != bounds:
        return "DIFFERENT", f"{bounds} were proved to be the most that is held, but it is {truth}"
    orders: list[Order] = ["ready", "fixed"]
    for order in orders:
        costs = [draw.choice([0, 1, 1, 3, 20]) for _ in range(97)]
        comm = draw.choice([0, 1, 5])
        cost = partial(_cost, costs)
        try:
            spans, peaks = run_state_machines(spec, cost, comm=comm, order=order)
        except PipeError as error:
            return "HANG", f"{order}: {error}"
        if any(peak > bound for peak, bound in zip(peaks, bounds, strict=True)):
            return "DIFFERENT", f"{order}: {peaks} are held, and {bounds} were proved"
        simulated = simulate(spec, cost, comm=comm, order=order)
        ran = sorted(f"{s.worker} {s.action} {s.start:g} {s.end:g}" for s in spans if s.end > s.start)
        said = sorted(f"{s.worker} {s.action} {s.start:g} {s.end:g}" for s in simulated.spans if s.end > s.start)
        if ran != said or list(simulated.peak_activations) != peaks:
            return "DIFFERENT", f"{order}: {sorted(set(ran) ^ set(said))[:6]} {simulated.peak_activations} {peaks}"
    return "identical", ""


def _replicated(base: Spec, draw: random.Random) -> Spec:
    replicas, zero = draw.choice([2, 3]), draw.choice([0, 1])
    cls, count = replicated(type(base), Parallelism(replicas=replicas, zero=zero)), max(replicas, base.num_microbatches)
    parameters = base.parameters()
    if "claims" in parameters:
        parameters["claims"] = (3 * count,) * base.num_workers
    return cls(num_workers=replicas * base.num_workers, num_microbatches=count, **parameters)


def _stream(number: int) -> Tried:
    """Check a stream whose forwards overtake updates, and run some of its steps."""
    spec, draw = random_stream(number), random.Random(number)
    if number % 16 == 15 and spec.update_every == "step":
        spec = _replicated(spec, draw)
    about = f"random_stream({number}): {spec}"
    if (refusal := _refusal(partial(check_all, spec))) is not None:
        return Tried("refused", refusal, about)
    orders: list[Order] = ["ready", "fixed"]
    for order in orders:
        costs = [draw.choice([0, 1, 1, 3, 20]) for _ in range(97)]
        steps = replace(spec, num_steps=_STEPS)
        try:
            _, peaks = run_state_machines(steps, partial(_cost, costs), comm=draw.choice([0, 1, 5]), order=order)
        except PipeError as error:
            return Tried("HANG", f"{order}: {error}", about)
        promised = [spec.peak_activations(worker) for worker in range(spec.num_workers)]
        if any(most is not None and peak > most for peak, most in zip(peaks, promised, strict=True)):
            return Tried("DIFFERENT", f"{order}: {peaks} are held, and {promised} are promised", about)
    return Tried("identical", "", about)


def _cost(costs: list[int], action: Action) -> float:
    return costs[(31 * action.stage + 7 * action.index + ord(action.kind.letter)) % len(costs)]


def _refusal(checks: Callable[[], None]) -> str | None:
    try:
        checks()
    except ScheduleError as error:
        return str(error).partition("\n")[0]
    return None
