"""Text as bytes, memory-mapped, with a held-out split, and the bigram model that a real model must beat."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..data.shards import ShardFile
from ..data.source import Source
from ..data.storage import Storage
from ..data.token_files import Tokens, TokenSpan
from .text import HELD_OUT_EVERY, find_text

#: the text is cut into chunks of about so many bytes, so that both splits are spread over all of it
_CHUNK = 16384

Batch = tuple[Tensor, Tensor]


class Corpus:
    """A text as bytes.

    Args:
        data: a file, a folder, or None for the standard library's sources.
        context: bytes that a sample has, besides the one to be predicted last.

    Raises:
        ConfigError: the text is missing, unreadable or too short.
    """

    def __init__(self, data: str | None, context: int) -> None:
        self._path = path = find_text(data, context)
        size = path.stat().st_size
        self.context = context
        self.chunk = min(max(_CHUNK, context + 1), size // HELD_OUT_EVERY)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._num_chunks = size // self.chunk
        chunks = range(self._num_chunks)
        self.held_out = [i for i in chunks if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
        self.training = [i for i in chunks if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        self.num_bytes = size

    def samples(self) -> Source:
        """Return the training samples: (bytes, next bytes), each int64 `[rows, context]`."""
        # By its bytes alone: files of several are joined under a name that depends on when they were written.
        shard = ShardFile("text", str(self._path), self.num_bytes)
        runs = (range(i, min(i + HELD_OUT_EVERY - 1, self._num_chunks)) for i in self._run_starts())
        spans = [TokenSpan(shard, np.dtype(np.uint8), run.start * self.chunk, len(run) * self.chunk) for run in runs]
        return Tokens(str(self._path), spans, self.context, Storage())

    def _run_starts(self) -> range:
        """Return the first of each run of chunks between those that are held out."""
        return range(0, self._num_chunks, HELD_OUT_EVERY)

    def held_out_batches(self, rows: int, batches: int) -> Iterator[Batch]:
        """Yield samples of the held-out split, evenly spread over it."""
        per_chunk = (self.chunk - 1) // self.context
        starts = [i * self.chunk + k * self.context for i in self.held_out for k in range(per_chunk)]
        wanted = min(rows * batches, len(starts))
        chosen = [starts[i * len(starts) // wanted] for i in range(wanted)]
        for at in range(0, wanted, rows):
            yield self._samples(chosen[at : at + rows])

    def _samples(self, starts: list[int]) -> Batch:
        samples = torch.stack([self._bytes[start : start + self.context + 1] for start in starts]).long()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def bigram_loss(self, batches: Iterator[Batch]) -> float:
        """Return nats a byte of a byte bigram model on `batches`, counted on the training split (add 0.1)."""
        counts = torch.zeros(256 * 256, dtype=torch.int64)
        for i in self.training:
            chunk = self._bytes[i * self.chunk : (i + 1) * self.chunk].long()
            counts += torch.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
        smoothed = counts.view(256, 256).double() + 0.1
        nats = -(smoothed / smoothed.sum(1, keepdim=True)).log()
        losses = torch.cat([nats[inputs, targets].flatten() for inputs, targets in batches])
        return float(losses.mean())
