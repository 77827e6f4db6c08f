"""Arrow and Parquet: a chunk is a row group of a Parquet file, or a record batch of an Arrow file, by pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError
from ..workers.transport.payload import Tree
from .bijection import Numbers
from .shards import Roots, ShardFile, find_shards, fingerprint, roots_of
from .source import ALL, Busy, Chunk, Source, Wanted, among, need
from .storage import Storage

ENDINGS = (".parquet", ".arrow", ".feather")

Columns = str | Sequence[str]
#: of each column, its type and how many numbers a row has on average
Form = tuple[tuple[str, float], ...]

#: stands for all blocks
_ALL = -1
#: bytes of a row's number
_ROW = 8


@dataclass(frozen=True)
class Group:
    """Rows that lie together in a shard: a chunk."""

    shard: ShardFile
    number: int
    rows: int
    num_bytes: int
    #: rows of one group are equally long
    form: Form = ()


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
    opened = [_groups(shard, storage, columns) for shard in shards]
    groups = [group for found in opened for group in found]
    if not sum(group.rows for group in groups):
        raise ConfigError(f"data {', '.join(roots_of(source))}: the files have no rows")
    return Table(", ".join(roots_of(source)), groups, inputs, targets, storage)


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _opened(place: Path | BinaryIO, shard: ShardFile) -> Any:
    """Return a Parquet file, or the record batches of an Arrow file, which is mapped."""
    with _told(shard):
        if shard.name.lower().endswith(".parquet"):
            return need("pyarrow.parquet", f"shard {shard.name}").ParquetFile(place)
        return _Batches(place, shard)


@contextmanager
def _told(shard: ShardFile) -> Iterator[None]:
    """Turn what pyarrow raises into a sentence."""
    arrow = need("pyarrow", f"shard {shard.name}")
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"shard {shard.name}: cannot be read, it may be truncated: {_first(error)}") from error


class _Batches:
    """The record batches of an Arrow file, one at a time: those that are stored compressed take memory when read."""

    def __init__(self, place: Path | BinaryIO, shard: ShardFile) -> None:
        arrow = need("pyarrow", f"shard {shard.name}")
        self._shard = shard
        file = arrow.memory_map(str(place)) if isinstance(place, Path) else arrow.PythonFile(place)
        self._has_index = True
        try:
            self._batches: Any = arrow.ipc.open_file(file)
        except arrow.ArrowInvalid:  # the form without an index at its end, which `datasets` writes
            file.seek(0)
            self._has_index, self._batches = False, arrow.ipc.open_stream(file)
        self.schema_arrow = self._batches.schema

    def __iter__(self) -> Iterator[Any]:
        with _told(self._shard):
            if self._has_index:
                yield from map(self._batches.get_batch, range(self._batches.num_record_batches))
            else:
                yield from self._batches

    def at(self, number: int) -> Any:
        """Return one of them."""
        return self._batches.get_batch(number) if self._has_index else next(islice(self, number, None))


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0]


def element_of(kind: Any) -> Any:
    """Return the type of what a column's lists hold, or its own if it has none."""
    types = need("pyarrow", "a table").types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if lists else kind


def schema_of(shard: ShardFile, storage: Storage) -> Any:
    """Return the Arrow schema of a file."""
    return storage.look(shard, lambda file: _opened(_place(file), shard).schema_arrow)


def _place(file: BinaryIO) -> Path | BinaryIO:
    """Return the path of a local file, which can be mapped, or else the file."""
    return Path(file.name) if isinstance(file, io.BufferedReader) and isinstance(file.name, str) else file


def _groups(shard: ShardFile, storage: Storage, columns: Sequence[str]) -> list[Group]:
    return storage.look(shard, lambda file: _listed_groups(_opened(_place(file), shard), shard, columns))


def _listed_groups(file: Any, shard: ShardFile, columns: Sequence[str]) -> list[Group]:
    names = file.schema_arrow.names
    for column in columns:
        if column not in names:
            raise ConfigError(f"shard {shard.name}: has no column {column!r}; it has {', '.join(map(repr, names))}")
    if isinstance(file, _Batches):
        found = [(batch.num_rows, batch.select(columns).nbytes, _batch_form(batch, columns)) for batch in file]
    else:
        kinds = {name: str(file.schema_arrow.field(name).type) for name in columns}
        metadata = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        found = [(group.num_rows, *_decoded(group, kinds)) for group in metadata]
    return [Group(shard, number, rows, size + _ROW * rows + 1, form) for number, (rows, size, form) in enumerate(found)]


def _batch_form(batch: Any, columns: Sequence[str]) -> Form:
    """Return the form of the rows of a record batch."""
    chosen = [batch.column(name) for name in columns]
    counts = [len(column.flatten() if "list" in str(column.type) else column) for column in chosen]
    return tuple(
        [(str(column.type), count / max(1, batch.num_rows)) for column, count in zip(chosen, counts, strict=True)]
    )


def _decoded(group: Any, kinds: Mapping[str, str]) -> tuple[int, Form]:
    """Return about how many bytes columns of a row group take in memory, which may be more than is stored, and their
    form."""
    every = [group.column(i) for i in range(group.num_columns)]
    chosen = [(column.path_in_schema.split(".")[0], column) for column in every]
    chosen = [(name, column) for name, column in chosen if name in kinds]
    form = tuple((kinds[name], column.num_values / max(1, group.num_rows)) for name, column in chosen)
    return sum(max(column.total_uncompressed_size, 8 * column.num_values) for _, column in chosen), form


def _rows(path: Path, group: Group, columns: Sequence[str]) -> Any:
    """Return the rows of a group, as pyarrow has them."""
    arrow = need("pyarrow", f"shard {group.shard.name}")
    file = _opened(path, group.shard)
    try:
        if isinstance(file, _Batches):
            return arrow.Table.from_batches([file.at(group.number).select(columns)])
        return file.read_row_group(group.number, columns=columns, use_threads=False)
    except (arrow.ArrowException, OSError, IndexError, StopIteration) as error:
        text = f"rows of group {group.number} cannot be read, it may be truncated: {_first(error)}"
        raise DataError(f"shard {group.shard.name}: {text}") from error


class Table(Source):
    """Row groups."""

    lets_go = loads_fields = True

    def __init__(self, name: str, groups: Sequence[Group], inputs: Columns, targets: Columns, storage: Storage) -> None:
        self.name = name
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

    @property
    def uniform(self) -> bool:
        return len({group.form for group in self._groups if group.rows}) == 1

    def load(self, chunk: int, busy: Busy) -> Chunk:
        return self.load_fields(chunk, busy, ALL)

    def load_fields(self, chunk: int, busy: Busy, wanted: Wanted) -> Chunk:
        group = self._groups[chunk]
        pairs = (self._inputs, wanted.inputs), (self._targets, wanted.targets)
        columns = list(dict.fromkeys(column for said, some in pairs for column in among(_listed(said), some)))
        with busy.on("disk"):
            rows = self._storage.use(group.shard, busy, lambda path: _rows(path, group, columns))
        if rows.num_rows != group.rows:
            raise DataError(
                f"shard {group.shard.name}: group {group.number} has {rows.num_rows} rows, but had {group.rows} when "
                "it was listed"
            )
        with busy.on("decode"):
            mapped = not group.shard.name.lower().endswith(".parquet")
            return TableChunk({name: _numbers(rows[name], name, group.shard, mapped) for name in columns}, self)

    def pick(self, columns: dict[str, NDArray[Any]], rows: Numbers, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return inputs and targets of some rows, as far as wanted: a tensor, or a dict where there are several."""
        parts = (self._inputs, wanted.inputs), (self._targets, wanted.targets)
        chosen = [among(_listed(said), some) for said, some in parts]
        made = {name: torch.from_numpy(columns[name][rows]) for name in {*chosen[0], *chosen[1]}}
        inputs, targets = (
            None if not names else made[said] if isinstance(said, str) else {name: made[name] for name in names}
            for (said, _), names in zip(parts, chosen, strict=True)
        )
        return inputs, targets


def _numbers(column: Any, name: str, shard: ShardFile, mapped: bool) -> NDArray[Any]:
    """Return a column as an array; of a mapped file a copy: to read one that has become shorter kills the process."""
    arrow = need("pyarrow", "a table")
    joined = column.combine_chunks()
    kind = joined.type
    lists = element_of(kind) is not kind
    values = joined.flatten() if lists else joined
    if missing := column.null_count or values.null_count:
        raise DataError(f"shard {shard.name}: column {name!r} has {missing} rows without a value")
    if not (arrow.types.is_integer(values.type) or arrow.types.is_floating(values.type)):
        raise ConfigError(
            f"shard {shard.name}: column {name!r} is {kind}; must be numbers or lists of numbers: "
            "make tokens of text with rpc-pipe data pack"
        )
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if mapped:
        found = found.copy()
    if not lists:
        return found
    length = len(found) // max(1, len(joined))
    sizes = np.diff(joined.offsets.to_numpy()) if hasattr(joined, "offsets") else np.full(len(joined), length)
    if (sizes != length).any():
        raise ConfigError(
            f"shard {shard.name}: column {name!r} has lists of {sizes.min()} to {sizes.max()} numbers; "
            "rows of a batch must be equally long: pad or pack them"
        )
    return found.reshape(len(joined), length)


class TableChunk(Chunk):
    """Columns of a row group, by the block in which their rows are read; a block of their own if they stay."""

    def __init__(self, columns: dict[str, NDArray[Any]], source: Table) -> None:
        self._source = source
        #: of each block, its rows, if they are not all, and their columns
        self._shares: dict[int, tuple[Numbers | None, dict[str, NDArray[Any]]]] = {_ALL: (None, columns)}
        self._block = _ALL

    def deal(self, shares: Iterator[tuple[int, Numbers]]) -> None:
        _, columns = self._shares.pop(_ALL)
        for block, rows in shares:
            self._shares[block] = rows, {name: column[rows] for name, column in columns.items()}

    def go_to(self, block: int) -> None:
        if _ALL not in self._shares:
            self._block = block
            for behind in [number for number in self._shares if number < block]:
                del self._shares[behind]

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tree, Tree]:
        rows, columns = self._shares[self._block]
        where = numbers if rows is None else np.searchsorted(rows, numbers)
        return self._source.pick(columns, where, wanted)
