"""Parquet files by pyarrow: a chunk is a row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..dependency import ConfigError, DataError
from .data_files import DataFile, Paths, digest, find_files
from .ranges import Columns, RangeReader, Ranges, arrays, names
from .source import Source, need


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


class _Group(NamedTuple):
    file: DataFile
    number: int


class _RowGroups(RangeReader):
    def __init__(self, files: Sequence[DataFile], columns: Sequence[str]) -> None:
        self._groups: list[_Group] = []
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
                    self._groups.append(_Group(file, number))
                    sizes.append(group.num_rows)
                    # Numbers take more bytes in memory than they are stored in.
                    num_bytes.append(sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chosen) + 1)
        self.name = f"{files[0].path}" + f" and {len(files) - 1} more" * (len(files) > 1)
        self.sizes, self.num_bytes = np.array(sizes, np.int64), np.array(num_bytes, np.int64)
        self.identity = f"{len(files)} files, {sum(sizes)} rows, digest {digest(files, sizes)}"

    def place(self, chunk: int) -> str:
        return f"file {self._groups[chunk].file.path}"

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
