"""Tokens in a row, `.npy` or raw, memory-mapped chunk by chunk: the samples of a file are its rows of `context` tokens.

A sample is `context` inputs and the `context` targets that are one further on, so neighbours share a token.
"""

from __future__ import annotations

import io
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from ..dependency import ConfigError, DataError, refuse_below
from .bijection import Numbers
from .shards import Roots, ShardFile, find_shards, fingerprint, roots_of
from .source import Busy, Cause, Chunk, Filling, Source, Wanted
from .storage import Storage, checksum

ENDINGS = (".npy", ".bin", ".u8", ".u16", ".u32")
_RAW = {".u8": "uint8", ".u16": "uint16", ".u32": "uint32"}
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
#: of a file that is larger, so many bytes are a chunk
CHUNK_BYTES = 64 * 10**6
#: chunks below so many bytes are read, not mapped: there may be more of them than a process may have files open
_MAPPED_BYTES = 4 * 10**6
#: files of a chunk that is mapped, and those that others may have open
_FILES, _OTHER_FILES = 2, 512
#: of a usual .npy header
_HEADER_BYTES = 128


class TokenSpan(NamedTuple):
    """Tokens in a row of a shard: a chunk."""

    shard: ShardFile
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
    refuse_below(1, context=context)
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: must be one of {', '.join(_DTYPES)}")
    storage = storage or Storage()
    shards, index = find_shards(source, ENDINGS, storage.options)
    whole = [_span(shard, dtype, index, storage) for shard in shards]
    spans = [piece for span in whole for piece in cut(span, context, chunk_bytes)]
    if not spans:
        raise ConfigError(f"data {', '.join(roots_of(source))}: no file has the {context + 1} tokens of a sample")
    return Tokens(", ".join(roots_of(source)), spans, context, storage)


def cut(span: TokenSpan, context: int, chunk_bytes: int) -> list[TokenSpan]:
    """Cut a span into chunks between samples; tokens at its end that make no sample are left out."""
    samples = (span.num_tokens - 1) // context
    each = max(1, chunk_bytes // (context * span.dtype.itemsize))
    return [
        TokenSpan(
            span.shard,
            span.dtype,
            span.offset + first * context * span.dtype.itemsize,
            min(each, samples - first) * context + 1,
        )
        for first in range(0, samples, each)
    ]


def _span(shard: ShardFile, dtype: str | None, index: dict[str, Any], storage: Storage) -> TokenSpan:
    if not shard.name.lower().endswith(".npy"):
        named = dtype or index.get("dtype") or _RAW.get(os.path.splitext(shard.name)[1].lower(), "uint16")
        kind = _little_endian(named)
        if shard.num_bytes % kind.itemsize:
            raise DataError(
                f"shard {shard.name}: {shard.num_bytes} bytes are no whole number of {named}: "
                "it is truncated, or dtype is wrong"
            )
        return TokenSpan(shard, kind, 0, shard.num_bytes // kind.itemsize)
    if shard.num_tokens is not None:
        kind = _little_endian(index["dtype"])
        return TokenSpan(shard, kind, shard.num_bytes - shard.num_tokens * kind.itemsize, shard.num_tokens)
    shape, kind, offset = storage.look(shard, lambda file: _npy_header(file, shard))
    if len(shape) != 1 or kind.kind not in "ui":
        raise ConfigError(f"shard {shard.name}: is {kind} of shape {shape}; tokens are whole numbers of one dimension")
    span = TokenSpan(shard, kind, offset, shape[0])
    if offset + span.num_bytes > shard.num_bytes:
        raise DataError(
            f"shard {shard.name}: is truncated: {shard.num_bytes} bytes, but its header says {offset + span.num_bytes}"
        )
    return span


@cache
def _little_endian(named: str) -> np.dtype[Any]:
    return np.dtype(named).newbyteorder("<")


def _npy_header(file: BinaryIO, shard: ShardFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, type and where the numbers begin."""
    with suppress(ValueError, EOFError):
        return _parsed(file.read(_HEADER_BYTES))
    file.seek(0)
    try:
        return _header(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"shard {shard.name}: is no .npy file, or a truncated one: {error}") from error


@lru_cache(1024)
def _parsed(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return what a header says, which thousands of shards may have alike."""
    return _header(io.BytesIO(header))


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, kind = read(file)
    return shape, kind, file.tell()


class Tokens(Source):
    """Spans of tokens."""

    def __init__(self, name: str, spans: Sequence[TokenSpan], context: int, storage: Storage) -> None:
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
        _allow_files(_FILES * int((self.num_bytes >= _MAPPED_BYTES).sum()))
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

        def opened(path: Path) -> Chunk:
            with busy.on("disk"):
                if span.shard.checksum is not None and span.shard.name not in self._verified:
                    _verify(path, span.shard)
                    self._verified.add(span.shard.name)
                return (ReadTokens if span.num_bytes < _MAPPED_BYTES else MappedTokens)(path, span, self.context)

        return self._storage.use(span.shard, busy, opened)


def _verify(path: Path, shard: ShardFile) -> None:
    found = checksum(path)
    if found != shard.checksum:
        raise DataError(
            f"shard {shard.name}: its checksum is {found:08x}, the index says {shard.checksum:08x}: "
            "the file is damaged; restore it, or pack it again"
        )


def _allow_files(count: int) -> None:
    """Let the process have so many files open beside others, as far as the system does."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES if most == resource.RLIM_INFINITY else min(count + _OTHER_FILES, most)
    if allowed not in (resource.RLIM_INFINITY, most) and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class TokenRows(Filling):
    """A batch of tokens: copied as they are stored, and made into wider numbers at once."""

    def __init__(self, rows: NDArray[Any], wanted: Wanted) -> None:
        self._rows, self._wanted = rows, wanted

    def put(self, chunk: Chunk, numbers: Numbers, places: Numbers) -> None:
        assert isinstance(chunk, ReadTokens)
        self._rows[places] = chunk.rows(numbers)

    def made(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            torch.from_numpy(self._rows[:, :-1].astype(np.int64)) if self._wanted.inputs else None,
            torch.from_numpy(self._rows[:, 1:].astype(np.int64)) if self._wanted.targets else None,
        )


class ReadTokens(Chunk):
    """Tokens in memory."""

    def __init__(self, path: Path, span: TokenSpan, context: int) -> None:
        self._span, self._path = span, path
        self._tokens: NDArray[Any] = self._opened()
        step = span.dtype.itemsize
        rows = (span.num_tokens - 1) // context
        self._rows = np.lib.stride_tricks.as_strided(
            self._tokens, (rows, context + 1), (context * step, step), writeable=False
        )

    def _opened(self) -> NDArray[Any]:
        span = self._span
        try:
            with open(self._path, "rb", buffering=0) as file:
                content = os.pread(file.fileno(), span.num_bytes, span.offset)
        except OSError as error:
            raise self._unreadable("opened", error) from error
        if len(content) < span.num_bytes:
            raise self._truncated(span.offset + len(content))
        return np.frombuffer(content, span.dtype)

    def _unreadable(self, how: str, error: Exception) -> DataError:
        said = getattr(error, "strerror", None) or error
        return DataError(f"shard {self._span.shard.name}: {self._path} cannot be {how}: {said}")

    def _truncated(self, num_bytes: int) -> DataError:
        needed = self._span.offset + self._span.num_bytes
        text = f"{self._path} has become truncated: {num_bytes} bytes, but {needed} are needed"
        return DataError(f"shard {self._span.shard.name}: {text}")

    def rows(self, numbers: Numbers) -> NDArray[Any]:
        """Return the tokens of these samples, each with the one behind it, as they are stored.

        Raises:
            DataError: the shard has changed since the chunk was loaded.
        """
        found: NDArray[Any] = self._rows[numbers]
        return found

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        return TokenRows(self.rows(numbers), wanted).made()

    def close(self) -> None:
        del self._rows, self._tokens


class MappedTokens(ReadTokens):
    """Mapped tokens, which can be read at once: what the kernel has not brought into memory yet it does then."""

    cause: Cause = "disk"

    def _opened(self) -> NDArray[Any]:
        span = self._span
        try:
            self._file = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable("opened", error) from error
        try:
            self._seen = self._stat()
            start = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            self._map = mmap.mmap(self._file, span.offset + span.num_bytes - start, prot=mmap.PROT_READ, offset=start)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, DataError) or not isinstance(error, (OSError, ValueError)):
                raise
            raise self._unreadable("mapped", error) from error
        return np.frombuffer(self._map, span.dtype, span.num_tokens, span.offset - start)

    def _stat(self) -> tuple[int, int]:
        """Return size and time of change; reading a mapped file that has become shorter would kill the process."""
        stat = os.fstat(self._file)
        if stat.st_size < self._span.offset + self._span.num_bytes:
            raise self._truncated(stat.st_size)
        return stat.st_size, stat.st_mtime_ns

    def warm(self) -> None:
        with suppress(AttributeError, DataError, OSError):  # closed meanwhile; or truncated, which `read` will tell
            tokens = self._tokens
            self._stat()
            os.posix_fadvise(self._file, self._span.offset, self._span.num_bytes, os.POSIX_FADV_WILLNEED)
            np.bitwise_or.reduce(tokens.view(np.uint8)[:: mmap.PAGESIZE])  # other threads go on meanwhile
            self.cause = "decode"

    def rows(self, numbers: Numbers) -> NDArray[Any]:
        if self._stat() != self._seen:
            raise DataError(f"shard {self._span.shard.name}: {self._path} was written to while it is in use")
        return super().rows(numbers)

    def close(self) -> None:
        super().close()
        with suppress(BufferError):  # `warm` still looks at it, and lets go of it
            self._map.close()
        os.close(self._file)
