"""Tokens in a row, `.npy` or raw, memory-mapped chunk by chunk: the samples of a file are its rows of `context` tokens.

A sample is `context` inputs and the `context` targets that are one further on, so neighbours share a token.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from ..dependency import ConfigError, DataError
from .bijection import Numbers
from .shards import Roots, Shard, find_shards, fingerprint, roots_of
from .source import Busy, Cause, Chunk, Filling, Source, Wanted
from .storage import Storage

ENDINGS = (".npy", ".bin", ".u8", ".u16", ".u32")
_RAW = {".u8": "uint8", ".u16": "uint16", ".u32": "uint32"}
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
#: of a file that is larger, so many bytes are a chunk
CHUNK_BYTES = 64 * 10**6


class Span(NamedTuple):
    """Tokens in a row of a shard: a chunk."""

    shard: Shard
    dtype: np.dtype[Any]
    #: byte at which the first token begins
    offset: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.dtype.itemsize


def tokens(
    source: Roots,
    context: int,
    *,
    dtype: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    storage: Storage | None = None,
) -> Source:
    """Return tokens as samples of `context` inputs and targets, int64 `[rows, context]` each.

    Args:
        source: files, folders or patterns, here or as URLs: `.npy` of one dimension, or raw little-endian numbers.
        dtype: of raw files; by default the index's, or what `.u8`, `.u16` and `.u32` say, or uint16.
        chunk_bytes: how much of a larger file is loaded at once.

    Raises:
        ConfigError, DataError: there is no such file, or one that holds no tokens.
    """
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"context {context!r}: must be a whole number of tokens, at least 1")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: must be one of {', '.join(_DTYPES)}")
    storage = storage or Storage()
    shards, index = find_shards(source, ENDINGS, storage.options)
    whole = [_span(shard, dtype, index, storage) for shard in shards]
    spans = [piece for span in whole for piece in cut(span, context, chunk_bytes)]
    if not spans:
        raise ConfigError(f"data {', '.join(roots_of(source))}: no file has the {context + 1} tokens of a sample")
    return Tokens(", ".join(roots_of(source)), spans, context, storage)


def cut(span: Span, context: int, chunk_bytes: int) -> list[Span]:
    """Cut a span into chunks between samples; tokens at its end that make no sample are left out."""
    samples = (span.num_tokens - 1) // context
    each = max(1, chunk_bytes // (context * span.dtype.itemsize))
    return [
        Span(
            span.shard,
            span.dtype,
            span.offset + first * context * span.dtype.itemsize,
            min(each, samples - first) * context + 1,
        )
        for first in range(0, samples, each)
    ]


def _span(shard: Shard, dtype: str | None, index: dict[str, Any], storage: Storage) -> Span:
    if not shard.name.lower().endswith(".npy"):
        named = dtype or index.get("dtype") or _RAW.get(os.path.splitext(shard.name)[1].lower(), "uint16")
        kind = _little_endian(named)
        if shard.num_bytes % kind.itemsize:
            raise DataError(
                f"shard {shard.name}: {shard.num_bytes} bytes are no whole number of {named}: "
                "it is truncated, or dtype is wrong"
            )
        return Span(shard, kind, 0, shard.num_bytes // kind.itemsize)
    if shard.num_tokens is not None:
        kind = _little_endian(index["dtype"])
        return Span(shard, kind, shard.num_bytes - shard.num_tokens * kind.itemsize, shard.num_tokens)
    shape, kind, offset = storage.look(shard, lambda file: _npy_header(file, shard))
    if len(shape) != 1 or kind.kind not in "ui":
        raise ConfigError(f"shard {shard.name}: is {kind} of shape {shape}; tokens are whole numbers of one dimension")
    span = Span(shard, kind, offset, shape[0])
    if offset + span.num_bytes > shard.num_bytes:
        raise DataError(
            f"shard {shard.name}: is truncated: {shard.num_bytes} bytes, but its header says {offset + span.num_bytes}"
        )
    return span


@cache
def _little_endian(named: str) -> np.dtype[Any]:
    return np.dtype(named).newbyteorder("<")


def _npy_header(file: BinaryIO, shard: Shard) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, type and where the numbers begin."""
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, kind = read(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"shard {shard.name}: is no .npy file, or a truncated one: {error}") from error
    return shape, kind, file.tell()


class Tokens(Source):
    """Spans of tokens."""

    def __init__(self, name: str, spans: Sequence[Span], context: int, storage: Storage) -> None:
        self.name, self.context = name, context
        self._spans, self._storage = spans, storage
        shards = list({span.shard.name: span.shard for span in spans}.values())
        self.shards = [shard.name for shard in shards]
        self.sizes = np.array([(span.num_tokens - 1) // context for span in spans], np.int64)
        self.num_bytes = np.array([span.num_bytes for span in spans], np.int64)
        self.stored_bytes = sum(shard.num_bytes for shard in shards)
        self.sample_bytes = 16 * context
        digest = fingerprint(shards, context, [(s.dtype.str, s.offset, s.num_tokens) for s in spans])
        self.identity = f"{len(shards)} shards, {int(self.sizes.sum())} samples of {context} tokens, digest {digest}"
        self._verified: set[str] = set()
        kinds = {span.dtype for span in spans}
        #: what tokens of all spans fit into
        self._dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.int64)

    def filling(self, rows: int, wanted: Wanted) -> Filling:
        return TokenRows(np.empty((rows, self.context + 1), self._dtype), wanted)

    def shard_of(self, chunk: int) -> str:
        return self._spans[chunk].shard.name

    def upcoming(self, chunks: Sequence[int]) -> None:
        self._storage.upcoming(list(dict.fromkeys(self._spans[chunk].shard for chunk in chunks)))

    def load(self, chunk: int, busy: Busy) -> Chunk:
        span = self._spans[chunk]
        loaded = self._storage.use(span.shard, busy, lambda path: TokenChunk(path, span, self.context))
        if span.shard.checksum is not None and span.shard.name not in self._verified:
            with busy.on("disk"):
                loaded.verify()
            self._verified.add(span.shard.name)
        return loaded


class TokenRows(Filling):
    """A batch of tokens: copied as they are stored, and made into wider numbers at once."""

    def __init__(self, rows: NDArray[Any], wanted: Wanted) -> None:
        self._rows, self._wanted = rows, wanted

    def put(self, chunk: Chunk, numbers: Numbers, places: Numbers) -> None:
        assert isinstance(chunk, TokenChunk)
        self._rows[places] = chunk.rows(numbers)

    def made(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            torch.from_numpy(self._rows[:, :-1].astype(np.int64)) if self._wanted.inputs else None,
            torch.from_numpy(self._rows[:, 1:].astype(np.int64)) if self._wanted.targets else None,
        )


class TokenChunk(Chunk):
    """Mapped tokens, which can be read at once: what the kernel has not brought into memory yet it does then."""

    cause: Cause = "disk"

    def __init__(self, path: Path, span: Span, context: int) -> None:
        self._span, self._path = span, path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"shard {span.shard.name}: {path} cannot be opened: {error.strerror}") from error
        try:
            self._seen = self._stat()
            start = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            self._map = mmap.mmap(self._file, span.offset + span.num_bytes - start, prot=mmap.PROT_READ, offset=start)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, DataError) or not isinstance(error, (OSError, ValueError)):
                raise
            raise DataError(f"shard {span.shard.name}: {path} cannot be mapped: {error}") from error
        self._tokens = np.frombuffer(self._map, span.dtype, span.num_tokens, span.offset - start)
        step = span.dtype.itemsize
        rows = (span.num_tokens - 1) // context
        self._rows = np.lib.stride_tricks.as_strided(
            self._tokens, (rows, context + 1), (context * step, step), writeable=False
        )

    def _stat(self) -> tuple[int, int]:
        """Return size and time of change; reading a mapped file that has become shorter would kill the process."""
        stat = os.fstat(self._file)
        if stat.st_size < self._span.offset + self._span.num_bytes:
            raise DataError(
                f"shard {self._span.shard.name}: {self._path} has become truncated: {stat.st_size} bytes, "
                f"but {self._span.offset + self._span.num_bytes} are needed"
            )
        return stat.st_size, stat.st_mtime_ns

    def warm(self) -> None:
        with suppress(AttributeError, DataError, OSError):  # closed meanwhile; or truncated, which `read` will tell
            tokens = self._tokens
            self._stat()
            os.posix_fadvise(self._file, self._span.offset, self._span.num_bytes, os.POSIX_FADV_WILLNEED)
            np.bitwise_or.reduce(tokens.view(np.uint8)[:: mmap.PAGESIZE])  # other threads go on meanwhile
            self.cause = "decode"

    def verify(self) -> None:
        """Compare the shard with its checksum."""
        value, at = 0, 0
        while at < self._span.shard.num_bytes:
            block = os.pread(self._file, 2**22, at)
            if not block:
                break
            value, at = zlib.crc32(block, value), at + len(block)
        if value != self._span.shard.checksum:
            raise DataError(
                f"shard {self._span.shard.name}: its checksum is {value:08x}, the index says "
                f"{self._span.shard.checksum:08x}: the file is damaged; bring it back, or pack it again"
            )

    def rows(self, numbers: Numbers) -> NDArray[Any]:
        """Return the tokens of these samples, each with the one behind it, as they are stored.

        Raises:
            DataError: the shard has changed since the chunk was loaded.
        """
        if self._stat() != self._seen:
            raise DataError(f"shard {self._span.shard.name}: {self._path} was written to while it is in use")
        found: NDArray[Any] = self._rows[numbers]
        return found

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        return TokenRows(self.rows(numbers), wanted).made()

    def close(self) -> None:
        del self._rows, self._tokens
        with suppress(BufferError):  # `warm` still looks at it, and lets go of it
            self._map.close()
        os.close(self._file)
