"""Random numbers keyed by their use, never by the time or place of the draw.

Dropout in layer 3 for microbatch 2 of step 7 draws the same numbers on any worker, in any cut of the model
and in any order; so do initial weights. Other draws while a worker computes (hooks of gradients, functions that
round at random in backward, optimizers that add noise) are keyed by the stage.
"""

import ctypes
import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from .module_state import LOOKS

#: A process has one default generator a device, and one table of cast weights; workers that are threads of one process
#: take turns.
computing = threading.RLock()

#: (unit of the model, number of the operation around the units; 0: the unit) that draws next
Seed = Callable[[int, int], None]
#: bound of the number, drawn by torch, that the generators of Python and numpy are seeded by
PYTHON_SEEDS = 2**32
#: torch's modules that draw random numbers; its other modules do not
_DRAWING = (
    nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, nn.Transformer,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
#: the use of a key
_INITIAL, _FORWARD, _BACKWARD, _BACKWARD_WEIGHTS, _UPDATE, _LOSS = range(6)
_packers = [struct.Struct(f"<{length}q").pack for length in range(8)]
_pack_forward = _packers[5]


class Randomness:
    """The random numbers of a run with one seed. A stage is known by its first layer.

    Args:
        numbered: microbatch -> its number in the whole batch, if processes divide it; each draws as one process does.
    """

    def __init__(
        self, seed: int, device: torch.device | None = None, numbered: Callable[[int], int] | None = None
    ) -> None:
        self.seed, self._numbered = seed, numbered
        self.device = device or torch.device("cpu")
        #: to be held while numbers may be drawn, and while a generator is seeded
        self.lock = computing
        self.generators = _generators(self.device)

    def seed_forward(self, step: int, microbatch: int, layer: int, operation: int = 0) -> None:
        """Let the next draws be the draws of `layer` for `microbatch` of `step`.

        A loss function draws on from where the last layer has stopped.

        Args:
            operation: number of an operation before the layer and outside of all layers; 0: the layer itself.
        """
        if self._numbered is not None:
            microbatch = self._numbered(microbatch)
        if operation:
            self._seed(_FORWARD, step, microbatch, layer, operation)
        else:  # as `_seed` does: this is done for each layer that may draw
            packed = _pack_forward(self.seed, _FORWARD, step, microbatch, layer)
            digest = hashlib.blake2b(packed, digest_size=8).digest()
            for generator in self.generators:
                generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def seed_backward(self, step: int, microbatch: int, layer: int, *, weights: bool = False) -> None:
        """Let the next draws be for a stage's backward; `weights`: for the backward of weights alone."""
        number = microbatch if self._numbered is None else self._numbered(microbatch)
        self._seed(_BACKWARD_WEIGHTS if weights else _BACKWARD, step, number, layer)

    def seed_update(self, update: int, layer: int) -> None:
        """Let the next draws be for a stage's update."""
        self._seed(_UPDATE, update, layer)

    def seed_loss(self, step: int, microbatch: int, *_: int) -> None:
        """Let a loss function's draws from Python's and numpy's generators be separate; see `seed_forward`."""
        number = microbatch if self._numbered is None else self._numbered(microbatch)
        _seed_others(self._number(_LOSS, step, number))

    @contextmanager
    def initial(self, layer: int) -> Iterator[None]:
        """Return a context for `layer` to draw its initial weights; the generators are left as they were."""
        with self.lock, preserved(self.device):
            _seed_others(self._seed(_INITIAL, layer))
            yield

    def _seed(self, *key: int) -> int:
        seed = self._number(*key)
        for generator in self.generators:
            generator.manual_seed(seed)
        return seed

    def _number(self, *key: int) -> int:
        digest = hashlib.blake2b(_packers[1 + len(key)](self.seed, *key), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # generators take 63 bits


def seed_process(seed: int) -> None:
    """Seed the generators that this process has for everybody on the CPU: torch's, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@contextmanager
def preserved(*devices: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were, so that a data loader shuffles alike on every worker."""
    state, place = random.getstate(), _numpy_state()
    legacy = b"" if place is None else ctypes.string_at(*place)
    # Not by `fork_rng`, which takes twice as long: this is around every step.
    generators = {torch.default_generator, *(each for device in devices for each in _generators(device))}
    kept = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, drawn in kept:
            generator.set_state(drawn)
        random.setstate(state)
        if place is not None:
            ctypes.memmove(place[0], legacy, len(legacy))


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of computations on `device`."""
    if device.type == "cpu":
        return [torch.default_generator]
    package = torch.get_device_module(device)
    package.init()
    return [torch.default_generator, package.default_generators[device.index or 0]]


def _numpy_state() -> tuple[int, int] | None:
    """Return address and size of the state of numpy's global generator; None if it is of another kind.

    To get and set it by numpy's functions takes 90 us, as much as all else around a run.
    """
    bits: Any = numpy.random.mtrand._rand._bit_generator
    return (bits.ctypes.state_address, 4 * 625) if type(bits).__name__ == "MT19937" else None


def python_too(seed: Seed) -> Seed:
    """Return a function that seeds as `seed` does, and also the generators of Python and numpy."""

    def all_alike(unit: int, operation: int) -> None:
        seed(unit, operation)
        drawn = int(torch.randint(PYTHON_SEEDS, (), device="cpu").item())
        seed(unit, operation)
        _seed_others(drawn)

    return all_alike


def may_draw(module: nn.Module) -> bool:
    """Return whether a forward may draw random numbers: user's modules, modules with hooks, and dropouts may."""
    return any(
        isinstance(part, _DRAWING)
        or not type(part).__module__.startswith("torch.nn.modules")
        or bool(part._forward_hooks or part._forward_pre_hooks)
        for part in module.modules()
    )


class PythonDraws:
    """Finds out by the first two calls, with gradients and without, whether something draws by Python or numpy."""

    def __init__(self) -> None:
        #: whether gradients are wanted -> calls still to be looked at
        self.looks = {True: LOOKS, False: LOOKS}
        self.found = False
        self._before: Any = None

    def seeding(self, seed: Seed) -> Seed:
        """Return a function that seeds a call as `seed` does, and these generators too, while a call may draw."""
        self.looks[torch.is_grad_enabled()] -= not self.found
        self._before = None
        return self.noting(python_too(seed))

    def noting(self, whole: Seed) -> Seed:
        """Return `whole`, or a function that also records whether anything was drawn since its last call."""
        if self.found:
            return whole

        def seeds(unit: int, operation: int) -> None:
            self.end()
            whole(unit, operation)
            self._before = python_state()

        return seeds

    def end(self) -> None:
        """Note whether anything has been drawn since the call has seeded last."""
        if self._before is not None:
            self.found |= python_state() != self._before
            self._before = None


def python_state() -> tuple[Any, ...]:
    """Return the states of the generators that are not torch's, to compare."""
    of_numpy: Any = numpy.random.get_state()
    _, key, *rest = of_numpy
    return random.getstate(), key.tobytes(), rest
