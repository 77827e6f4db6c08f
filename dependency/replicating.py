"""A schedule with one update a step on several replicas of the pipeline: data parallelism as routes over other workers.

Microbatch m belongs to replica m % replicas, which runs the schedule on its own microbatches. A worker is worker
`rank // replicas` of replica `rank % replicas`: the replicas of a stage are neighbours, and the stages of a replica are
`replicas` apart; if stages are spread, it is the other way round. Gradients are summed in each replica in the order of
its microbatches, and then in the order of the replicas, as for every schedule with routes. Slices of a sequence
(`slicing`) stay together: a replica has all of its microbatches' slices.

Where steps overlap, all replicas count as many microbatches a step, of which the last may be missing: so a step is as
long by the slots of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, cast

from .action import Action
from .errors import ConfigError
from .spec import Spec, made_once


def replicated(
    base: type[Spec], replicas: int, zero: int = 0, bucket: float = Spec.bucket, spread: str = Spec.spread
) -> type[Spec]:
    """Return `base` on `replicas` times as many workers.

    Args:
        zero, bucket, spread: as in `Spec`.

    Raises:
        ConfigError: the schedule updates several times a step, and why, in words that follow its name; or, from the
            class that is returned, the workers cannot be divided among the replicas.
    """
    if replicas == 1:
        return base
    own_routes = base.num_routes is not Spec.num_routes or base.elasticity is not Spec.elasticity
    if not base.synchronous and (base.update_every == "microbatch" or own_routes):
        why = "after every microbatch" if base.update_every == "microbatch" else "its pipelines one after the other"
        raise ConfigError(f"updates {why}, not all at once; take pipedream-2bw, or a synchronous one such as 1f1b")
    return _replicated(base, replicas, zero, bucket, spread)


@made_once
def _replicated(base: type[Spec], replicas: int, zero: int, bucket: float, spread: str) -> type[Spec]:
    said = f", zero {zero}" * (zero > 0) + f", bucket {bucket:g}" * (bucket != Spec.bucket)
    said += f", {spread} spread" * (spread != Spec.spread)
    own: dict[str, Any] = {
        "replicas": replicas,
        "zero": zero,
        "bucket": bucket,
        "spread": spread,
        "_replicas": cached_property(_specs_of(base, replicas)),
        "__post_init__": _refuse_indivisible,
        "unsliced": _unsliced,
        "num_stages": property(lambda self: self._replicas[0].num_stages),
        "num_routes": property(lambda self: replicas * self._replicas[0].num_routes),
        "order": property(lambda self: self._replicas[0].order),
        "place": _place,
        "route": _route,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": f"{base.__qualname__}[{replicas} replicas{said}]",
    }
    # What the schedule does not say stays unsaid: whether there is a slot, for example, is seen by the class.
    own |= {name: method for name, method in _SAID.items() if getattr(base, name) is not getattr(Spec, name)}
    return type(base.__name__, (base,), own)


def _specs_of(base: type[Spec], replicas: int) -> Callable[[Any], list[Spec]]:
    """Return a function from a spec to the spec of each replica, which counts its own workers and microbatches."""

    def specs(spec: Any) -> list[Spec]:
        workers, slices = spec.num_workers // replicas, len(spec.slice_sizes)
        every = range(spec.num_microbatches // slices)
        counts = [max(1, len(every[q if base.synchronous else 0 :: replicas])) * slices for q in range(replicas)]
        made = {n: base(num_workers=workers, num_microbatches=n, **spec.parameters()) for n in set(counts)}
        return [made[count] for count in counts]

    return specs


def _refuse_indivisible(spec: Any) -> None:
    Spec.__post_init__(spec)
    workers, replicas = spec.num_workers, spec.replicas
    if workers % replicas:
        possible = [n for n in range(1, workers + 1) if workers % n == 0]
        nearest = min(possible, key=lambda n: (abs(n - replicas), n))
        raise ConfigError(
            f"replicas {replicas}: {workers} {'worker' if workers == 1 else 'workers'} cannot be divided among them; "
            f"the nearest possible number is {nearest}"
        )
    spec._replicas[0]  # its own rules


def _place(spec: Any, stage: int, route: int) -> int:
    replica, inner = divmod(route, spec._replicas[0].num_routes)
    own: int = spec._replicas[replica].place(stage, inner)
    workers, replicas = spec.num_workers, spec.replicas
    rank: int = replica * (workers // replicas) + own if spec.spread == "stages" else own * replicas + replica
    return rank


def _own_place(spec: Any, worker: int) -> tuple[int, int]:
    """Return which worker of its replica `worker` is, and the replica."""
    workers, replicas = spec.num_workers, spec.replicas
    replica, own = divmod(worker, workers // replicas) if spec.spread == "stages" else divmod(worker, replicas)[::-1]
    return own, replica


def _inner(spec: Any, index: int) -> tuple[Spec, int, int]:
    """Return the replica that runs a microbatch, or a slice of one, its number, and which index this has there."""
    (step, index), slices = divmod(index, spec.num_microbatches), len(spec.slice_sizes)
    microbatch, number = divmod(index, slices)
    microbatch, replica = divmod(microbatch, spec.replicas)
    own: Spec = spec._replicas[replica]
    return own, replica, step * own.num_microbatches + microbatch * slices + number


def _inner_action(spec: Any, action: Action) -> tuple[Spec, int, Action]:
    if action.kind.per_microbatch:
        own, replica, index = _inner(spec, action.index)
    else:
        index, replica = divmod(action.index, spec.replicas)
        own = spec._replicas[replica]
    return own, replica, action._replace(index=index)


def _outer(spec: Any, replica: int, actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions of a replica as the whole counts them: for one of a missing microbatch, that of the one before.

    What names the missing one, such as a window, then holds as many as it says.
    """
    count, own = spec.num_microbatches, spec._replicas[replica].num_microbatches
    replicas, slices = spec.replicas, len(spec.slice_sizes)
    for action in actions:
        if action.kind.per_microbatch:
            step, index = divmod(action.index, own)
            microbatch, number = divmod(index, slices)
            index = (microbatch * replicas + replica) * slices + number
            yield action._replace(index=step * count + index - replicas * slices * (index >= count))
        else:
            yield action._replace(index=action.index * replicas + replica)


def _unsliced(spec: Any) -> Spec:
    if len(spec.slice_sizes) == 1:
        return cast("Spec", spec)
    cls = _replicated(type(spec._replicas[0].unsliced()), spec.replicas, spec.zero, spec.bucket, spec.spread)
    count = max(1, spec.num_microbatches // len(spec.slice_sizes))
    return cls(num_workers=spec.num_workers, num_microbatches=count, **spec.parameters())


def _route(spec: Any, microbatch: int) -> int:
    own, replica, index = _inner(spec, microbatch)
    route: int = replica * own.num_routes + own.route(index)
    return route


def _actions(spec: Any, stage: int, microbatch: int) -> tuple[Action, ...]:
    own, replica, index = _inner(spec, microbatch)
    return tuple(_outer(spec, replica, own.actions(stage, index)))


def _after(spec: Any, action: Action) -> list[Action]:
    own, replica, inner = _inner_action(spec, action)
    return list(_outer(spec, replica, own.after(inner)))


def _slot(spec: Any, action: Action) -> int:
    own, replica, inner = _inner_action(spec, action)
    replicas: int = spec.replicas
    return own.slot(inner) * replicas + replica


def _program(spec: Any, worker: int) -> Iterable[Action]:
    own, replica = _own_place(spec, worker)
    if replica >= spec.num_microbatches // len(spec.slice_sizes):
        return []
    return _outer(spec, replica, spec._replicas[replica].program(own))


def _of_microbatch(name: str) -> Callable[[Any, int, int], int]:
    """Return what `spec` says of a stage and a microbatch by the method `name`: what the replica says of its own."""

    def says(spec: Any, stage: int, microbatch: int) -> int:
        own, _, index = _inner(spec, microbatch)
        said: int = getattr(own, name)(stage, index)
        return said

    return says


def _of_worker(name: str) -> Callable[[Any, int], int | None]:
    """Return what `spec` says of a worker by the method `name`: what the replica says of its own."""

    def says(spec: Any, worker: int) -> int | None:
        own, replica = _own_place(spec, worker)
        said: int | None = getattr(spec._replicas[replica], name)(own)
        return said

    return says


_SAID: dict[str, Callable[..., Any]] = {
    "recomputes": lambda spec, stage: spec._replicas[0].recomputes(stage),
    "actions": _actions,
    "after": _after,
    "slot": _slot,
    "program": _program,
    **{name: _of_microbatch(name) for name in ("splits", "version")},
    **{name: _of_worker(name) for name in ("activation_limit", "peak_activations")},
}
