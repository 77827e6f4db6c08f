"""Text as bytes, from files or Python's standard library, and the bigram model that a real model must beat."""

import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data.source import Source, dataset
from ..dependency import ConfigError
from ..system.sizes import format_bytes

#: bytes of a chunk of the text, about: small, so that both splits come from all of it
_CHUNK = 16384
#: every worker holds all of the text
_MOST_BYTES = 10**9

Batch = tuple[Tensor, Tensor]
#: one chunk in this number is held out
HELD_OUT_EVERY = 10


class Corpus:
    """A text as bytes: the training samples one by one, and the split that is held out.

    Args:
        data: a file, a folder, or None for the standard library's sources.
        context: bytes that a sample has, besides the one to be predicted last.

    Raises:
        ConfigError: the text is missing, unreadable or too short.
    """

    def __init__(self, data: str | None, context: int) -> None:
        text = read_text(data, context)
        self.num_bytes, self.context = len(text), context
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.chunk = min(max(_CHUNK, context + 1), len(text) // HELD_OUT_EVERY)
        chunks = range(len(text) // self.chunk)
        self.held_out = [i for i in chunks if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
        self.training = [i for i in chunks if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        self._identity = f"text {zlib.crc32(text):08x}"
        runs = (range(i, min(i + HELD_OUT_EVERY - 1, self.training[-1] + 1)) for i in self.training[::9])
        self._starts = [
            run.start * self.chunk + k * self.context
            for run in runs
            for k in range((len(run) * self.chunk - 1) // self.context)
        ]

    def samples(self) -> Source:
        """Return the training samples: (bytes, next bytes), each int64 `[rows, context]`."""
        return dataset(self, identity=self._identity)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Batch:
        inputs, targets = self.rows([self._starts[number]])
        return inputs[0], targets[0]

    def rows(self, starts: Sequence[int]) -> Batch:
        """Return the samples that begin at these bytes."""
        samples = torch.stack([self.text[start : start + self.context + 1] for start in starts]).long()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def held_out_batches(self, rows: int, batches: int) -> Iterator[Batch]:
        """Yield samples of the held-out split, from all of it alike."""
        per_chunk = (self.chunk - 1) // self.context
        starts = [i * self.chunk + k * self.context for i in self.held_out for k in range(per_chunk)]
        wanted = min(rows * batches, len(starts))
        chosen = [starts[i * len(starts) // wanted] for i in range(wanted)]
        for at in range(0, wanted, rows):
            yield self.rows(chosen[at : at + rows])

    def bigram_loss(self, batches: Iterator[Batch]) -> float:
        """Return nats a byte of a byte bigram model on `batches`, counted on the training split (add 0.1)."""
        counts = torch.zeros(256 * 256, dtype=torch.int64)
        for i in self.training:
            chunk = self.text[i * self.chunk : (i + 1) * self.chunk].long()
            counts += torch.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
        smoothed = counts.view(256, 256).double() + 0.1
        nats = -(smoothed / smoothed.sum(1, keepdim=True)).log()
        losses = torch.cat([nats[inputs, targets].flatten() for inputs, targets in batches])
        return float(losses.mean())


def default_text() -> list[Path]:
    """Return the sources of Python's standard library, which lie on every machine."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    found: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - skipped
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def read_text(data: str | None, context: int) -> bytearray:
    """Return the bytes of the files that `--data` names, one behind the other.

    Raises:
        ConfigError: there is nothing readable, too much, or too little for samples of `context` bytes.
    """
    text = bytearray()
    if data is None:
        files = default_text()
    elif (path := Path(data)).is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = [path]
    try:
        for name in files:
            with name.open("rb") as file:
                text += file.read(_MOST_BYTES - len(text) + 1)
            if len(text) > _MOST_BYTES:
                most = format_bytes(_MOST_BYTES)
                raise ConfigError(f"--data {data}: has more than {most}; rpc_pipe.data is for more")
    except OSError as error:
        raise ConfigError(f"--data {error.filename}: cannot be read: {error.strerror}") from error
    if len(text) < (least := HELD_OUT_EVERY * (context + 1)):
        told_data = "" if data is None else f"--data {data}, "
        need = f"samples and a held-out tenth need at least {least} bytes of text; there are {len(text)}"
        raise ConfigError(f"{told_data}--context {context}: {need}")
    return text
