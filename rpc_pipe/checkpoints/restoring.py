"""All workers go on from a checkpoint together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dependency import ConfigError, Damaged, PipeError
from ..system.files import DAMAGED
from ..workers.actor import WorkerActor
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
    own = {shard: model_tensors(shard) for shard in actor.shards.values()}
    steps: list[Callable[[], None]] = []
    references: list[Callable[[], None]] = []

    @understood(where)
    def prepare() -> Prepared:
        checkpoint = Checkpoint(where)
        results = Resumption(checkpoint.about)
        # Another number of routes goes on from their reference, with the state of the first one's optimizer.
        apart = elastic and len(checkpoint.routes) == len(own_routes(actor))
        for (_, route), shard in actor.shards.items():
            weights, stages = checkpoint.model(own[shard]), checkpoint.stages
            if apart:
                assert isinstance(shard, StashingShard)
                references.append(partial(shard.refer_to, weights))
                stages = checkpoint.routes[route]
                weights = stages.read(own[shard])
            steps.extend([partial(put, shard, weights), stages.prepare(shard, route, num_routes)])
        return Prepared(checkpoint, results, checkpoint.rest(NAMES))

    def tell(read: Prepared) -> list[Any]:
        return [read.checkpoint.path.name, sorted({name for tensors in own.values() for name in tensors})]

    prepared, told = together(actor, "checkpoint read", prepare, tell)
    if len({path for path, _ in told}) > 1:
        raise ConfigError(f"checkpoint {where}: workers see different ones, {', '.join(path for path, _ in told)}")
    checkpoint = prepared.checkpoint
    left = checkpoint.names - {name for _, names in told for name in names}
    if left:
        raise ConfigError(f"checkpoint {checkpoint.path}: has {min(left)}, which this model does not have")
    with understood(checkpoint.path):
        for step in steps:
            step()
        actor.go_on_at(checkpoint.step, checkpoint.stages.updates)
        for refer in references:
            refer()
    return prepared


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
