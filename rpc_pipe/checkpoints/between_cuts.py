"""Moving of a model's state from shards to shards of another cut, or to newcomers: a checkpoint without a file.

Tensors have the names of the unsplit model and their whole shapes, so each shard of the other cut asks by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..workers.actor import WorkerActor
from ..workers.compute.modules.buffer_mirror import mirror_of
from ..workers.compute.shard import Shard
from .shard_state import Stages, described, model_tensors, optimizer_tensors, put

_MODEL, _REST, _MIRROR = "model/", "rest/", "mirror/"


def move(
    actor: WorkerActor,
    stages_here: Collection[int],
    taken: Mapping[tuple[int, int], Shard],
    num_routes: int,
    same_cut: bool = False,
) -> int:
    """Let shards have the state of shards of another cut, and return the bytes that this worker has sent.

    All workers call this alike.

    Args:
        stages_here: the stages of the other cut that this worker alone gives the state of.
        taken: the shards that take, by (stage, route) of their cut, of `num_routes`.
        same_cut: whether it is the cut of before: replicas have the buffers of all then.

    Raises:
        ConfigError: the parameters of an optimizer's group had other options.
    """
    own = [(stage, shard) for (stage, _), shard in actor.shards.items() if stage in stages_here and not shard.is_guest]
    held = {stage: _tensors(shard) for stage, shard in own}
    told = {stage: [actor.worker, [*held[stage]], *_told(shard)] for stage, shard in own}
    # By stage, from all: the worker that gives it, the names of its tensors, and the rest of its state.
    every = sorted(each for one in actor.exchange("stages", json.dumps([*told.items()])) for each in json.loads(one))
    names = [name for _, (_, has, *_) in every for name in has]
    arrived: dict[str, Tensor] = {}
    stages = Stages(
        {str(stage): each for stage, (_, _, each, *_) in every},
        [name.removeprefix(_REST) for name in dict.fromkeys(names) if name.startswith(_REST)],
        # Two shards here may have one parameter, and an optimizer writes its state in place.
        lambda wanted, _: {name: arrived[_REST + name].clone() for name in wanted},
    )
    wanted = [_MODEL + name for shard in taken.values() for name in model_tensors(shard)]
    for (stage, route), shard in taken.items():
        wanted += [_REST + name for name in stages.wanted(shard, route, num_routes)]
        wanted += [name for name in names if same_cut and name.startswith(f"{_MIRROR}{stage}/")]
    sent, all_wanted = 0, [set(json.loads(each)) for each in actor.exchange("wanted", json.dumps(wanted))]
    for stage, (giver, has, *_) in every:
        for worker, left in zip(sorted(actor.carrier.workers), all_wanted, strict=True):
            part = [name for name in has if name in left]
            left.difference_update(part)  # of a parameter that several stages have, the first one gives
            gives = {name: held[stage][name] for name in part} if actor.worker == giver else {}
            sent += sum(tensor.nbytes for tensor in gives.values()) * (worker != giver)
            if part and (found := actor.hand(f"stage {stage} to {worker}", gives, [giver], [worker])):
                arrived |= {name: tensor.clone() for name, tensor in found[0].items()}
    for (stage, route), shard in taken.items():
        shard.updating.refuse_untrained()  # an average has all that has been trained so far
        put(shard, {name: arrived[_MODEL + name] for name in model_tensors(shard)})
        if same_cut:
            mirror_of(shard).put(arrived, f"{_MIRROR}{stage}/")
        else:
            mirror_of(shard).share(num_routes)
        stages.prepare(shard, route, num_routes)()
        *_, steps, shard.updating.scale.scale, shard.updating.scale.streak = every[0][1]
        shard.go_on_at(steps, stages.updates)
    return sent


def _tensors(shard: Shard) -> dict[str, Tensor]:
    model = {_MODEL + name: each for name, each in model_tensors(shard).items()}
    rest = {_REST + name: each for name, each in optimizer_tensors(shard).items()}
    held = mirror_of(shard).held.items()
    return model | rest | {f"{_MIRROR}{shard.stage}/{r}/{key}": each for r, has in held for key, each in has.items()}


def _told(shard: Shard) -> list[Any]:
    """Return the state of a shard beside the numbers in its tensors."""
    scale = shard.updating.scale
    return [described(shard, None), shard.num_updates, scale.scale, scale.streak]
