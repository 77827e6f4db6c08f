"""Making of a worker's shards: slices of the model with their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..dependency import NO_REDUCTIONS, ModelError, Spec
from ..dependency.pipeline_options import Options
from ..workers.compute.modules.batch_norm import Statistics
from ..workers.compute.modules.digest import digest
from ..workers.compute.modules.randomness import Randomness
from ..workers.compute.modules.torch_internals import local
from ..workers.compute.sequences.slices import Divide, Slice
from ..workers.compute.shard import LossFn, Shard
from ..workers.compute.updating import Training
from .observe.model_kinds import needs_observation
from .partition import Layered, LayerPartition

if TYPE_CHECKING:
    from ..workers.compute.parts.members import Members
    from ..workers.compute.parts.ownership import Ownership
    from .observed_partition import ObservedPartition

#: every kind of model that a pipeline takes
Model = Layered | nn.Module | Callable[[], nn.Module]


def make_partition(
    model: Model,
    loss_fn: LossFn | None,
    num_stages: int,
    training: Training,
    options: Options,
) -> LayerPartition | ObservedPartition:
    """Return the partition of a model: between its layers, or where its forward calls its blocks.

    Raises:
        ModelError: the model cannot be cut, or there is no loss.
    """
    if not isinstance(model, (nn.Module, Sequence)) and not callable(model):
        raise ModelError(f"model: is a {type(model).__name__}; must be a module, layers, or what makes a module")
    if needs_observation(model):
        from .observed_partition import ObservedPartition  # it loads the modules that observe and replay forwards

        cut = options.split, loss_fn
        whole = ObservedPartition(model, num_stages, *cut, blocks=options.blocks, seed=options.seed)  # type: ignore[arg-type]
        if training.deferred_batch_norm:
            from ..workers.compute.modules.deferred_batch_norm import defer  # few models do

            defer(whole.whole.modules())
        return whole
    if options.blocks is not None:
        raise ModelError(f"blocks {options.blocks!r}: a list of layers is cut between its layers; leave it out")
    if loss_fn is None:
        raise ModelError("loss_fn is None: layers compute no loss; pass one, such as nn.functional.cross_entropy")
    return LayerPartition(model, num_stages, options.split, loss_fn)  # type: ignore[arg-type]


class ShardMaker:
    """Makes shards, with the same initial weights on every worker.

    Args:
        members: the processes that share the shards; None: this one alone.
        divide: divides a layer or block among them.
        keeps: whether the model is kept, to be cut anew.
    """

    def __init__(
        self,
        model: LayerPartition | ObservedPartition,
        seed: int,
        training: Training,
        members: Members | None = None,
        divide: Divide | None = None,
        keeps: bool = False,
    ) -> None:
        self.model, self._members, self._divide, self._keeps = model, members, divide, keeps
        self.seed = seed
        self._training = training
        #: how parameters that several hold are divided, when the shards have been made
        self.divided = NO_REDUCTIONS
        self._buckets: dict[int, int] = {}
        #: digests of the initial weights, which must be equal in all replicas, for `Call.weights`
        self.weights = ""

    def hosted(
        self, spec: Spec, worker: int, device: torch.device, here: Sequence[int], *, copied: bool = False
    ) -> dict[tuple[int, int], Shard]:
        """Return the shards of `worker`, on `device`, by (stage, route).

        Args:
            here: the workers of this process. If they hold a stage by several routes, the first route uses the user's
                modules, which the user may change between two steps, and the other routes use copies.
            copied: whether the first route uses copies, too, as shards of another cut have the modules.
        """
        members = self._members
        randomness = Randomness(self.seed, device, None if members is None else members.numbered)
        first: dict[int, int] = {}
        for stage, route in chain.from_iterable(map(spec.hosted, here)):
            first[stage] = min(route, first.get(stage, route))
        for stage, route in spec.hosted(worker) if self._divide is not None else ():
            self.model.begin(stage, randomness, route - first[stage] + copied)
        made = {(s, r): self._make(spec, s, r, randomness, r - first[s] + copied) for s, r in spec.hosted(worker)}
        if spec.num_routes > spec.num_separate or self.model.shared:
            from ..workers.compute.parts.ownership import divided

            self.divided = divided(spec, self.model.shared, self._buckets)
        return made

    def end(self, shards: Sequence[Shard], *, alone: bool = False) -> None:
        """Record the state of the user's modules and drop the model, when all shards of this process have been made.

        Args:
            alone: whether no other process trains weights of the model.
        """
        if not alone:
            from .stale_weights import refuse_stale_weights

            here = [parameter for shard in shards for parameter in shard.parameters()]
            refuse_stale_weights(self.model.given, here, shards)
        self.model.module_copies.begin()
        if not self._keeps:
            self.model.release()

    def _make(self, spec: Spec, stage: int, route: int, randomness: Randomness, replica: int) -> Shard:
        slice = self.model.slice(stage, randomness, replica, self._divide)
        if self._training.deferred_batch_norm:
            from ..workers.compute.modules.deferred_batch_norm import defer

            defer(slice.own)
        if spec.num_routes > 1:
            self.weights += f"{stage}={digest(map(local, slice.state_dict().values())):x} "
        loss_fn = self.model.loss_fn if stage == spec.last_stage else None
        if spec.num_routes > 1 and loss_fn is not None:
            from .common_objects import unchanging

            loss_fn = unchanging(loss_fn)
        pieces = self._pieces(spec, stage, route, slice)
        shard = Shard(
            stage, slice, randomness,
            loss_fn=loss_fn, training=self._training, pieces=pieces, members=self._members,
        )  # fmt: skip
        return _with_stores(spec, shard)

    def anew(self, num_stages: int) -> ShardMaker:
        """Return a maker of the shards of the same model, which has been kept, with another cut."""
        return ShardMaker(self.model.anew(num_stages), self.seed, self._training, keeps=True)

    def guest(self, spec: Spec, stage: int, route: int, host: Shard, device: torch.device) -> Shard:
        """Return one more replica of a stage on its worker, with the weights of one that is there."""
        training = Training(check=self._training.check)
        pieces, randomness = self._pieces(spec, stage, route, host.slice), Randomness(self.seed, device)
        shard = Shard(stage, host.slice, randomness, loss_fn=host.loss_fn, training=training, pieces=pieces)
        shard.lodge(host)
        return _with_stores(spec, shard)

    def _pieces(self, spec: Spec, stage: int, route: int, slice: Slice) -> Ownership | None:
        """Return the owners of a stage's parameters; None: no other stage or replica holds any."""
        if spec.num_routes == spec.num_separate and not slice.shared:
            return None
        from ..workers.compute.parts.ownership import Ownership

        pieces = Ownership(spec, stage, route, slice.named_parameters(), self.model.shared, Statistics(slice.own))
        self._buckets[stage] = pieces.num_buckets
        return pieces


def _with_stores(spec: Spec, shard: Shard) -> Shard:
    """Give a shard the stores that few schedules need: several versions of weights, and the state of slices."""
    if not spec.synchronous:
        from ..workers.compute.stash import VersionStore

        shard.versions = VersionStore(shard.stage, shard.slice, shard.updating, shard.state)
    if len(spec.parallelism.slices) > 1:
        from ..workers.compute.sequences.sequence import SliceStore

        shard.slices = SliceStore(shard.slice, len(spec.parallelism.slices))
    if spec.parallelism.zero or spec.averaging_pull:
        from ..workers.compute.outside_updates import OutsideUpdates

        versions = shard.versions if spec.averaging_pull else None
        shard.outside_updates = OutsideUpdates(shard.stage, shard.updating, versions)
    return shard


def refuse_sums(loss_fn: object, name: str) -> None:
    """Refuse a loss function of torch that returns no mean, as losses are weighted by their shares of the rows.

    Raises:
        ModelError: it returns a sum, or a value for each row.
    """
    of_torch, how = isinstance(loss_fn, nn.Module) and type(loss_fn).__module__.startswith("torch."), None
    if isinstance(loss_fn, nn.Module) and of_torch:
        how = getattr(loss_fn, "reduction", None)
    elif isinstance(loss_fn, partial) and getattr(loss_fn.func, "__module__", "") == nn.functional.__name__:
        how = loss_fn.keywords.get("reduction")
    if how in ("sum", "none"):
        raise ModelError(f"{name}: reduction={how!r} is no mean of a microbatch; leave it out, or return (sum, weight)")
