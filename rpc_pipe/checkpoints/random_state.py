"""The process's own random generators, which data loaders draw from, as tensors by name."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor

_PREFIX = "random."


def random_state() -> dict[str, Tensor]:
    """Return the states of the generators of torch's CPU, of Python and of numpy."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    texts = {
        "python": json.dumps([version, numbers, gauss]),
        "numpy": json.dumps([name, numpy.asarray(keys).tolist(), position, has_gauss, cached]),
    }
    found = {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()}
    return {_PREFIX + name: state for name, state in ({"torch": torch.get_rng_state()} | found).items()}


NAMES = [f"{_PREFIX}{name}" for name in ("torch", "python", "numpy")]


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators where `random_state` found them."""
    torch.set_rng_state(states[_PREFIX + "torch"])
    version, numbers, gauss = json.loads(bytes(states[_PREFIX + "python"].tolist()))
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(json.loads(bytes(states[_PREFIX + "numpy"].tolist()))))
