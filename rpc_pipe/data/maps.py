"""Any map-style dataset, also of another library: the dataset keeps the samples, and the loader gives numbers.

A folder of images is one: one folder a class, decoded by Pillow when they are read.

Samples may draw random numbers, as crops and flips do. The numbers depend on the epoch and the sample alone, because
several workers may each read a part of a sample, such as an image and its mask. Such samples are made on the calling
thread: their generators are the process's, from which layers and the user's loop draw, too.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..dependency import ConfigError, DataError
from ..workers.compute.randomness import preserved, python_state, seed_process
from ..workers.transport.payload import Tree, tensors_of
from .bijection import Numbers, key
from .shards import ShardFile, find_shards, fingerprint
from .source import ALL, Busy, Source, Wanted, fields, need
from .storage import Storage

T = TypeVar("T")

_CHUNKS = 4096

Keys = str | Sequence[str]
Transform = Callable[[Any], Tensor]
#: of files of images
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


def dataset(
    samples: Any,
    *,
    inputs: Keys | None = None,
    targets: Keys | None = None,
    chunk: int | None = None,
    identity: str | None = None,
) -> Source:
    """Return a map-style dataset (`len(samples)`, `samples[i]`) as a source; torch's, `datasets`', grain's alike.

    Args:
        inputs, targets: a key of samples that are dicts, or several keys, whose values are given as a dict; other
            samples are pairs.
        chunk: number of consecutive samples that are cheap to read together, such as the rows of a file; by default all
            samples are equally near, and the shuffle is over all.
        identity: distinguishes datasets of the same length; the class by default.

    Samples may draw from torch's, Python's and numpy's global generators, to crop or to flip. Each sample draws other
    numbers in every epoch, the same on every worker and in a run that is resumed.

    Raises:
        ConfigError: `samples` is no map-style dataset, is empty, or its samples are no pairs.
    """
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(f"dataset {type(samples).__name__}: must have a length and samples[i]; iterable ones do not")
    if len(samples) == 0:
        raise ConfigError(f"dataset {type(samples).__name__}: has no samples")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk}: must be at least 1 sample")
    return Mapped(samples, (inputs, targets), chunk, identity)


class Mapped(Source):
    """A dataset that holds itself."""

    #: makes samples that draw nothing; None: the thread that reads does
    pool: ThreadPoolExecutor | None = None
    keeps_rows = False

    def __init__(
        self, samples: Any, keys: tuple[Any, Any] = (None, None), chunk: int | None = None, identity: str | None = None
    ) -> None:
        self.samples, self.busy, self._keys = samples, Busy(), keys
        self.name = type(samples).__name__
        self.shards = [self.name]
        count = len(samples)
        self.each = chunk or -(-count // _CHUNKS)
        self.sizes = np.full(-(-count // self.each), self.each, np.int64)
        self.sizes[-1] = count - self.each * (len(self.sizes) - 1)
        (first,) = drawn(self.make, [0], 0)
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_of(default_collate([first]))) or 1
        # A dataset without chunks holds its samples itself, so it fits into any memory limit.
        self.num_bytes = self.sizes * self.sample_bytes if chunk else np.ones(len(self.sizes), np.int64)
        self.stored_bytes = count * self.sample_bytes
        self.identity = f"{count} samples of {identity or self.name}"

    def make(self, number: int, wanted: Wanted = ALL) -> tuple[Any, Any]:
        """Return a sample as (inputs, target), as far as wanted."""
        sample = self.samples[number]
        if isinstance(sample, dict):
            try:
                parts = [fields(sample, said) for said in self._keys]
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"dataset {self.name}: its samples have {', '.join(map(repr, sample))}; name inputs= and targets="
                ) from error
        elif isinstance(sample, (tuple, list)) and len(sample) == 2:
            parts = list(sample)
        else:
            raise ConfigError(f"dataset {self.name}: a sample is a {type(sample).__name__}; must be (inputs, target)")
        return wanted.of(parts)

    @cached_property
    def draws(self) -> bool:
        with preserved():
            before, others = torch.get_rng_state(), python_state()
            self.make(0)
            return not torch.equal(before, torch.get_rng_state()) or python_state() != others

    def load(self, chunk: int, wanted: Wanted = ALL) -> int:
        return chunk * self.each

    def rows(self, held: int, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        make, places = partial(self.make, wanted=wanted), (held + numbers).tolist()
        if self.pool is None or keyed is not None:
            pairs = drawn(make, places, keyed)
        else:
            pairs = list(self.pool.map(make, places))
        if self.keeps_rows:
            return pairs
        return wanted.of(zip(*pairs, strict=True), lambda side: default_collate(list(side)))

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        return wanted.of(zip(*rows, strict=True), list) if self.keeps_rows else super().batch(rows, wanted)


def drawn(make: Callable[[int], T], numbers: Iterable[int], keyed: int | None) -> list[T]:
    """Return `make(number)` for each number, with random numbers keyed by `keyed` and the number.

    Args:
        keyed: None: samples draw no random numbers.
    """
    if keyed is None:
        return [make(number) for number in numbers]
    made = []
    with preserved():
        for number in numbers:
            seed_process(key(keyed, number) >> 1)  # generators take 63 bits
            made.append(make(number))
    return made


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
    shards, _ = find_shards(source, IMAGES, storage.options)
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
