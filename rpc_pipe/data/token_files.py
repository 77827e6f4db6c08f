"""Tokens in a row, `.npy` or raw, read chunk by chunk: the samples of a file are its rows of `context` tokens.

A sample is `context` inputs and the `context` targets that are one further on, so neighbours share a token.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError, refuse_below
from ..workers.transport.payload import Tree
from .bijection import Numbers
from .shards import Roots, ShardFile, find_shards, fingerprint, roots_of
from .source import ALL, Source, Wanted
from .storage import Storage, checksum

ENDINGS = (".npy", ".bin", ".u8", ".u16", ".u32")
_RAW = {".u8": "uint8", ".u16": "uint16", ".u32": "uint32"}
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
#: bytes of a chunk of a larger file
CHUNK_BYTES = 64 * 10**6
#: least bytes of a chunk that is mapped, which takes an open file each
_MAPPED_BYTES = 16 * 10**6


class TokenSpan(NamedTuple):
    """Tokens in a row of a shard: a chunk."""

    shard: ShardFile
    dtype: np.dtype[Any]
    #: byte where the first token begins
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
        dtype: of raw files; by default the index's, or the one of the ending `.u8`, `.u16` or `.u32`, or uint16.
        chunk_bytes: bytes of a larger file that are loaded at once.

    Raises:
        ConfigError, DataError: there is no such file, or a file holds no tokens.
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
    places = [(first * context, min(each, samples - first) * context + 1) for first in range(0, samples, each)]
    return [span._replace(offset=span.offset + at * span.dtype.itemsize, num_tokens=count) for at, count in places]


def _span(shard: ShardFile, dtype: str | None, index: dict[str, Any], storage: Storage) -> TokenSpan:
    if not shard.name.lower().endswith(".npy"):
        named = dtype or index.get("dtype") or _RAW.get(os.path.splitext(shard.name)[1].lower(), "uint16")
        kind = np.dtype(named).newbyteorder("<")
        if shard.num_bytes % kind.itemsize:
            raise DataError(f"shard {shard.name}: is truncated, or not {named}: has {shard.num_bytes} bytes")
        return TokenSpan(shard, kind, 0, shard.num_bytes // kind.itemsize)
    if shard.num_tokens is not None:
        kind = np.dtype(index["dtype"]).newbyteorder("<")
        return TokenSpan(shard, kind, shard.num_bytes - shard.num_tokens * kind.itemsize, shard.num_tokens)
    shape, kind, offset = storage.look(shard, lambda file: _npy_header(file, shard))
    if len(shape) != 1 or kind.kind not in "ui":
        raise ConfigError(f"shard {shard.name}: is {kind} of shape {shape}; tokens are whole numbers of one dimension")
    span = TokenSpan(shard, kind, offset, shape[0])
    if offset + span.num_bytes > shard.num_bytes:
        raise DataError(f"shard {shard.name}: is truncated: {shard.num_bytes} bytes of {offset + span.num_bytes}")
    return span


def _npy_header(file: BinaryIO, shard: ShardFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, type and where the numbers begin."""
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, _, kind = read(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"shard {shard.name}: is no .npy file, or a truncated one: {error}") from error
    return shape, kind, file.tell()


class HeldTokens(NamedTuple):
    """A chunk in memory."""

    #: of each its tokens and the one behind it
    samples: NDArray[Any]
    shard: str
    path: Path
    #: when the file had been written to, if it is mapped
    mapped_ns: int


class Tokens(Source):
    """Spans of tokens."""

    def __init__(self, name: str, spans: Sequence[TokenSpan], context: int, storage: Storage) -> None:
        self.name, self.busy = name, storage.busy
        self._spans, self._context, self._storage = spans, context, storage
        shards = list({span.shard.name: span.shard for span in spans}.values())
        self.shards = [shard.name for shard in shards]
        self.sizes = np.array([(span.num_tokens - 1) // context for span in spans], np.int64)
        self.num_bytes = np.array([span.num_bytes for span in spans], np.int64)
        self.stored_bytes = sum(shard.num_bytes for shard in shards)
        self.sample_bytes = 16 * context
        digest = fingerprint(shards, context, [(s.dtype.str, s.offset, s.num_tokens) for s in spans])
        self.identity = f"{len(shards)} shards, {int(self.sizes.sum())} samples of {context} tokens, digest {digest}"
        self._verified: set[str] = set()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        kinds = {span.dtype.newbyteorder("=") for span in spans}
        #: the dtype that fits the tokens of all spans, and that torch computes with
        self._dtype = kinds.pop() if len(kinds) == 1 and np.dtype(np.uint64) not in kinds else np.dtype(np.int64)

    def shard_of(self, chunk: int) -> str:
        return self._spans[chunk].shard.name

    def load(self, chunk: int, wanted: Wanted = ALL) -> HeldTokens:
        """Return the tokens as they are stored; many are mapped, so that a batch waits for the rows that it has."""
        span = self._spans[chunk]

        def read(path: Path) -> HeldTokens:
            if span.shard.checksum is not None and span.shard.name not in self._verified:
                if checksum(path) != span.shard.checksum:
                    raise DataError(f"shard {span.shard.name}: its checksum differs from the index; restore it")
                self._verified.add(span.shard.name)
            stat = path.stat()
            if span.num_bytes < _MAPPED_BYTES or stat.st_size < span.offset + span.num_bytes:
                tokens = np.fromfile(path, span.dtype, span.num_tokens, offset=span.offset)
                if len(tokens) < span.num_tokens:
                    raise DataError(f"shard {span.shard.name}: {path} has become truncated; restore it")
                return HeldTokens(self._rows_of(tokens), span.shard.name, path, 0)
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), span.offset, span.num_bytes, os.POSIX_FADV_WILLNEED)
                tokens = np.memmap(file, span.dtype, "r", span.offset, (span.num_tokens,))
            return HeldTokens(self._rows_of(np.asarray(tokens)), span.shard.name, path, stat.st_mtime_ns)

        return self._storage.use(span.shard, read)

    def _rows_of(self, tokens: NDArray[Any]) -> NDArray[Any]:
        return np.lib.stride_tricks.sliding_window_view(tokens, self._context + 1)[:: self._context]

    def rows(self, held: HeldTokens, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        """Return the tokens of these samples.

        Raises:
            DataError: the shard was written to since it was mapped; reading truncated pages would kill the process.
        """
        with suppress(FileNotFoundError):  # a process that has mapped the file keeps its contents
            if held.mapped_ns and held.path.stat().st_mtime_ns != held.mapped_ns:
                raise DataError(f"shard {held.shard}: {held.path} was written to while it is in use")
        return torch.from_numpy(held.samples[numbers].astype(self._dtype, copy=False))

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return the tokens of a batch, which are made into wider numbers at once."""
        return wanted.of((rows[:, :-1], rows[:, 1:]), lambda tokens: tokens.to(torch.int64, copy=True))
