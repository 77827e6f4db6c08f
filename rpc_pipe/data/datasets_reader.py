"""Datasets of Hugging Face's `datasets`: memory-mapped ones by ranges of rows, streamed ones in their order."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..dependency import ConfigError, DataError
from .ranges import CHUNK_BYTES, Columns, RangeReader, Ranges, arrays, evenly, names
from .source import Source

#: rows that give the identity of a dataset, and the bytes of a row of a stream
_LOOKED_AT = 64
#: bytes of a chunk of a stream, about: the first batch waits for one
_STREAMED_BYTES = 10**6


def hugging_face(samples: Any, inputs: Columns, targets: Columns, *, rows: int | None = None) -> Source:
    """Return a `datasets.Dataset`, which lies on the disk, or an `IterableDataset`, which is streamed, as a source.

    Columns are numbers, `[rows]`, or lists of numbers, `[rows, length]`; `dataset` reads other ones row by row.

    Args:
        inputs, targets: a column, which is given as a tensor; or several, which are given as a dict.
        rows: of a stream: how many an epoch has, if the dataset has no length. A stream is not shuffled again.

    Raises:
        ConfigError: it is no such dataset, or has no such column.
    """
    if not hasattr(samples, "select_columns"):
        raise ConfigError(f"hugging_face: {type(samples).__name__} is not of datasets; take dataset(...), or tokens")
    columns = names(inputs, targets)
    if missing := set(columns) - set(samples.column_names or columns):
        raise ConfigError(f"hugging_face: no column {min(missing)}; there are {', '.join(samples.column_names)}")
    if getattr(samples, "format", {}).get("type") == "custom":  # it would be left out in silence
        raise ConfigError("hugging_face: the dataset has a transform, made row by row; take dataset(...)")
    chosen = samples.select_columns(columns).with_format("arrow")
    if hasattr(samples, "__len__"):
        return Ranges(_Stored(chosen), inputs, targets)
    known = getattr((samples.info.splits or {}).get(str(samples.split)), "num_examples", 0)
    if not (rows := rows or known):
        raise ConfigError("hugging_face: a streamed dataset does not say how many rows it has; give rows=")
    return Ranges(_Streamed(chosen, rows), inputs, targets)


class _Stored(RangeReader):
    def __init__(self, rows: Any) -> None:
        self._rows, count = rows, len(rows)
        each = rows.data.nbytes // max(1, rows.data.num_rows) + 1
        self._each = max(1, CHUNK_BYTES // each)
        self.name, self.sizes = f"dataset of {count} rows", evenly(count, self._each)
        self.num_bytes = self.sizes * each
        some = rows[np.unique(np.linspace(0, count - 1, _LOOKED_AT, dtype=np.int64)).tolist()]
        self.identity = f"{count} rows, digest {zlib.crc32(repr(some.to_pydict()).encode()):08x}"

    def read(self, chunk: int, columns: Sequence[str]) -> dict[str, Any]:
        begin = chunk * self._each
        return arrays(self._rows[begin : begin + int(self.sizes[chunk])], columns, self.name)


class _Streamed(RangeReader):
    in_order, cause = True, "network"

    def __init__(self, rows: Any, count: int) -> None:
        self._rows = rows
        first = next(iter(rows.iter(_LOOKED_AT)))
        each = first.nbytes // first.num_rows + 1
        self._each = max(1, _STREAMED_BYTES // each)
        self.name, self.sizes = f"stream of {count} rows", evenly(count, self._each)
        self.num_bytes = self.sizes * each
        self.identity = f"{count} streamed rows, digest {zlib.crc32(repr(first.to_pydict()).encode()):08x}"
        #: the chunks that come, from the number of the first one on
        self._chunks: Iterator[Any] = iter(())
        self._next = -1

    def read(self, chunk: int, columns: Sequence[str]) -> dict[str, Any]:
        if chunk != self._next:
            self._chunks = iter(self._rows.skip(chunk * self._each).iter(self._each))
        self._next = -1  # unless it comes
        if (table := next(self._chunks, None)) is None:
            raise DataError(f"{self.name}: has ended before row {chunk * self._each}; give rows=")
        self._next = chunk + 1
        return arrays(table.slice(0, int(self.sizes[chunk])), columns, self.name)
