"""A run of `fuzz.py`: train piped and in one process, and compare what both come to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpc_pipe.dependency import ConfigError, PipeError, ScheduleError, Stalled, WorkerFailure
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.actor import WorkerActor
from rpc_pipe.workers.transport.payload import Tree, tensors_of
from trials.fuzz_alone import Alone, Replayed, state_of
from trials.fuzz_cases import ByHand, Case

_STALL_S = 200.0
#: letters of a sentence
_LONGEST = 500
#: what workers say on purpose of a model that no pipeline can train
_SENTENCES = re.compile(
    "that backward needs was changed in place|"
    "run once more gave other numbers|cannot be recomputed|cannot travel between|"
    "one of the variables needed for gradient computation has been modified by an inplace operation|"
    "always give the same|the gradient of parameter .* is sparse|"
    "use_reentrant=True, torch.utils.checkpoint is incompatible|errors.(Config|Schedule|Model|Batch)Error: |"
    "saved tensor hooks|"
    "by .data in its forward, and did not in its first"
)
#: what torch says in one process too
_OF_TORCH = re.compile("has been modified by an inplace operation|use_reentrant=True, torch.utils.checkpoint is")
#: how far apart numbers may be that are sums of the same in another order, in single and in double precision
_ROUNDING = {False: (1e-2, 1e-4), True: (1e-9, 1e-12)}


#: weights of a model that a function makes
Initial = Mapping[str, Tensor] | None


class End(NamedTuple):
    """How a run ended."""

    how: str
    detail: str = ""


class Done(NamedTuple):
    """What a pipeline came to: numbers in the order of calls, and by worker what its shards hold."""

    numbers: list[Any]
    held: list[dict[str, Any]]


def tried(number: int, whole: bool = False) -> tuple[End, str]:
    """Run a case; return how it ended and what it is. Where only rounding may differ, double precision decides."""
    try:
        case = Case(number, whole=whole)
    except (ConfigError, ScheduleError) as error:
        return _refused(error), ""
    end = _settled(case)
    if end.how == "rounding" and not case.doubled:
        again = _settled(Case(number, doubled=True, whole=whole))
        if again.how not in ("rounding", "identical"):
            end = again._replace(how="UNSETTLED" if again.how in ("refused", "illegal") else again.how)
    return end, str(case)


def _settled(case: Case) -> End:
    """Run a case; where casts let rounding grow from update to update, what is before the first one decides."""
    end = run(case)
    if end.how != "amplified":
        return end
    first = run(Case(case.number, doubled=case.doubled, whole=case.whole, short=True))
    return end._replace(how="rounding" if first.how in ("rounding", "identical") else "DIFFERENT")


def run(case: Case) -> End:
    """Train piped and in one process, and compare."""
    with case.precision():
        return _run(case)


def _run(case: Case) -> End:
    pipe: Pipeline | None = None
    initial: Initial = None
    try:
        made_by = case.settings() if all("orthogonal" not in maker.names for maker in case.makers) else nullcontext()
        with made_by:  # torch cannot make those under autocast
            pipe = case.pipeline(_STALL_S)
        with case.settings():
            initial = pipe.weights.state_dict() if case.unsplit else None
            done = piped(case, pipe)
    except (ConfigError, ScheduleError) as error:
        return _refused(error)
    except Stalled as error:
        return End("HANG", str(error))
    except WorkerFailure as error:
        if not error.remote_traceback:  # a refusal of rpc-pipe's own; behind its sentence: a drawing
            return _refused(error.summary.partition("\n")[0])
        return _failed(case, pipe, initial, str(error), error.summary)
    except PipeError as error:
        text = f"{type(error).__name__}: {error}"
        return _failed(case, pipe, initial, text, str(error).partition("\n")[0])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _failed(case, pipe, initial, text, repr(error))
    try:
        if case.is_synchronous:
            alone: Alone | Replayed = Alone(case, pipe.spec, pipe.partition, initial)
        else:
            alone = Replayed(case, pipe.spec, pipe.partition.ranges)
        expected = unpiped(case, alone)
    except Exception as error:
        return End("illegal", f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
    if not all(math.isfinite(number) for number in expected if isinstance(number, float)):
        return End("illegal", "the loss is not finite")
    return _compared(case, pipe, done, expected, alone)


def _refused(error: Exception | str) -> End:
    """Say that something was refused: in one sentence, as it should be."""
    sentence = str(error)
    if isinstance(error, ScheduleError) and error.drawing:
        sentence = sentence.removesuffix(f"\n{error.drawing}")
    return End("UNCLEAR" if "\n" in sentence or len(sentence) > _LONGEST else "refused", sentence)


def _failed(case: Case, pipe: Pipeline | None, initial: Initial, text: str, summary: str) -> End:
    """Say how a run ended that raised: perhaps one process raises too, or comes to the same that is not finite."""
    is_said = _SENTENCES.search(summary) is not None
    if is_said and not _OF_TORCH.search(summary):
        return _refused(summary.partition("\n")[0] if "ScheduleError" in summary else summary)  # behind it: the drawing
    try:
        alone: Alone | Replayed
        alone = Alone(case, SCHEDULES["naive"](num_workers=1, num_microbatches=case.microbatches), None, None)
        if pipe is not None and not case.is_synchronous:  # late gradients may carry the loss away
            alone = Replayed(case, pipe.spec, pipe.partition.ranges)
        elif pipe is not None and initial is not None:
            alone = Alone(case, pipe.spec, pipe.partition, initial)
        numbers = unpiped(case, alone)
    except Exception as error:
        return End("illegal", f"{type(error).__name__}: {error}")
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        return End("illegal", "the loss is not finite")
    return _refused(summary) if is_said else End("TRACEBACK", text)


def piped(case: Case, pipe: Pipeline) -> Done:
    """Do what a case asks for; return what all workers know."""
    numbers: list[Any] = []
    batches = case.batches()
    before = [(x.clone(), y.clone()) for x, y in batches]
    hands = {shard: ByHand() for actor in pipe.actors for shard in actor.shards.values()}

    def behind(step: int) -> list[Any]:
        found = list(_between(case, pipe, step, batches[step]))
        for shard, hand in hands.items():
            layers = getattr(shard.slice, "layers", ())
            hand.change(case.changes[step], f"{case.number} {step}", layers, shard.optimizer)
        return found

    if case.streams and not case.given:
        for step, loss in enumerate(pipe.train(batches)):
            numbers += [loss, *behind(step)]
    else:
        for step, batch in enumerate(batches):
            asked = case.asked(batch)
            numbers += [pipe.step(**asked), *behind(step)]
    if any(
        not torch.equal(a, b) for old, new in zip(before, batches, strict=True) for a, b in zip(old, new, strict=True)
    ):
        numbers.append("the user's batch has been written")
    held = pipe.gather("fuzz", held_by)
    return Done(numbers, held or [])


def _between(case: Case, pipe: Pipeline | Alone | Replayed, step: int, batch: tuple[Tensor, Tensor]) -> Iterator[Any]:
    """Do what comes between two steps."""
    what = case.between[step]
    if what == "state" and isinstance(pipe, Pipeline):
        pipe.weights.state_dict()
    elif what == "evaluate":
        yield pipe.evaluate(**case.asked(batch)) if isinstance(pipe, Pipeline) else pipe.evaluate(case.asked(batch))
    elif what == "predict" and not isinstance(pipe, Replayed):
        yield pipe.predict(batch[0])


def held_by(actor: WorkerActor) -> Tree:
    """Return what a worker's shards hold, by stage and route."""
    found = {}
    for (stage, route), shard in actor.shards.items():
        layers = getattr(shard.slice, "layers", None)
        held = shard.state_dict() if layers is None else state_of(layers, shard.optimizer)
        found[f"{stage} {route}"] = {name: t.clone() if isinstance(t, Tensor) else t for name, t in held.items()}
    return found


def unpiped(case: Case, alone: Alone | Replayed) -> list[Any]:
    """Do the same in this process."""
    numbers: list[Any] = []
    hand = ByHand()  # one route, where there are changes
    for step, batch in enumerate(case.batches()):
        asked = {"batch": batch} if case.streams and not case.given else case.asked(batch)
        numbers += [alone.step(asked), *_between(case, alone, step, batch)]
        what, draw = case.changes[step], f"{case.number} {step}"
        hand.change(what, draw, enumerate(alone.replicas[0]), alone.optimizers[0] if what else None)
    return numbers


def _compared(case: Case, pipe: Pipeline, done: Done, expected: list[Any], alone: Alone | Replayed) -> End:
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
    shared = case.unsplit and (pipe.partition.shared or case.skips or case.whole)
    reentrant = any(getattr(module, "reentrant", False) for layer in alone.replicas[0] for module in layer.modules())
    early = {f"result {i}" for i in range(case.num_early)}
    may_round = not found and early.isdisjoint(name for name, _, _ in differing)
    may_round &= bool(shared or reentrant or case.sparse)
    if may_round and all(_close(case, a, b) for _, a, b in differing):
        why = "what several stages hold or use" if shared else "a reentrant checkpoint" if reentrant else "sparse"
        return End("rounding", why)
    found += [f"{name}: off by {_off(a, b)}" for name, a, b in differing[:6]]
    # What is cast to bfloat16, or is held so, is rounded to 8 bits again and again: update by update it grows.
    coarse = case.autocast or any(p.dtype is torch.bfloat16 for layer in alone.replicas[0] for p in layer.parameters())
    coarse |= any("bfloat16" in maker.names for maker in case.makers)
    grown = may_round and coarse and case.steps > case.accumulate
    # Adam makes a gradient that would be zero but for rounding, as of the keys' bias in attention, a step of full size.
    undecided = may_round and not case.doubled
    how = "amplified" if grown else "rounding" if undecided else "DIFFERENT"
    return End(how, f"{len(differing)} of {len(pairs)}; " + "; ".join(found[:8]))


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


def _close(case: Case, a: Any, b: Any) -> bool:
    relative, absolute = _ROUNDING[case.doubled]
    some, others = list(tensors_of(a)), list(tensors_of(b))
    if isinstance(a, float) and isinstance(b, float):
        some, others = [torch.tensor(a).double()], [torch.tensor(b).double()]
    return bool(some) and all(
        s.shape == o.shape and bool((s - o).abs().le(absolute + relative * o.abs().max()).all() if o.numel() else True)
        for s, o in zip(map(_wide, some), map(_wide, others), strict=True)
    )


def _wide(tensor: Tensor) -> Tensor:
    return _bits(tensor).double()


def _off(a: Any, b: Any) -> str:
    some, others = list(tensors_of(a)), list(tensors_of(b))
    if len(some) != 1 or len(others) != 1 or some[0].shape != others[0].shape:
        return f"{a!r:.60}, not {b!r:.60}"
    difference = (_bits(some[0]).double() - _bits(others[0]).double()).abs()
    return f"{difference.max() if difference.numel() else 0:.1e}" + f" ({some[0].dtype}, not {others[0].dtype})" * (
        some[0].dtype != others[0].dtype
    )
