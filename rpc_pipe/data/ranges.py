"""Rows that lie together in chunks: a reader gives a chunk's columns, and the loader takes rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..dependency import ConfigError, DataError
from ..workers.transport.payload import Tree
from .bijection import Numbers
from .source import ALL, Busy, Cause, Source, Wanted, fields, need

#: a name, or several names, which give a dict
Columns = str | Sequence[str]
#: bytes of a chunk, about
CHUNK_BYTES = 16 * 10**6


class RangeReader:
    """Reads rows chunk by chunk; a subclass names its chunks and reads one.

    Attributes:
        name: as errors show it.
        identity: equal where the rows and their numbers are equal, almost surely; in words.
        sizes: rows of each chunk.
        num_bytes: bytes of memory that each chunk takes.
        in_order: whether chunks come only one after the other.
        cause: of the time that reading takes.
    """

    name: str
    identity: str
    sizes: Numbers
    num_bytes: Numbers
    in_order = False
    cause: Cause = "disk"

    def read(self, chunk: int, columns: Sequence[str]) -> Mapping[str, Any]:
        """Return columns of a chunk: arrays with a row for each, or lists of arrays that differ in length.

        Several threads may ask, unless chunks come in order.

        Raises:
            DataError: the chunk cannot be read.
        """
        raise NotImplementedError

    def place(self, chunk: int) -> str:
        """Return where a chunk lies, for errors."""
        return self.name


def names(*columns: Columns) -> list[str]:
    """Return the names of columns, each once."""
    return list(dict.fromkeys(name for said in columns for name in ([said] if isinstance(said, str) else said)))


def evenly(rows: int, each: int) -> Numbers:
    """Return the sizes of chunks of `each` rows; the last may have fewer."""
    sizes = np.full(-(-rows // each), each, np.int64)
    sizes[-1:] = rows - each * (len(sizes) - 1)
    return sizes


class Ranges(Source):
    """The rows of a reader as samples.

    Args:
        inputs, targets: a column, which is given as a tensor; or several, which are given as a dict.
    """

    loads_parts = True
    keeps_rows: bool | None = False

    def __init__(self, reader: RangeReader, inputs: Columns, targets: Columns) -> None:
        self._reader, self._sides, self.busy = reader, (inputs, targets), Busy()
        self.name, self.in_order = reader.name, reader.in_order
        self.sizes, self.num_bytes = reader.sizes, reader.num_bytes
        if not self.sizes.sum():
            raise ConfigError(f"{self.name}: there is no sample in it")
        self.sample_bytes = int(self.num_bytes.sum()) // int(self.sizes.sum()) + 1
        self.identity = f"{reader.identity}: {inputs}, {targets}"

    def shard_of(self, chunk: int) -> str:
        return self._reader.place(chunk)

    def load(self, chunk: int, wanted: Wanted = ALL) -> Mapping[str, Any]:
        with self.busy.on(self._reader.cause):
            held = self._reader.read(chunk, self._columns(wanted))
        for name, column in held.items():
            if len(column) != self.sizes[chunk]:
                raise DataError(f"{self.shard_of(chunk)}: {name} has {len(column)} rows of {self.sizes[chunk]}")
        return held

    def _columns(self, wanted: Wanted) -> list[str]:
        return names(*(said for said, is_wanted in zip(self._sides, wanted, strict=True) if is_wanted))

    def rows(self, held: Mapping[str, Any], numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        chosen = {name: held[name] for name in self._columns(wanted)}
        if self.keeps_rows:
            rows = ({name: _wide(torch.as_tensor(chosen[name][n])) for name in chosen} for n in numbers.tolist())
            return [wanted.of(self._sides, partial(fields, row)) for row in rows]
        for name, column in chosen.items():
            if isinstance(column, list):
                raise ConfigError(f"{self.name}: rows of {name} differ in length; give Loader lengths=, or pad them")
        return {name: torch.from_numpy(column[numbers]) for name, column in chosen.items()}

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        if self.keeps_rows:
            return wanted.of(zip(*rows, strict=True), list)
        return wanted.of(self._sides, partial(fields, {name: _wide(tensor) for name, tensor in rows.items()}))


def _wide(tensor: Tensor) -> Tensor:
    """Return whole numbers as int64, as the format "torch" of `datasets` does: embeddings and losses take these."""
    return tensor if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor.to(torch.int64)


def arrays(table: Any, columns: Sequence[str], place: str) -> dict[str, Any]:
    """Return columns of an Arrow table as `RangeReader.read` does.

    Raises:
        ConfigError, DataError: a column holds no numbers, or not in each row.
    """
    return {name: _array(table.column(name), f"{place}: column {name}") for name in columns}


def _array(column: Any, told: str) -> NDArray[Any] | list[NDArray[Any]]:
    arrow, compute = need("pyarrow", "a table"), need("pyarrow.compute", "a table")
    types = arrow.types
    is_list = any(test(column.type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    values = compute.list_flatten(column) if is_list else column
    if missing := column.null_count or values.null_count:
        raise DataError(f"{told} has {missing} rows without a value")
    if not any(test(values.type) for test in (types.is_integer, types.is_floating, types.is_boolean)):
        raise ConfigError(f"{told} is {column.type}; must be numbers: map it, or take dataset(...), row by row")
    found: NDArray[Any] = np.array(values.to_numpy())  # a copy: a mapped file may be truncated later
    if not is_list:
        return found
    lengths = compute.list_value_length(column).to_numpy()
    if len(lengths) and (lengths == lengths[0]).all():
        return found.reshape(len(lengths), lengths[0])
    return np.split(found, np.cumsum(lengths)[:-1])
