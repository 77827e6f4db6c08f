"""Measured times of blocks by the length of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...dependency import B, F, I, Kind, R, W
from ...model.batches.sequences import length_of
from ...model.user_model import UserModel
from ...workers.transport.payload import Tree, map_tensors
from ..profile import THOUSAND, LayerCost, LengthTerms
from .profiling import profile_model
from .slice_times import fitted


def times_by_length(user_model: UserModel, rows: int, lengths: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Return the fields of a profile with each block's terms, measured with `rows` rows of several lengths.

    Args:
        settings: of `profile_model`.

    Raises:
        ConfigError: the model, or its batch, has no sequences, or cannot be measured.
    """
    measured: list[Sequence[LayerCost]] = []
    for length in lengths:
        batch = _at_length(user_model.batch, length)
        measured.append(profile_model(replace(user_model, batch=batch), [rows], **settings).measured[rows])
    points = [(1.0, rows * length / THOUSAND, rows * length**2 / THOUSAND**2) for length in lengths]
    found = []
    for costs in zip(*measured, strict=True):
        terms: list[dict[Kind, float]] = [{}, {}, {}]
        for kind in (F, B, I, W, R):
            for term, value in zip(terms, fitted(points, [cost.times[kind] for cost in costs]), strict=True):
                term[kind] = value
        found.append(LengthTerms(*terms))
    return {"by_length": tuple(found), "length": length_of(user_model.batch)}


def _at_length(batch: Tree, length: int) -> Tree:
    """Return a batch with rows of another length, by repeating places or leaving some out."""
    now = length_of(batch)

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != now:
            return tensor
        changed = tensor.detach()[:, torch.arange(length, device=tensor.device) % now]
        return changed.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change)
