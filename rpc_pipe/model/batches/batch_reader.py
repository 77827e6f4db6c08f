"""Reading of batches, limited to the fields that the stages of a worker use, for models that are cut by observation.

    first batch of a loader    read whole, for its shapes; the model may be cut with it
    later batches              the fields that are used; in place of the others stages get placeholders

If only the worker of the first stage can read, it sends the first batch to all workers, and of later batches to each
worker what that uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...dependency import Spec
from ...workers.actor import WorkerActor
from ...workers.compute.shard import Shard
from ...workers.compute.slices import PartialFields
from ...workers.transport.payload import Tree, map_tensors, split_rows, tensors_of
from ...workers.transport.scatter import Scatter, run_by, scatter_whole
from ..observe.trees import Path, at, leaves, replaced

if TYPE_CHECKING:
    from ..replay.observed_stage import ObservedStage
from .lazy_batch import FieldSelection, LazyBatch, OwnRows, form_of
from .microbatches import Microbatches, Pair

logger = logging.getLogger(__name__)

#: inputs (0) or targets (1), and the key where they are a dict
_Field = tuple[int, str | None]
_NOTHING: frozenset[Path] = frozenset()


class BatchReader:
    """Reads batches for the workers of a process.

    Args:
        peers: these workers.
        whole: the model, if it is cut by observation: its stages read fields of batches; None: a list of layers.
        loss_is_inside: whether it computes its loss itself.
    """

    def __init__(self, spec: Spec, peers: Sequence[WorkerActor], whole: nn.Module | None, loss_is_inside: bool) -> None:
        self._sequences = None
        if len(spec.slice_sizes) > 1:
            from .sequences import Sequences  # few jobs cut them

            self._sequences = Sequences(spec, whole, loss_is_inside=loss_is_inside)
        self._spec, self._peers = spec.unsliced(), peers
        self._has_all = len(peers) == spec.num_workers
        #: whether only the fields in use are read
        self._by_fields = whole is not None and not self._has_all and self._sequences is None
        self._peer, self._me = peers[0], peers[0].worker
        self._reader, self._all = spec.place(0, 0), range(spec.num_workers)
        self._stages = {worker: {stage for stage, _ in spec.hosted(worker)} for worker in self._all}
        self._last = spec.last_stage
        #: the rows that this worker reads, where other replicas read theirs
        self._own = None if self._has_all or spec.num_routes == 1 else OwnRows(self._spec, self._me)
        #: paths of the fields that this worker's stages do not use, and its slices; empty until the model has been cut
        self._unused_here = _NOTHING
        self._slices: list[ObservedStage] = []
        #: worker -> paths in (args, kwargs) that it does not read; of other workers only if this one reads for them
        self._unused: dict[int, frozenset[Path]] = {}
        #: whether this worker's unused fields have been sent to the reader
        self._has_told = False
        #: whether it has been said that a batch has fewer rows than microbatches are wanted
        self._said_fewer = False
        self._num_cut = 0

    def cut(
        self,
        batch: Tree | None,
        microbatches: Sequence[Tree] | None,
        pair: Pair | None,
        *,
        whole: bool = False,
    ) -> Microbatches:
        """Split a batch. A lazy one is read as far as this process uses it, or all do if only this one can read.

        Args:
            batch, microbatches, pair: as of `Microbatches.of`.
            whole: leave sequences whole where they are cut in training.
        """
        self._num_cut += 1
        found = self._split(batch, microbatches, self._spec.num_microbatches, self._num_cut, pair)
        if microbatches is None:
            self._say_if_fewer(found)
        return found if whole or self._sequences is None else self._sequences.cut(found)

    def _split(
        self,
        batch: Tree | None,
        microbatches: Sequence[Tree] | None,
        num_microbatches: int,
        number: int,
        pair: Pair | None,
    ) -> Microbatches:
        lazy = batch if isinstance(batch, LazyBatch) and microbatches is None else None
        if lazy is not None and self._by_fields:
            assert pair is not None
            return self._cut(lazy, num_microbatches, pair)
        stages = {stage for peer in self._peers for stage in self._stages[peer.worker]}
        used = 0 in stages, self._last in stages  # inputs and targets
        if lazy is not None and lazy.scattered:
            reads = any(peer.worker == self._reader for peer in self._peers)  # what only one can read
            used = reads, reads
        own = None if lazy is None or lazy.scattered else self._own  # who reads for others reads all rows
        found = Microbatches.of(batch, microbatches, num_microbatches, number, used, pair, own)
        if lazy is None or not lazy.scattered or self._has_all:
            return found
        targets = None if pair is not None else found.targets
        return replace(found, scatter=scatter_whole(self._spec, found.inputs, targets, reads=used[0]))

    def _say_if_fewer(self, found: Microbatches) -> None:
        """Say once if a batch has been split into fewer microbatches than are wanted, as it has too few rows."""
        wanted, made = self._spec.num_microbatches, len(found.inputs)
        if made < wanted and not self._said_fewer:
            self._said_fewer = True
            if self._me == 0:
                rows = "1 row" if found.rows == 1 else f"{found.rows} rows"
                logger.warning(
                    "num_microbatches=%d, but a batch of %s makes %d: its bubble is larger", wanted, rows, made
                )

    def learn(self, unused: Sequence[frozenset[Path]], shards: Iterable[Shard], found: Microbatches) -> Microbatches:
        """Record the fields that each stage does not use; return the microbatches with which the model was cut."""
        if not self._by_fields:
            return found
        from ..replay.observed_stage import ObservedStage  # the model is a whole one

        self._unused_here = frozenset.intersection(*(unused[stage] for stage in self._stages[self._me]))
        if self._me == self._reader:  # one worker must have every field, whose shapes all workers compare
            self._unused_here -= frozenset.intersection(*unused)
        self._slices = [shard.slice for shard in shards if isinstance(shard.slice, ObservedStage)]
        return found if found.lazy is None else self._without_unused(found)

    def _cut(self, batch: LazyBatch, num_microbatches: int, pair: Pair) -> Microbatches:
        """Read the fields of a batch that this worker uses, or those of all if only this one can read, and split it."""
        batch.follow()
        parts = min(num_microbatches, batch.rows)
        if batch.form is None:
            found = Microbatches.read(batch, pair(self._first(batch)), parts)
            return self._without_unused(found) if self._slices else found
        self._tell(batch)
        form = pair(batch.form)
        known = frozenset(path for path, _ in leaves(form[0]))
        unused = {worker: (known & less if batch.uniform else _NOTHING) for worker, less in self._unused.items()}
        owners, readers = _owners(batch.form), self._readers(batch)
        wanted = {owners[id(leaf)] for worker in readers for leaf in self._used(worker, form, unused)}
        rows = self._own if self._slices and not batch.scattered else None  # the model may be cut with the first
        read = _read(batch, wanted, rows)
        found = Microbatches.read(batch, pair(read), parts, read if batch.uniform else None, rows)
        mine, whole = unused.get(self._me, _NOTHING), None
        if not batch.scattered or self._me == self._reader:
            whole = self._rereading(batch, pair, parts)
        if not batch.scattered:
            return _without_fields(found, mine, whole)
        own = [_without(piece, mine) for piece in found.inputs]
        scatter = self._scatter(found, form, unused, known, own)
        return replace(_without_fields(found, mine, whole, own), scatter=scatter)

    def _readers(self, batch: LazyBatch) -> Collection[int]:
        """Return the workers for which this worker reads."""
        if batch.scattered:
            return self._all if self._me == self._reader else []
        return [self._me]

    def _first(self, batch: LazyBatch) -> tuple[Tree, Tree]:
        """Return the first batch of a loader, whole."""
        read: Tree = [batch.look(), batch.uniform] if self._readers(batch) else None
        if batch.scattered:
            handed = self._peer.hand(f"first batch, {batch.label}", read, [self._reader], self._all)
            assert handed is not None
            (read,) = handed
        both: tuple[Tree, Tree] = read[0]
        batch.note(form_of(both), uniform=read[1])
        return both

    def _without_unused(self, found: Microbatches) -> Microbatches:
        """Drop from whole microbatches the fields that stages do not use, after a check that they run without these."""
        piece = found.inputs[0]
        if self._me not in self._unused:
            less = self._unused_here & {path for path, _ in leaves(piece)}
            tree, forms = _without(piece, less), _forms(piece, less)
            does = bool(less) and all(each.goes_without(tree, forms) for each in self._slices)
            self._unused[self._me] = less if does else _NOTHING
        return _without_fields(
            found, self._unused[self._me] & {path for path, _ in leaves(piece)}, found.inputs.__getitem__
        )

    def _tell(self, batch: LazyBatch) -> None:
        """Send this worker's unused fields once to the worker that reads for all."""
        if batch.scattered and not self._has_told:
            self._has_told = True
            less = sorted(self._unused.get(self._me, ()), key=repr)
            handed = self._peer.hand("fields that are not read", less, self._all, [self._reader])
            if handed is not None:
                self._unused = {worker: frozenset(paths) for worker, paths in zip(self._all, handed, strict=True)}

    def _used(self, worker: int, form: tuple[Tree, Tree], unused: Mapping[int, frozenset[Path]]) -> list[Tensor]:
        """Return the tensors of a batch that a worker uses."""
        inputs = [leaf for path, leaf in leaves(form[0]) if path not in unused.get(worker, _NOTHING)]
        return inputs + list(tensors_of(form[1]) if self._last in self._stages[worker] else ())

    def _rereading(self, batch: LazyBatch, pair: Pair, parts: int) -> Callable[[int], Tree]:
        """Return a function from a microbatch to all its fields, which reads the whole batch when first called."""

        @cache
        def whole() -> list[Tree]:
            if self._unused[self._me]:
                self._unused[self._me] = _NOTHING
                logger.warning("worker %d: uses a field that it was not seen to use; reads whole batches", self._me)
            return split_rows(pair(batch.read(True, True))[0], parts)

        return lambda number: whole()[number]

    def _scatter(
        self,
        found: Microbatches,
        form: tuple[Tree, Tree],
        unused: Mapping[int, frozenset[Path]],
        known: frozenset[Path],
        own: list[Tree],
    ) -> Scatter:
        """Return which worker gets what of a batch that one worker reads; `own` receives this worker's fields."""
        reads = self._me == self._reader
        scatter = Scatter(self._reader, {}, {})
        for worker in (each for each in self._all if each != self._reader and (reads or each == self._me)):
            less = unused.get(worker, _NOTHING)
            if known - less:
                name = f"fields for worker {worker}"
                scatter.takers[name] = [worker]
                read = [_without(piece, less) for piece in found.inputs] if reads else []
                scatter.lists[name] = run_by(self._spec, worker, read) if reads else own
            if self._last in self._stages[worker] and list(tensors_of(form[1])):
                name = f"targets for worker {worker}"
                scatter.takers[name] = [worker]
                scatter.lists[name] = run_by(self._spec, worker, found.targets) if reads else found.targets
        return scatter


def _owners(form: tuple[Tree, Tree]) -> dict[int, _Field]:
    """Return the field of each tensor, by its id."""
    found: dict[int, _Field] = {}
    for side, tree in enumerate(form):
        for key, part in tree.items() if isinstance(tree, dict) else [(None, tree)]:
            found |= {id(leaf): (side, key) for leaf in tensors_of(part)}
    return found


def _read(batch: LazyBatch, wanted: Collection[_Field], own: OwnRows | None) -> tuple[Tree, Tree]:
    """Read fields of a batch, or of its `own` rows; the others are meta tensors."""
    assert batch.form is not None
    some: list[FieldSelection] = []
    for side, tree in enumerate(batch.form):
        keys = frozenset(key for number, key in wanted if number == side and key is not None)
        has_all = keys >= tree.keys() if isinstance(tree, dict) else (side, None) in wanted
        some.append(has_all or (keys if keys else False))
    read = zip(batch.form, some, batch.read(some[0], some[1], own), strict=True)
    rows = batch.rows if own is None else len(own.of(batch.rows))
    inputs, targets = (_filled(*each, rows) for each in read)
    return inputs, targets


def _filled(form: Tree, some: FieldSelection, read: Tree, rows: int) -> Tree:
    """Return what was read of inputs or targets, with meta tensors in place of other fields."""
    if some is True:
        return read
    empty = map_tensors(form, lambda leaf: leaf.new_empty((rows, *leaf.shape[1:])))
    return {key: read[key] if some and key in some else part for key, part in empty.items()} if some else empty


def _without_fields(
    found: Microbatches,
    unread: frozenset[Path],
    whole: Callable[[int], Tree] | None,
    lists: list[Tree] | None = None,
) -> Microbatches:
    """Return microbatches without the unread fields.

    Args:
        whole: returns all fields of a microbatch.
        lists: microbatches without these fields, possibly received later; None: they are made here.
    """
    if not unread:
        return found if lists is None else replace(found, inputs=lists)
    lists = [_without(piece, unread) for piece in found.inputs] if lists is None else lists
    return replace(found, inputs=[
        PartialFields(lists, number, _forms(piece, unread), None if whole is None else partial(whole, number))
        for number, piece in enumerate(found.inputs)
    ])  # fmt: skip


def _forms(piece: Tree, places: Collection[Path]) -> dict[Path, tuple[torch.Size, torch.dtype]]:
    return {path: (leaf.shape, leaf.dtype) for path in places for leaf in [at(piece, path)]}


def _without(piece: Tree, places: Collection[Path]) -> Any:
    return replaced(piece, dict.fromkeys(places))
