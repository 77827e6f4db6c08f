"""Rows that other libraries store: Parquet by pyarrow, tokens by numpy, and datasets of Hugging Face's `datasets`.

A file that is written to in a run is refused, by its size and time.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError, refuse_below
from ..system.files import refuse_special, refused
from ..workers.transport.payload import Tree
from .source import CHUNK_BYTES, Columns, RangeReader, Ranges, Source, Wanted, arrays, evenly, names, need

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: bytes of a place that a digest reads, and the number of places in all files: all of 32 MB, and samples of more
_PLACE, _PLACES = 2**16, 512


class DataFile(NamedTuple):
    """A file as it was when it was found."""

    path: Path
    num_bytes: int
    modified_ns: int

    def refuse_changed(self) -> None:
        """Raise DataError if the file is no longer there, or was written to."""
        with refused(DataError, f"file {self.path}: cannot be read"):
            stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise DataError(f"file {self.path}: was written to after it was found; begin with the new data")

    def numbers(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        """Return `count` numbers from a byte on, as a copy: a mapped file that is truncated would kill the process.

        Raises:
            DataError: the file was written to, or cannot be read.
        """
        self.refuse_changed()
        with refused(DataError, f"file {self.path}: cannot be read"):
            found: NDArray[Any] = np.fromfile(self.path, dtype, count, offset=offset)
        if len(found) < count:
            raise DataError(f"file {self.path}: has become truncated; restore it")
        return found


def find_files(source: Paths, *endings: str) -> list[DataFile]:
    """Return the files of `source` in the given order; the files of a folder are in order of their names.

    Raises:
        ConfigError: there is none, or one is no file.
        DataError: one cannot be read.
    """
    found: list[DataFile] = []
    for root in map(Path, [source] if isinstance(source, (str, os.PathLike)) else source):
        with refused(DataError, f"data {root}: cannot be read"):
            several = (each for each in root.iterdir() if each.suffix.lower() in endings) if root.is_dir() else (root,)
            for path in sorted(several):
                if path.suffix.lower() not in endings:
                    raise ConfigError(f"data {path}: must end in {', '.join(endings)}, which say how it is read")
                refuse_special(path, f"data {path}")
                stat = path.stat()
                found.append(DataFile(path, stat.st_size, stat.st_mtime_ns))
    if not found:
        raise ConfigError(f"data {source}: there are no files that end in {', '.join(endings)}")
    return found


def digest(files: Sequence[DataFile], *more: object) -> str:
    """Return a digest of names, sizes and contents; of more than 32 MB 512 places are read."""
    value = zlib.crc32(repr(more).encode())
    each = max(2, _PLACES // len(files))
    read = {file.path for file in files[:: max(1, each * len(files) // _PLACES)]}
    for path, num_bytes, _ in files:
        value = zlib.crc32(f"{path.name} {num_bytes}\n".encode(), value)
        count, last = min(each, -(-num_bytes // _PLACE)), max(0, num_bytes - _PLACE)
        with refused(DataError, f"file {path}: cannot be read"), path.open("rb") as opened:
            for number in range(count if path in read else 0):
                opened.seek(last * number // max(1, count - 1))
                value = zlib.crc32(opened.read(_PLACE), value)
    return f"{value:08x}"


def parquet(files: Paths, inputs: Columns, targets: Columns) -> Source:
    """Return the rows of Parquet files as samples.

    Columns are numbers, `[rows]`, or lists of numbers, `[rows, length]`.

    Args:
        files: a file, a folder with some, or several files.
        inputs, targets: a column, which is given as a tensor; or several, which are given as a dict.

    Raises:
        ConfigError, DataError: there is no such file or column.
    """
    return Ranges(_RowGroups(find_files(files, ".parquet"), names(inputs, targets)), inputs, targets)


class _RowGroups(RangeReader):
    def __init__(self, files: Sequence[DataFile], columns: Sequence[str]) -> None:
        self._groups: list[tuple[DataFile, int]] = []
        sizes, num_bytes = [], []
        for file in files:
            with _opened(file) as opened:
                if missing := set(columns) - set(opened.schema_arrow.names):
                    has = ", ".join(opened.schema_arrow.names)
                    raise ConfigError(f"file {file.path}: has no column {min(missing)}; it has {has}")
                for number in range(opened.num_row_groups):
                    group = opened.metadata.row_group(number)
                    every = [group.column(i) for i in range(group.num_columns)]
                    chosen = [each for each in every if each.path_in_schema.split(".")[0] in columns]
                    self._groups.append((file, number))
                    sizes.append(group.num_rows)
                    # Numbers take more bytes in memory than they are stored in.
                    num_bytes.append(sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chosen) + 1)
        self.name = f"{files[0].path}" + f" and {len(files) - 1} more" * (len(files) > 1)
        self.sizes, self.num_bytes = np.array(sizes, np.int64), np.array(num_bytes, np.int64)
        self.identity = f"{len(files)} files, {sum(sizes)} rows, digest {digest(files, sizes)}"

    def place(self, chunk: int) -> str:
        return f"file {self._groups[chunk][0].path}"

    def read(self, chunk: int, columns: Sequence[str]) -> dict[str, Any]:
        file, number = self._groups[chunk]
        with _opened(file) as opened:
            return arrays(opened.read_row_group(number, columns=columns, use_threads=False), columns, self.place(chunk))


@contextmanager
def _opened(file: DataFile) -> Iterator[Any]:
    """Give a file, and turn an error of pyarrow into a sentence."""
    file.refuse_changed()
    try:
        yield need("pyarrow.parquet", "a Parquet file").ParquetFile(file.path)
    except (need("pyarrow", "a Parquet file").ArrowException, OSError) as error:
        told = str(error).split("\n")[0]
        raise DataError(f"file {file.path}: cannot be read, it may be truncated: {told}") from error


_RAW = {".bin": "uint16", ".u8": "uint8", ".u16": "uint16", ".u32": "uint32"}
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def tokens(files: Paths, context: int, *, dtype: str | None = None, chunk_bytes: int = CHUNK_BYTES) -> Source:
    """Return tokens as samples of `context` inputs, and as targets the same shifted by one; int64 `[rows, context]`.

    Args:
        files: `.npy` of one dimension, or raw little-endian numbers; a file, a folder with some, or several files.
        dtype: of raw files; by default by the ending `.u8`, `.u16` or `.u32`, or uint16.
        chunk_bytes: bytes of a file that are loaded at once.

    Raises:
        ConfigError, DataError: there is no such file, or a file holds no tokens.
    """
    refuse_below(1, context=context)
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype={dtype}: must be one of {', '.join(_DTYPES)}")
    return _Shifted(_Spans(find_files(files, ".npy", *_RAW), context, dtype, chunk_bytes), "tokens", "tokens")


class _Spans(RangeReader):
    def __init__(self, files: Sequence[DataFile], context: int, dtype: str | None, chunk_bytes: int) -> None:
        forms = [(file, *_form(file, dtype)) for file in files]
        self._context, self._dtype = context, forms[0][1]
        for file, kind, *_ in forms:
            if kind != self._dtype or kind.name not in _DTYPES:
                raise ConfigError(f"file {file.path}: tokens are {kind}; all must be one of {', '.join(_DTYPES)}")
        row = context * self._dtype.itemsize
        each = max(1, chunk_bytes // row)
        #: of each chunk its file, the byte where it begins, and its number of tokens
        self._spans = [
            (file, offset + first * row, min(each, samples - first) * context + 1)
            for file, _, offset, count in forms
            for samples in [(count - 1) // context]
            for first in range(0, samples, each)
        ]
        self.sizes = np.array([count // context for *_, count in self._spans], np.int64)
        self.num_bytes = self.sizes * row + self._dtype.itemsize
        self.name = f"{files[0].path}" + f" and {len(files) - 1} more" * (len(files) > 1)
        self.identity = f"{self.sizes.sum()} samples of {context} {kind} tokens, {digest(files, context, chunk_bytes)}"

    def place(self, chunk: int) -> str:
        return f"file {self._spans[chunk][0].path}"

    def read(self, chunk: int, columns: Sequence[str]) -> dict[str, Any]:
        file, *where = self._spans[chunk]
        found = file.numbers(self._dtype, *where)
        return {"tokens": np.lib.stride_tricks.sliding_window_view(found, self._context + 1)[:: self._context]}


class _Shifted(Ranges):
    keeps_rows = None

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return the tokens of a batch, which are made into wider numbers at once."""
        held = rows["tokens"]
        return wanted.of((held[:, :-1], held[:, 1:]), lambda part: part.to(torch.int64, copy=True))


def _form(file: DataFile, dtype: str | None) -> tuple[np.dtype[Any], int, int]:
    """Return the type of a file's tokens, the byte where they begin, and their number."""
    if file.path.suffix.lower() == ".npy":
        try:
            held = np.load(file.path, mmap_mode="r")
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"file {file.path}: is no .npy file, or a truncated one: {error}") from error
        if held.ndim != 1:
            raise ConfigError(f"file {file.path}: has the shape {held.shape}; tokens have one dimension")
        return held.dtype, held.offset, len(held)
    kind = np.dtype(dtype or _RAW[file.path.suffix.lower()]).newbyteorder("<")
    if file.num_bytes % kind.itemsize:
        raise DataError(f"file {file.path}: is truncated, or not {kind}: has {file.num_bytes} bytes")
    return kind, 0, file.num_bytes // kind.itemsize


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
