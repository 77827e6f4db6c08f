"""Reading of batches for the workers of a process: the used parts of a lazy batch, or all where some cannot read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ...dependency import Spec
from ...workers.actor import WorkerActor
from ...workers.transport.payload import Tree
from .microbatches import LazyBatch, Microbatches, Pair, SplitBatch, refuse_graphs

if TYPE_CHECKING:
    from .ordering import Ordering

logger = logging.getLogger(__name__)


class BatchReader:
    """Reads batches for the workers of a process.

    Args:
        peers: these workers.
        whole: the model, if it is cut by observation: all its stages need inputs; None: a list of layers.
        loss_is_inside: whether it computes its loss itself.
        ordering: of the microbatches of training steps; None: the given order.
    """

    def __init__(
        self,
        spec: Spec,
        peers: Sequence[WorkerActor],
        whole: nn.Module | None,
        loss_is_inside: bool,
        ordering: Ordering | None = None,
    ) -> None:
        self._ordering = ordering
        self._sequences = None
        if len(spec.parallelism.slices) > 1:
            from .sequences import Sequences  # few jobs cut them

            self._sequences = Sequences(spec, whole, loss_is_inside=loss_is_inside)
        self._peers, self._peer, self._is_whole = peers, peers[0], whole is not None
        self._loss_is_inside = loss_is_inside
        #: whether a batch with fewer rows than microbatches has been reported
        self._said_fewer = False
        #: selects the tensors that are compared; 0 where a newcomer has made other calls than the rest
        self._num_cut, self.counts = 0, True
        self.begin(spec)

    def begin(self, spec: Spec, members: int = 1, member: int = 0) -> None:
        """Read for `spec` from now on, the same schedule in perhaps another placement.

        Args:
            members: how many members of a worker take its microbatches in turn; `spec` counts all microbatches.
        """
        self._spec, self._reader, self._members = spec.unsliced(), spec.place(0, 0), members
        workers = [peer.worker for peer in self._peers]
        self._has_all, self._reads = len(workers) == spec.num_workers, self._reader in workers
        stages = {stage for worker in workers for stage, _ in spec.hosted(worker)}
        if self._sequences is not None:  # all must know how long sequences are
            stages = {0, spec.last_stage}
        #: whether the workers of this process use inputs and targets
        self._used = 0 in stages, spec.last_stage in stages
        #: the rows that this process reads, where other replicas and members read theirs; members evaluate all
        self._evaluated = self._own = None
        if (spec.num_routes > 1 and not self._has_all) or members > 1:
            from .own_rows import OwnRows

            self._own = OwnRows(self._spec, self._peer.worker, member, members)
            alone = self._has_all or spec.num_routes == 1
            self._evaluated = None if alone else self._own._replace(member=0, members=1)

    def cut(
        self,
        batch: Tree | None,
        microbatches: Sequence[Tree] | None,
        pair: Pair,
        *,
        whole: bool = False,
        cuts_model: bool = False,
    ) -> Microbatches:
        """Split a batch. A lazy one is read as far as this process uses it, or all do if only this one can read.

        Args:
            batch, microbatches, pair: as of `Microbatches.of`.
            whole: leave sequences whole and microbatches in their order, as outside of training.
            cuts_model: whether the model will be cut with it, so that all workers need all of it.
        """
        if isinstance(batch, LazyBatch) and microbatches is None:
            found = self._read(batch, pair, cuts_model, whole)
        else:
            self._num_cut += self.counts  # lazy batches are not compared, and a worker may read one once more
            found = Microbatches.of(batch, microbatches, self._spec.num_microbatches, self._num_cut, pair)
            if not whole:
                refuse_graphs(batch if microbatches is None else microbatches)
        # An evaluation of a row fills no pipeline.
        if microbatches is None and not whole and not isinstance(batch, SplitBatch) and found.sizes is None:
            self._say_if_fewer(found)
        if self._ordering is not None and not whole:
            found = self._ordering.applied(self._spec, found)
        return found if whole or self._sequences is None else self._sequences.cut(found)

    def _read(self, batch: LazyBatch, pair: Pair, cuts_model: bool, whole: bool) -> Microbatches:
        batch.follow()
        sides = (True, True) if self._is_whole else self._used
        own = None if cuts_model else self._evaluated if whole else self._own
        if hasattr(batch, "grouped"):  # a `BatchByLength`, which few jobs load
            from .own_rows import LengthNeeds

            seconds = None if self._ordering is None else self._ordering.seconds
            least = self._spec.num_routes * self._members
            needs = LengthNeeds(self._spec.num_stages, least, self._members, self._loss_is_inside, seconds)
            is_as_read = self._ordering is None and self._sequences is None
            return batch.grouped(sides, pair, needs, own if is_as_read else None)  # type: ignore[no-any-return]
        from .own_rows import read_microbatches

        parts = min(self._spec.num_microbatches, batch.rows)
        if not batch.scattered:
            return read_microbatches(batch, pair(batch.read(*sides, own)), parts, own)
        takers = self._peer.carrier.workers
        alone = self._reader not in takers  # a newcomer that does not take part yet
        reads = self._reads or (cuts_model and alone)
        read = batch.read(reads, reads)
        if cuts_model and not self._has_all and not alone:
            handed = self._peer.hand(f"first batch, {batch.label}", read, [self._reader], takers)
            assert handed is not None
            (read,) = handed
        found = read_microbatches(batch, pair(read) if self._reads or cuts_model else read, parts)
        if self._has_all or cuts_model:
            return found
        from ...workers.transport.scatter import scatter_whole

        scatter = scatter_whole(self._spec, found.inputs, found.targets, reads=self._reads, to_all=self._is_whole)
        return replace(found, scatter=scatter)

    def _say_if_fewer(self, found: Microbatches) -> None:
        """Report once if a batch has been split into fewer microbatches than wanted, because it has too few rows."""
        wanted, made = self._spec.num_microbatches, len(found.inputs)
        if made < wanted and not self._said_fewer:
            self._said_fewer = True
            if self._peer.worker == 0:
                rows = "1 row" if found.rows == 1 else f"{found.rows} rows"
                logger.warning("num_microbatches=%d: a batch of %s makes %d: its bubble is larger", wanted, rows, made)
