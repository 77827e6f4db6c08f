"""Errors of workers that make different calls; loaded where two differ."""

import logging
from functools import cache

from ...dependency import Disagreement
from .call import BUFFER, PARTS, WRITTEN, Call, parse

logger = logging.getLogger(__name__)


def difference(call: Call, peer: int, told: str) -> Disagreement | None:
    """Compare `call` with the call of `peer`; return the difference, None if they agree."""
    if told == call.told():
        return None
    worker, other = call.worker, parse(peer, told)
    if call.what != other.what:
        return differ(call, other)
    if call.pipeline != other.pipeline:
        made = f"made the pipeline as {call.pipeline}, worker {peer} as {other.pipeline}"
        return Disagreement(f"{call.what}: worker {worker} {made}: give the same arguments on every worker")
    for name in ("inputs", "targets"):
        mine, theirs = (getattr(of, name).split(PARTS) for of in (call, other))
        pairs = [(a.rpartition("="), b.rpartition("=")) for a, b in zip(mine[2:], theirs[2:], strict=False)]
        fields = [a[0] for a, b in pairs if a[2] != b[2]]
        if mine[0] and theirs[0] and (mine[:2] != theirs[:2] or fields):
            values = ", with other values" if mine[0] == theirs[0] else ""
            values += f" of {', '.join(fields)}" if values and any(fields) else ""
            given = f"were given different {name} ({mine[0]} and {theirs[0]}{values}): give every worker the same batch"
            alike = "seed alike before data are drawn, and let no worker draw alone, as by a DataLoader's iterator"
            return Disagreement(f"{call.what}: worker {worker} and worker {peer} {given}; {alike}")
    if call.order != other.order:
        orders = f"as {call.order or 'given'}, worker {peer} as {other.order or 'given'}"
        rule = "microbatch_order and microbatch_cost must be the same on every worker"
        return Disagreement(f"{call.what}: worker {worker} runs microbatches {orders}: {rule}")
    weights = [dict(pair.split("=") for pair in of.weights.split()) for of in (call, other)]
    for stage in weights[0].keys() & weights[1].keys():
        if weights[0][stage] != weights[1][stage] and BUFFER in stage:
            if worker < peer:
                _warn_of_buffer(*stage.split(BUFFER))
            continue
        if weights[0][stage] != weights[1][stage] and stage.endswith(WRITTEN):
            why = f"workers {worker} and {peer} have different weights of stage {stage.rstrip(WRITTEN)}"
            fix = "let the model run once before it is given, or take replicas=1"
            return Disagreement(f"{call.what}: {why}, which a forward writes by the rows of each replica: {fix}")
        if weights[0][stage] != weights[1][stage]:
            why = f"workers {worker} and {peer} hold stage {stage} with different initial weights"
            fix = "seed alike before the model is built (`torch.manual_seed(0)`), or pass its layers as callables"
            return Disagreement(f"{call.what}: {why}: {fix}")
    return None


@cache
def _warn_of_buffer(stage: str, name: str) -> None:
    fix = f"take replicas=1, or sum it by pipe.modify(..., summed={name.split('.')[-1]!r})"
    logger.warning(f"replicas: forwards of stage {stage} write the buffer {name} by the rows of each replica; {fix}")


def differ(call: Call, other: Call) -> Disagreement:
    """Return the error for two calls that are not of one kind."""
    calls = f"worker {call.worker} calls {call.what} where worker {other.worker} calls {other.what}"
    rule = "every worker must make the same calls in the same order, also under `if pipe.worker == 0`"
    return Disagreement(f"{calls}: {rule}")


def left(peer: int, call: Call) -> Disagreement:
    """Return the error for a `peer` that makes no such call any more."""
    why = f"worker {call.worker} calls {call.what}, but worker {peer} has ended its script"
    return Disagreement(f"{why}: make the same calls on every worker; has one ended its loop early, or was it killed?")
