"""Rows that several chunks have read, put to their places in a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dependency import ConfigError
from ..workers.transport.payload import Tree, map_tensors, tensors_of
from .bijection import Numbers
from .source import Chunk, Filling, Wanted


class Joined(Filling):
    """A batch of any tensors."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._parts: list[tuple[Tree, Tree]] = []
        self._places: list[Tensor] = []

    def put(self, chunk: Chunk, numbers: Numbers, places: Numbers) -> None:
        self._parts.append(chunk.read(numbers, self._wanted))
        self._places.append(torch.from_numpy(places))

    def made(self) -> tuple[Tree, Tree]:
        """Return the batch.

        Raises:
            ConfigError: rows of different chunks have different forms.
        """
        columns = [list(tensors_of(part)) for part in self._parts]
        # By the first part's tensors: one may be an input and a target.
        joined = {id(column[0]): _column(list(column), self._places) for column in zip(*columns, strict=True)}
        whole: tuple[Tree, Tree] = map_tensors(self._parts[0], lambda tensor: joined[id(tensor)])
        return whole


def _column(pieces: list[Tensor], rows: list[Tensor]) -> Tensor:
    first = pieces[0]
    column = first.new_empty((sum(map(len, rows)), *first.shape[1:]))
    for piece, places in zip(pieces, rows, strict=True):
        if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype:
            raise ConfigError(
                f"data: samples differ in form: {first.dtype} {list(first.shape[1:])} and "
                f"{piece.dtype} {list(piece.shape[1:])}; rows of a batch must be alike"
            )
        column[places] = piece
    return column
