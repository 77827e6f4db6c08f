"""Documents of text files, JSON lines and tables, from any place in them on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import ConfigError, DataError
from .shards import ShardFile
from .source import need
from .storage import Storage

ENDINGS = (".jsonl", ".txt", ".md", ".py", ".json", ".parquet")
#: text files are read in pieces of about so many bytes
_PIECE = 2**20


class Document(NamedTuple):
    """A text, or a piece of one."""

    #: which file, and where in it: a byte, or a row of a table
    file: int
    at: int
    text: bytes
    #: whether the text ends here
    ends: bool
    #: bytes of the file that are behind, for progress
    behind: int


def documents(files: Sequence[ShardFile], storage: Storage, field: str, file: int, at: int) -> Iterator[Document]:
    """Yield what the files hold from a place on.

    Args:
        field: of a JSON object, or the column of a table, that has the text.
    """
    for number in range(file, len(files)):
        shard = files[number]
        path = storage.local(shard)
        start = at if number == file else 0
        try:
            if shard.name.lower().endswith(".jsonl"):
                yield from _lines(path, shard, field, number, start)
            elif shard.name.lower().endswith(".parquet"):
                yield from _rows(path, shard, field, number, start)
            else:
                yield from _pieces(path, number, start)
        except OSError as error:
            raise DataError(f"shard {shard.name}: {path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path, shard: ShardFile, field: str, number: int, at: int) -> Iterator[Document]:
    with path.open("rb") as file:
        file.seek(at)
        for line in file:
            begin, at = at, at + len(line)
            if line.isspace():
                continue
            try:
                encoded = json.loads(line.decode("utf-8-sig"))[field].encode()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"shard {shard.name}: the line at byte {begin} is no JSON object with a text {field!r}"
                ) from error
            yield Document(number, begin, encoded, True, at)


def _pieces(path: Path, number: int, at: int) -> Iterator[Document]:
    """Cut a long text behind lines."""
    with path.open("rb") as file:
        file.seek(at)
        while piece := file.read(_PIECE):
            piece += file.readline()
            yield Document(number, at, piece, not file.peek(1), at + len(piece))
            at += len(piece)


def _rows(path: Path, shard: ShardFile, field: str, number: int, at: int) -> Iterator[Document]:
    arrow = need("pyarrow", f"shard {shard.name}")
    try:
        table = need("pyarrow.parquet", f"shard {shard.name}").ParquetFile(path)
        yield from _texts(table, shard, field, number, at)
    except arrow.ArrowException as error:
        told = str(error).split("\n")[0]
        raise DataError(f"shard {shard.name}: cannot be read, it may be truncated: {told}") from error


def _texts(table: Any, shard: ShardFile, field: str, number: int, at: int) -> Iterator[Document]:
    if field not in table.schema_arrow.names:
        raise ConfigError(f"shard {shard.name}: has no column {field!r}; it has {', '.join(table.schema_arrow.names)}")
    row = 0
    for group in range(table.metadata.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows > at:
            for inside, text in enumerate(table.read_row_group(group, columns=[field])[field].to_pylist()):
                if text is not None and not isinstance(text, str):
                    raise ConfigError(f"shard {shard.name}: column {field!r} has a {type(text).__name__}; must be text")
                if row + inside >= at and text is not None:
                    behind = shard.num_bytes * (row + inside + 1) // max(1, table.metadata.num_rows)
                    yield Document(number, row + inside, text.encode(), True, behind)
        row += rows
