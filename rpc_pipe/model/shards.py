"""Make the shards of a worker: their layers, built or taken from the user's, and what trains them."""

from __future__ import annotations

from ..dependency import Spec
from ..workers.compute.digest import digest
from ..workers.compute.randomness import Randomness
from ..workers.compute.shard import LossFn, OptimizerFactory, SchedulerFactory, Shard
from .partition import Partition


class ShardMaker:
    """Makes shards on a device, alike on every worker."""

    def __init__(
        self,
        partition: Partition,
        randomness: Randomness,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFactory | None,
        lr_scheduler: SchedulerFactory | None,
    ) -> None:
        self._partition = partition
        self._randomness = randomness
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        #: digests of the initial weights that replicas must have alike, as `Call.weights`
        self.weights = ""

    def hosted(self, spec: Spec, worker: int) -> dict[tuple[int, int], Shard]:
        """Return the shards of `worker` by (stage, route)."""
        return {place: self._make(spec, *place) for place in spec.hosted(worker)}

    def _make(self, spec: Spec, stage: int, route: int) -> Shard:
        layers = self._partition.build(stage, self._randomness, route)
        if spec.num_routes > 1:
            tensors = [tensor for _, module in layers for tensor in module.state_dict().values()]
            self.weights += f"{stage}={digest(tensors):x} "
        for _, module in layers:
            module.to(self._randomness.device)
        return Shard(
            stage,
            layers,
            self._randomness,
            loss_fn=self._loss_fn if stage == spec.last_stage else None,
            optimizer=self._optimizer,
            lr_scheduler=self._lr_scheduler,
        )
