"""Measured times of blocks by the length of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from ...dependency import B, F, I, R, W
from ...model.batches.sequences import length_of
from ...model.user_model import UserModel, resized
from ..profile import THOUSAND, LayerCost, LengthTerms
from .profiling import profile_model


def times_by_length(user_model: UserModel, rows: int, lengths: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Return the fields of a profile with each block's terms, measured with `rows` rows of several lengths.

    Args:
        lengths: three at least; empty: a quarter, a half and all of the batch's.
        settings: of `profile_model`.

    Raises:
        ConfigError: the model, or its batch, has no sequences, or cannot be measured.
    """
    measured: list[Sequence[LayerCost]] = []
    usual = length_of(user_model.batch)
    lengths = lengths or (usual // 4, usual // 2, usual)
    for length in lengths:
        batch = resized(user_model.batch, usual, length, dim=1)
        measured.append(profile_model(replace(user_model, batch=batch), [rows], **settings).measured[rows])
    points = [(1.0, rows * length / THOUSAND, rows * length**2 / THOUSAND**2) for length in lengths]
    found = []
    for costs in zip(*measured, strict=True):
        by_kind = {kind: fitted(points, [cost.times[kind] for cost in costs]) for kind in (F, B, I, W, R)}
        found.append(LengthTerms(*({kind: terms[at] for kind, terms in by_kind.items()} for at in range(3))))
    return {"by_length": tuple(found), "length": usual}


def fitted(points: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the factors of three terms that fit times: the least squares, none below 0."""
    wanted = torch.tensor(times, dtype=torch.float64)[:, None]
    found: list[tuple[float, list[float]]] = []
    for some in (some for count in (1, 2, 3) for some in combinations(range(3), count)):
        terms = torch.tensor(points, dtype=torch.float64)[:, some]
        solved = torch.linalg.lstsq(terms, wanted).solution
        if bool((solved >= 0).all()):
            known = dict(zip(some, solved.flatten().tolist(), strict=True))
            factors = [known.get(term, 0.0) for term in range(3)]
            found.append((float(((terms @ solved - wanted) ** 2).sum()), factors))
    return min(found)[1]
