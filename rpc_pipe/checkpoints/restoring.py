"""All workers go on from a checkpoint together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dependency import ConfigError, Damaged, PipeError
from ..system.files import DAMAGED
from ..workers.actor import WorkerActor
from ..workers.compute.shard import Shard
from ..workers.compute.stash import StashingShard
from .random_state import NAMES
from .reading import Checkpoint
from .resumption import Resumption
from .shard_state import model_tensors, put
from .together import together
from .writing import own_routes


class Restored(NamedTuple):
    """What a pipeline went on from."""

    path: Path
    #: training steps done
    step: int
    #: what was given to `save_checkpoint` to be kept
    extra: Any


class Prepared(NamedTuple):
    """What has been read of a checkpoint beside what each worker puts in its place."""

    checkpoint: Checkpoint
    results: Resumption
    #: as `random_state`
    random: dict[str, torch.Tensor]


def put_all(actor: WorkerActor, where: str | Path, elastic: bool, num_routes: int) -> Prepared:
    """Put all of a checkpoint in its place on this worker, if it fits on all.

    Raises:
        ConfigError: it does not fit, or is damaged; on every worker, and nothing has changed on any.
    """
    prepared, steps = _prepared(actor, where, elastic, num_routes)
    with understood(prepared.checkpoint.path):
        for step in steps:
            step()
    return prepared


def _prepared(
    actor: WorkerActor, where: str | Path, elastic: bool, num_routes: int
) -> tuple[Prepared, list[Callable[[], None]]]:
    """Read all that `actor` needs, see with the others that everything fits, and return what puts it in place."""
    steps: list[Callable[[], None]] = []
    names: set[str] = set()
    references: list[tuple[Shard, dict[str, torch.Tensor]]] = []

    @understood(where)
    def prepare() -> Prepared:
        checkpoint = Checkpoint(where)
        results = Resumption(checkpoint.about)
        # Another number of routes goes on from their reference, with the state of the first one's optimizer.
        apart = elastic and checkpoint.num_routes == len(own_routes(actor))
        for (_, route), shard in actor.shards.items():
            own = model_tensors(shard)
            names.update(own)
            weights, stages, rest = checkpoint.model(own), checkpoint.stages, checkpoint.rest
            if apart:
                references.append((shard, weights))
                weights, stages = checkpoint.of_route(route, own), checkpoint.routes[route]
                rest = partial(checkpoint.of_route, route)
            steps.append(_putting(shard, weights))
            steps.append(stages.prepare(shard, rest(stages.wanted(shard, route, num_routes))))
        updates = checkpoint.stages.updates
        steps.append(lambda: actor.go_on_at(checkpoint.step, updates))
        steps.extend(partial(_refer, *each) for each in references)
        return Prepared(checkpoint, results, checkpoint.rest(NAMES))

    prepared, told = together(
        actor, "checkpoint read", prepare, lambda read: [read.checkpoint.path.name, sorted(names)]
    )
    if len({path for path, _ in told}) > 1:
        raise ConfigError(f"checkpoint {where}: workers see different ones, {', '.join(path for path, _ in told)}")
    checkpoint = prepared.checkpoint
    left = checkpoint.names - {name for _, own in told for name in own}
    if left:
        raise ConfigError(f"checkpoint {checkpoint.path}: has {min(left)}, which this model does not have")
    return prepared, steps


@contextmanager
def understood(checkpoint: str | Path) -> Iterator[None]:
    """Turn what is raised where a manifest says something else than it should into a sentence.

    Raises:
        Damaged: instead of that.
    """
    try:
        yield
    except PipeError:
        raise
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}"
        raise Damaged(f"checkpoint {checkpoint}: is damaged, or of another version: {what}") from error


def _putting(shard: Shard, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    return lambda: put(shard, tensors)


def _refer(shard: Shard, weights: Mapping[str, torch.Tensor]) -> None:
    assert isinstance(shard, StashingShard)
    shard.refer_to(weights)
