"""Random numbers keyed by what they are for, never by when or where they are drawn.

Dropout in layer 3 for microbatch 2 of step 7 draws the same numbers on any worker, in any cut of the model
and in any order; so do initial weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: A process has one default generator a device; layers of several workers in one process take turns.
_generator_lock = threading.Lock()


def _seed_from(*key: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # generators take 63 bits


class Randomness:
    """The random numbers of a run with one seed."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self.device = device or torch.device("cpu")
        #: to be held while numbers are drawn
        self.lock = _generator_lock

    def seed_forward(self, step: int, microbatch: int, layer: int) -> None:
        """Let what is drawn next be what `layer` draws for `microbatch` of `step`. The lock is the caller's."""
        self._seed(_seed_from(self.seed, 1, step, microbatch, layer))

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    @contextmanager
    def initial(self, layer: int) -> Iterator[None]:
        """Return a context in which `layer` draws its initial weights, and leaves the caller's generators as found."""
        seed = _seed_from(self.seed, 0, layer)
        with self.lock, preserved(self.device):
            self._seed(seed)
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)
            yield


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were, so that a data loader shuffles alike on every worker."""
    state, place = random.getstate(), _numpy_state()
    legacy = b"" if place is None else ctypes.string_at(*place)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state)
        if place is not None:
            ctypes.memmove(place[0], legacy, len(legacy))


def _numpy_state() -> tuple[int, int] | None:
    """Return address and size of the state of numpy's global generator, None if nobody can have drawn from it.

    To get and set it by numpy's own functions takes 90 us, as much as all else around a run.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    bits = numpy.random.mtrand._rand._bit_generator
    return (bits.ctypes.state_address, 4 * 625) if type(bits).__name__ == "MT19937" else None
