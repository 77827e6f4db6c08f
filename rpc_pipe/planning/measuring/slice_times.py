"""Measured costs of slices of sequences: a model trains some steps by few slices, and some by more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from statistics import median
from typing import Any

import torch

from ...dependency import Action, B, F
from ...model.batches.sequences import length_of
from ...model.user_model import UserModel, resize_batch
from ...pipeline import Pipeline, Training
from ...workers.hooks import Listener, StepRecord
from ..slice_costs import SliceCosts

#: into how many equal slices sequences are cut
_FEW, _MORE = 2, 4
#: steps; the first ones, which also check the model, are not counted
_STEPS, _FIRST = 7, 2


def measure_slices(user_model: UserModel, rows: int, activations: float, device: str = "cpu") -> SliceCosts:
    """Train a microbatch on one worker, by few and by more slices, and return the costs of slices.

    Args:
        rows: of the microbatch; activations: the bytes that all its forwards keep.

    Raises:
        ConfigError: the model, or its batch, does not go with slices.
    """
    run = partial(_trained, user_model, rows, device)
    few, more = run(_FEW), run(_MORE)
    state = min(0.9, more.num_bytes / activations) if activations else 0.0
    length = length_of(user_model.batch)
    return SliceCosts(*_fitted([few.times(), more.times()]), state, length)


def _fitted(measured: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return which shares of a whole sequence's time are fixed, and attention."""
    places = [(n / len(slices), (n + 1) / len(slices)) for slices in measured for n in range(len(slices))]
    fixed, linear, attention = fitted([(1.0, y - x, y * y - x * x) for x, y in places], [*chain(*measured)])
    total = fixed + linear + attention
    return (fixed / total, attention / total) if total else (0.0, 0.0)


def fitted(points: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the factors of three terms that fit times: the least squares, none below 0."""
    wanted = torch.tensor(times, dtype=torch.float64)[:, None]
    found: list[tuple[float, list[float]]] = []
    for some in (some for count in (1, 2, 3) for some in combinations(range(3), count)):
        terms = torch.tensor(points, dtype=torch.float64)[:, some]
        solved = torch.linalg.lstsq(terms, wanted).solution
        if bool((solved >= 0).all()):
            factors = [0.0, 0.0, 0.0]
            for term, value in zip(some, solved.flatten().tolist(), strict=True):
                factors[term] = value
            found.append((float(((terms @ solved - wanted) ** 2).sum()), factors))
    return min(found)[1]


class _Watch(Listener):
    """Records the times of slices, and the state they leave when the first backward begins."""

    def __init__(self, slices: int, shards: Mapping[Any, Any]) -> None:
        self._slices, self._shards = slices, shards
        self._steps: list[StepRecord] = []
        self.num_bytes = 0

    def action_started(self, step: int, action: Action) -> None:
        if action.kind is B:
            self.num_bytes = max(self.num_bytes, sum(shard.slices.num_bytes for shard in self._shards.values()))

    def step_finished(self, record: StepRecord) -> None:
        self._steps.append(record)

    def times(self) -> list[float]:
        """Return how long forward and backward of each slice took, together."""
        took: list[list[int]] = [[] for _ in range(self._slices)]
        for record in self._steps[_FIRST:]:
            each = [0] * self._slices
            for action, start, end in record.actions:
                if action.kind in (F, B):
                    each[action.index] += end - start
            for slice_times, ns in zip(took, each, strict=True):
                slice_times.append(ns)
        return [median(ns) for ns in took]


def _trained(user_model: UserModel, rows: int, device: str, slices: int) -> _Watch:
    batch = resize_batch(user_model.batch, rows)
    with Pipeline(
        user_model.model, user_model.loss_fn, training=Training(), num_microbatches=1, num_workers=1, example=batch,
        slices=slices, device=device,
    ) as pipe:  # fmt: skip
        watch = _Watch(slices, pipe.actors[0].shards)
        pipe.listen(lambda worker: watch)
        for _ in range(_STEPS):
            pipe.step(batch)
    return watch
