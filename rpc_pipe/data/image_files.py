"""A folder of images, one folder a class, decoded by Pillow; a chunk is some files, read as they are stored."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dependency import ConfigError, DataError
from .bijection import Numbers
from .drawing import drawn, draws
from .shards import ShardFile, find_shards, fingerprint
from .source import Busy, Chunk, Source, Wanted, need
from .storage import Storage

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
#: files of a chunk have about so many bytes, and are at most so many; of few files there are about so many chunks, as
#: those of a folder, which are of one class, should lie in several
_CHUNK_BYTES, _CHUNK_FILES, _CHUNKS = 8 * 10**6, 1024, 512

Transform = Callable[[Any], Tensor]


def images(
    source: str | os.PathLike[str],
    *,
    size: int | None = None,
    transform: Transform | None = None,
    threads: int = 4,
    storage: Storage | None = None,
) -> Source:
    """Return the images below `source` as samples: (image, number of its folder).

    Args:
        source: a folder with a folder for each class, here or as a URL; classes are numbered by name.
        size: images are scaled to so many pixels a side, float32 `[rows, 3, size, size]` in 0 … 1.
        transform: makes the tensor of a PIL image instead; all of one shape. It may draw random numbers as the samples
            of `dataset` may; images are then decoded one by one.
        threads: that decode.

    Raises:
        ConfigError, DataError: there is no image, or neither size nor transform.
    """
    need("PIL.Image", "a folder of images")
    if (size is None) == (transform is None):
        raise ConfigError(f"images {source}: pass size=, pixels of a side, or else transform=, PIL image to tensor")
    storage = storage or Storage()
    shards, _ = find_shards(source, ENDINGS, storage.options)
    return Images(os.fspath(source), shards, transform or _scaled(size or 0), size, threads, storage)


def _scaled(size: int) -> Transform:
    def scale(image: Any) -> Tensor:
        pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    return scale


class Images(Source):
    """Files of images."""

    lets_go = True

    def __init__(
        self,
        name: str,
        shards: Sequence[ShardFile],
        transform: Transform,
        size: int | None,
        threads: int,
        storage: Storage,
    ) -> None:
        self.name, self._files, self._transform, self._storage = name, shards, transform, storage
        self.shards = [shard.name for shard in shards]
        folders = [Path(shard.name).parts[0] if "/" in shard.name else "" for shard in shards]
        #: names of the classes by number
        self.classes = sorted(set(folders))
        numbers = {folder: number for number, folder in enumerate(self.classes)}
        self._labels = np.array([numbers[folder] for folder in folders], np.int64)
        stored = np.array([shard.num_bytes for shard in shards], np.int64)
        self._starts = _grouped(stored)
        self.sizes = np.diff(self._starts)
        ends = np.concatenate(([0], np.cumsum(stored)))
        self.num_bytes = np.diff(ends[self._starts])
        self.stored_bytes = int(stored.sum())
        self.sample_bytes = 12 * size * size if size else 12 * 224 * 224
        digest = fingerprint(shards, size, self._starts.tolist())
        self.identity = f"{len(shards)} images, {len(self.classes)} classes, digest {digest}"
        self._given = size is None
        self._pool = ThreadPoolExecutor(threads, "images")

    @cached_property
    def draws(self) -> bool:
        return self._given and draws(lambda: self.decode(0, self._stored(0, Busy())))

    def shard_of(self, chunk: int) -> str:
        return self.shards[int(self._starts[chunk])]

    def load(self, chunk: int, busy: Busy) -> Chunk:
        first, last = int(self._starts[chunk]), int(self._starts[chunk + 1])
        return ImageChunk(self, first, [self._stored(number, busy) for number in range(first, last)])

    def _stored(self, number: int, busy: Busy) -> bytes:
        """Return what is in a file."""
        shard = self._files[number]
        with busy.on("disk"):
            try:
                return self._storage.use(shard, busy, Path.read_bytes)
            except OSError as error:
                raise DataError(f"image {shard.name}: cannot be read: {error.strerror}") from error

    def decode(self, number: int, stored: bytes) -> Tensor:
        """Return the image of a file as a tensor."""
        pillow = need("PIL.Image", "a folder of images")
        try:
            with pillow.open(io.BytesIO(stored)) as image:
                return self._transform(image)
        except Exception as error:  # decoders raise what they like, and so may a user's transform
            said = str(error).partition(" <_io.")[0]  # which object in memory tells nobody anything
            raise DataError(f"image {self.shards[number]}: cannot be decoded: {said}") from error

    def rows(
        self, first: int, stored: Sequence[bytes], numbers: Numbers, wanted: Wanted, keyed: int | None
    ) -> tuple[Any, Any]:
        """Return images and labels."""
        labels = torch.from_numpy(self._labels[first + numbers]) if wanted.targets else None
        if not wanted.inputs:
            return None, labels
        if keyed is not None:
            places = (first + numbers).tolist()
            return torch.stack(drawn(lambda place: self.decode(place, stored[place - first]), places, keyed)), labels
        pixels = self._pool.map(lambda n: self.decode(first + n, stored[n]), numbers.tolist())
        return torch.stack(list(pixels)), labels

    def close(self) -> None:
        """Threads end by themselves; the source may be read again."""


def _grouped(sizes: Numbers) -> Numbers:
    """Return where chunks of about equal bytes begin, and the end of the last."""
    starts, size, count = [0], 0, 0
    most = min(_CHUNK_FILES, -(-len(sizes) // _CHUNKS))
    for number, each in enumerate(sizes.tolist()):
        if count and (size + each > _CHUNK_BYTES or count == most):
            starts.append(number)
            size = count = 0
        size, count = size + each, count + 1
    return np.array([*starts, len(sizes)], np.int64)


class ImageChunk(Chunk):
    """Files as they are stored."""

    def __init__(self, source: Images, first: int, stored: list[bytes]) -> None:
        self._source, self._first, self._stored = source, first, stored
        self._shares: dict[int, Numbers] = {}

    def deal(self, shares: Iterator[tuple[int, Numbers]]) -> None:
        self._shares = dict(shares)
        kept = {number for numbers in self._shares.values() for number in numbers.tolist()}
        self._stored = [file if number in kept else b"" for number, file in enumerate(self._stored)]

    def go_to(self, block: int) -> None:
        for behind in [number for number in self._shares if number < block]:
            for number in self._shares.pop(behind).tolist():
                self._stored[number] = b""

    def read(self, numbers: Numbers, wanted: Wanted) -> tuple[Any, Any]:
        return self._source.rows(self._first, self._stored, numbers, wanted, self.keyed)
