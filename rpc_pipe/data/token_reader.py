"""Tokens in a row, `.npy` or raw, read by numpy: the samples of a file are its rows of `context` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..dependency import ConfigError, DataError, refuse_below
from ..workers.transport.payload import Tree
from .data_files import DataFile, Paths, digest, find_files
from .ranges import CHUNK_BYTES, RangeReader, Ranges
from .source import Source, Wanted

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
