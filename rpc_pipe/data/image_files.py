"""A folder of images, one folder a class, decoded by Pillow when they are read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dependency import ConfigError, DataError
from .maps import Mapped
from .shards import ShardFile, find_shards, fingerprint
from .source import ALL, Source, Wanted, need
from .storage import Storage

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")

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
        size: pixels a side after scaling; images are float32 `[rows, 3, size, size]` in 0 … 1.
        transform: makes the tensor of a PIL image instead; all of one shape. It may draw random numbers as the samples
            of `dataset` may; images are then decoded one by one.
        threads: number of decoding threads.

    Raises:
        ConfigError, DataError: there is no image, or neither size nor transform.
    """
    need("PIL.Image", "a folder of images")
    if (size is None) == (transform is None):
        raise ConfigError(f"images {source}: pass size=, pixels of a side, or else transform=, PIL image to tensor")
    storage = storage or Storage()
    shards, _ = find_shards(source, ENDINGS, storage.options)
    found = Images(shards, transform or partial(_scaled, size=size or 0), storage)
    found.name, found.pool = os.fspath(source), ThreadPoolExecutor(threads, "images")
    found.identity = f"{len(shards)} images, {len(found.classes)} classes, digest {fingerprint(shards, size)}"
    return found


def _scaled(image: Any, size: int) -> Tensor:
    pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class Images(Mapped):
    """Files of images, decoded when they are read."""

    def __init__(self, files: Sequence[ShardFile], transform: Transform, storage: Storage) -> None:
        self._transform, self._storage = transform, storage
        folders = [Path(file.name).parts[0] if "/" in file.name else "" for file in files]
        #: names of the classes by number
        self.classes = sorted(set(folders))
        self._labels = np.searchsorted(self.classes, folders).tolist()
        super().__init__(files)
        self.busy, self.shards = storage.busy, [file.name for file in files]
        self.stored_bytes = sum(file.num_bytes for file in files)

    def make(self, number: int, wanted: Wanted = ALL) -> tuple[Any, Any]:
        image = self._decoded(self.samples[number]) if wanted.inputs else None
        return image, self._labels[number] if wanted.targets else None

    def _decoded(self, file: ShardFile) -> Tensor:
        stored = self._storage.use(file, Path.read_bytes)
        try:
            with need("PIL.Image", "a folder of images").open(io.BytesIO(stored)) as image:
                return self._transform(image)
        except Exception as error:  # a decoder or a user's transform may raise any exception
            said = str(error).partition(" <_io.")[0]  # the address of an object in memory does not help the user
            raise DataError(f"image {file.name}: cannot be decoded: {said}") from error
