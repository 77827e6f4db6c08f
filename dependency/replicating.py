"""Any synchronous schedule on several replicas of the pipeline: data parallelism as routes over disjoint workers.

Microbatch m belongs to replica m % replicas, which runs the schedule on its own microbatches. A worker is worker
`rank // replicas` of replica `rank % replicas`: the replicas of a stage are neighbours, and the stages of a replica are
`replicas` apart; if stages are spread, it is the other way round. Gradients are summed in each replica in the order of
its microbatches, and then in the order of the replicas, as for every schedule with routes. Slices of a sequence
(`slicing`) stay together: a replica has all of its microbatches' slices.
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
        ConfigError: the schedule has updates that steps overlap with; or, from the class that is returned, the workers
            cannot be divided among the replicas.
    """
    if replicas == 1:
        return base
    if not base.synchronous:
        raise ConfigError(
            f"replicas {replicas}: schedule {base.__name__} lets steps overlap; only synchronous ones, such as 1f1b, "
            "have replicas"
        )
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
        counts = [max(1, len(every[replica::replicas])) * slices for replica in range(replicas)]
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


def _inner_index(spec: Any, index: int) -> tuple[int, int]:
    """Return the index of a microbatch, or of a slice, as its replica counts, and the replica."""
    microbatch, number = divmod(index, slices := len(spec.slice_sizes))
    own, replica = divmod(microbatch, spec.replicas)
    return own * slices + number, replica


def _outer(spec: Any, replica: int, actions: Iterable[Action]) -> Iterator[Action]:
    slices, replicas = len(spec.slice_sizes), spec.replicas
    for action in actions:
        microbatch, number = divmod(action.index, slices)
        yield action._replace(index=(microbatch * replicas + replica) * slices + number)


def _unsliced(spec: Any) -> Spec:
    if len(spec.slice_sizes) == 1:
        return cast("Spec", spec)
    cls = _replicated(type(spec._replicas[0].unsliced()), spec.replicas, spec.zero, spec.bucket, spec.spread)
    count = max(1, spec.num_microbatches // len(spec.slice_sizes))
    return cls(num_workers=spec.num_workers, num_microbatches=count, **spec.parameters())


def _route(spec: Any, microbatch: int) -> int:
    index, replica = _inner_index(spec, microbatch)
    own: Spec = spec._replicas[replica]
    route: int = replica * own.num_routes + own.route(index)
    return route


def _inner(spec: Any, action: Action) -> tuple[Spec, int, Action]:
    """Return the replica that runs `action`, its number, and the action as that replica counts microbatches."""
    index, replica = _inner_index(spec, action.index)
    return spec._replicas[replica], replica, action._replace(index=index)


def _splits(spec: Any, stage: int, microbatch: int) -> bool:
    index, replica = _inner_index(spec, microbatch)
    splits: bool = spec._replicas[replica].splits(stage, index)
    return splits


def _recomputes(spec: Any, stage: int) -> bool:
    recomputes: bool = spec._replicas[0].recomputes(stage)
    return recomputes


def _actions(spec: Any, stage: int, microbatch: int) -> tuple[Action, ...]:
    index, replica = _inner_index(spec, microbatch)
    return tuple(_outer(spec, replica, spec._replicas[replica].actions(stage, index)))


def _after(spec: Any, action: Action) -> list[Action]:
    own, replica, inner = _inner(spec, action)
    return list(_outer(spec, replica, own.after(inner)))


def _slot(spec: Any, action: Action) -> int:
    own, replica, inner = _inner(spec, action)
    replicas: int = spec.replicas
    return own.slot(inner) * replicas + replica


def _program(spec: Any, worker: int) -> Iterable[Action]:
    own, replica = _own_place(spec, worker)
    if replica >= spec.num_microbatches // len(spec.slice_sizes):
        return []
    return _outer(spec, replica, spec._replicas[replica].program(own))


def _of_worker(name: str) -> Callable[[Any, int], int | None]:
    """Return what `spec` says of a worker by the method `name`: what the replica says of its own."""

    def says(spec: Any, worker: int) -> int | None:
        own, replica = _own_place(spec, worker)
        said: int | None = getattr(spec._replicas[replica], name)(own)
        return said

    return says


_SAID: dict[str, Callable[..., Any]] = {
    "splits": _splits,
    "recomputes": _recomputes,
    "actions": _actions,
    "after": _after,
    "slot": _slot,
    "program": _program,
    **{name: _of_worker(name) for name in ("activation_limit", "peak_activations")},
}
