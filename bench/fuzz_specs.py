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

from random_specs import random_spec

from rpc_pipe.dependency import Action, Order, PipeError, ScheduleError, Spec, check, check_all, entries
from rpc_pipe.dependency.memory import Memory
from rpc_pipe.planning.simulator import simulate

sys.path.append(str(Path(__file__).parents[1] / "tests" / "rpc_pipe"))
from state_machines import run_state_machines


class Tried(NamedTuple):
    """How it ended, as the ends of `bench/fuzz.py`."""

    how: str
    detail: str
    about: str


def tried(number: int) -> Tried:
    """Check, run and simulate a spec."""
    spec = random_spec(number)
    if number % 2:  # one that claims enough, so that the bound of memory does not refuse it
        spec = replace(spec, claims=(3 * spec.num_microbatches,) * spec.num_workers)
    about = f"random_spec({number}): {spec}, {vars(spec.draw)}"
    try:
        return Tried(*_tried(spec, random.Random(number)), about)
    except Exception:
        return Tried("TRACEBACK", traceback.format_exc(), about)


def _tried(spec: Spec, draw: random.Random) -> tuple[str, str]:
    refusal = _refusal(partial(check_all, spec))
    alone = [_refusal(partial(check, spec, w)) for w in range(spec.num_workers)]
    if (refusal is None) != all(each is None for each in alone):
        return "DIFFERENT", f"all workers together: {refusal}; each alone: {alone}"
    if refusal is not None:
        return "refused", refusal
    memory = Memory(spec, entries)
    bounds = [memory.at_any_timing(w, lambda lives: False)[0].most[-1] for w in range(spec.num_workers)]
    orders: list[Order] = ["ready", "fixed"]
    for order in orders:
        costs = [draw.choice([0, 1, 1, 3, 20]) for _ in range(97)]
        comm = draw.choice([0, 1, 5])

        def cost(action: Action, costs: list[int] = costs) -> float:
            return costs[(31 * action.stage + 7 * action.index + ord(action.kind.letter)) % 97]

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


def _refusal(checks: Callable[[], None]) -> str | None:
    try:
        checks()
    except ScheduleError as error:
        return str(error).partition("\n")[0]
    return None
