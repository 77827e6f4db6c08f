"""Arrow and Parquet: a chunk is a row group of a Parquet file, or a record batch of an Arrow file, by pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError
from ..workers.transport.payload import Tree
from .bijection import Numbers
from .shards import Roots, ShardFile, find_shards, fingerprint, roots_of
from .source import ALL, Source, Wanted, fields, need
from .storage import Storage

ENDINGS = (".parquet", ".arrow", ".feather")

Columns = str | Sequence[str]

#: bytes of a row's number
_ROW = 8


class Group(NamedTuple):
    """Rows that lie together in a shard: a chunk."""

    shard: ShardFile
    number: int
    rows: int
    num_bytes: int


def table(source: Roots, inputs: Columns, targets: Columns, *, storage: Storage | None = None) -> Source:
    """Return the rows of Parquet or Arrow files as samples.

    A column of numbers becomes `[rows]`, one of lists of equal length `[rows, length]`.

    Args:
        source: files, folders or patterns, here or as URLs; `.parquet`, or `.arrow` and `.feather` files.
        inputs, targets: a column, which is given as a tensor; or several, which are given as a dict.

    Raises:
        ConfigError, DataError: there is no such file or column.
    """
    need("pyarrow", "a table")
    storage = storage or Storage()
    shards, _ = find_shards(source, ENDINGS, storage.options)
    columns = list(dict.fromkeys([*_listed(inputs), *_listed(targets)]))
    groups = [group for shard in shards for group in _groups(shard, storage, columns)]
    if not sum(group.rows for group in groups):
        raise ConfigError(f"data {', '.join(roots_of(source))}: the files have no rows")
    return Table(", ".join(roots_of(source)), groups, inputs, targets, storage)


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


class _ParquetFile:
    def __init__(self, place: Path | BinaryIO) -> None:
        self._file = need("pyarrow.parquet", "a table").ParquetFile(place)
        self.schema = self._file.schema_arrow

    def groups(self, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield rows, and bytes in memory, which may be more than are stored."""
        for number in range(self._file.num_row_groups):
            group = self._file.metadata.row_group(number)
            every = [group.column(i) for i in range(group.num_columns)]
            chosen = [each for each in every if each.path_in_schema.split(".")[0] in columns]
            yield group.num_rows, sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chosen)

    def read(self, number: int, columns: Sequence[str]) -> Any:
        return self._file.read_row_group(number, columns=columns, use_threads=False)


class _ArrowFile:
    """A file whose record batches are read one at a time; compressed batches take memory when they are read."""

    def __init__(self, place: Path | BinaryIO) -> None:
        arrow = need("pyarrow", "a table")
        file = arrow.memory_map(str(place)) if isinstance(place, Path) else arrow.PythonFile(place)
        self._has_index = True
        try:
            self._file: Any = arrow.ipc.open_file(file)
        except arrow.ArrowInvalid:  # the form without an index at its end, which `datasets` writes
            file.seek(0)
            self._has_index, self._file = False, arrow.ipc.open_stream(file)
        self.schema = self._file.schema

    def _batches(self) -> Iterable[Any]:
        return map(self._file.get_batch, range(self._file.num_record_batches)) if self._has_index else self._file

    def groups(self, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield rows and bytes in memory."""
        for batch in self._batches():
            yield batch.num_rows, batch.select(columns).nbytes

    def read(self, number: int, columns: Sequence[str]) -> Any:
        batch = self._file.get_batch(number) if self._has_index else next(islice(self._batches(), number, None))
        return batch.select(columns)


@contextmanager
def opened(place: Path | BinaryIO, shard: ShardFile) -> Iterator[_ParquetFile | _ArrowFile]:
    """Give a file, and turn an error of pyarrow into a sentence."""
    arrow = need("pyarrow", "a table")
    if isinstance(place, io.BufferedReader):  # of this machine, which can be mapped
        place = Path(place.name)
    try:
        yield (_ParquetFile if shard.name.lower().endswith(".parquet") else _ArrowFile)(place)
    except (arrow.ArrowException, OSError, IndexError, StopIteration) as error:
        told = str(error).split("\n")[0]
        raise DataError(f"shard {shard.name}: cannot be read, it may be truncated: {told}") from error


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list."""
    types = need("pyarrow", "a table").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_numeric(kind: Any) -> bool:
    """Return whether an Arrow type is a number, or a list of numbers."""
    types, element = need("pyarrow", "a table").types, kind.value_type if is_list(kind) else kind
    return bool(types.is_integer(element) or types.is_floating(element))


def schema_of(shard: ShardFile, storage: Storage) -> Any:
    """Return the Arrow schema of a file."""

    def look(place: BinaryIO) -> Any:
        with opened(place, shard) as file:
            return file.schema

    return storage.look(shard, look)


def _groups(shard: ShardFile, storage: Storage, columns: Sequence[str]) -> list[Group]:
    """Return the groups of a shard; only its metadata are read."""

    def look(place: BinaryIO) -> list[Group]:
        with opened(place, shard) as file:
            names = file.schema.names
            for column in columns:
                if column not in names:
                    raise ConfigError(f"shard {shard.name}: has no column {column!r}; it has {', '.join(names)}")
            groups = enumerate(file.groups(columns))
            return [Group(shard, number, rows, size + _ROW * rows + 1) for number, (rows, size) in groups]

    return storage.look(shard, look)


class Table(Source):
    """Row groups."""

    loads_parts = True

    def __init__(self, name: str, groups: Sequence[Group], inputs: Columns, targets: Columns, storage: Storage) -> None:
        self.name, self.busy = name, storage.busy
        self._groups, self._inputs, self._targets, self._storage = groups, inputs, targets, storage
        shards = list({group.shard.name: group.shard for group in groups}.values())
        self.shards = [shard.name for shard in shards]
        self.sizes = np.array([group.rows for group in groups], np.int64)
        self.num_bytes = np.array([group.num_bytes for group in groups], np.int64)
        self.stored_bytes = sum(shard.num_bytes for shard in shards)
        samples = int(self.sizes.sum())
        self.sample_bytes = int(self.num_bytes.sum()) // samples + 1
        digest = fingerprint(shards, inputs, targets, self.sizes.tolist())
        self.identity = f"{len(shards)} shards, {samples} rows, digest {digest}"

    def shard_of(self, chunk: int) -> str:
        return self._groups[chunk].shard.name

    def load(self, chunk: int, wanted: Wanted = ALL) -> dict[str, NDArray[Any]]:
        """Return the columns of a row group that are wanted."""
        group, columns = self._groups[chunk], self._columns(wanted)

        def read(path: Path) -> Any:
            with opened(path, group.shard) as file:
                return file.read(group.number, columns)

        rows = self._storage.use(group.shard, read)
        if rows.num_rows != group.rows:
            raise DataError(f"shard {group.shard.name}: group {group.number} has {rows.num_rows} rows of {group.rows}")
        with self.busy.on("decode"):
            return {name: _numbers(rows.column(name), name, group.shard) for name in columns}

    def rows(self, held: dict[str, NDArray[Any]], numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        return {name: torch.from_numpy(held[name][numbers]) for name in self._columns(wanted)}

    def _columns(self, wanted: Wanted) -> list[str]:
        """Return which columns are wanted, each once."""
        sides = wanted.of((self._inputs, self._targets), _listed)
        return list(dict.fromkeys(name for columns in sides for name in columns or ()))

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return inputs and targets, as far as wanted: a tensor, or a dict where there are several."""
        return wanted.of((self._inputs, self._targets), partial(fields, rows))


def _numbers(column: Any, name: str, shard: ShardFile) -> NDArray[Any]:
    """Return a column as a copy: reading a mapped file that was truncated since kills the process."""
    compute = need("pyarrow.compute", "a table")
    values = compute.list_flatten(column) if is_list(column.type) else column
    if missing := column.null_count or values.null_count:
        raise DataError(f"shard {shard.name}: column {name!r} has {missing} rows without a value")
    if not is_numeric(column.type):
        raise ConfigError(f"shard {shard.name}: column {name!r} is {column.type}; must be numbers (rpc-pipe data pack)")
    found: NDArray[Any] = np.array(values.to_numpy(zero_copy_only=False))
    if values is column:
        return found
    least, most = compute.min_max(compute.list_value_length(column)).as_py().values()
    if least != most:
        raise ConfigError(f"shard {shard.name}: column {name!r} has lists of {least} to {most}; pad or pack them")
    return found.reshape(len(column), least or 0)
