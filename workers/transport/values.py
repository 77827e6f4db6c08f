"""Plain values and named tuples as bytes: pickles, which are read so that nothing is imported or run.

Who may say something to a worker has proved to be of its job. Still, reading makes nothing but tuples, of classes that
this process has loaded already, and what messages are made of.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from typing import Any

import torch

from ...dependency import ConfigError, PipeError


class Malformed(PipeError, ValueError):
    """What has come is not what any worker of this version sends; the text says why."""


def encode_value(value: Any) -> bytes:
    """Write plain values, dtypes, and tuples, lists and dicts of them.

    Raises:
        ConfigError: there is something that cannot be written.
    """
    try:
        return pickle.dumps(value, 5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"what cannot be pickled cannot travel between workers: {error}") from error


def decode_value(data: bytes) -> Any:
    """Read what `encode_value` has written, at the beginning of `data`.

    Raises:
        Malformed: the bytes are something else.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a pickle that is none fails in many ways
        raise error if isinstance(error, Malformed) else Malformed(f"malformed message: {error}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, "__dict__", {}).get(part)  # a module's own `__getattr__` may import
        is_tuple = isinstance(found, type) and issubclass(found, tuple)
        if is_tuple or isinstance(found, torch.dtype) or found in (complex, OrderedDict):
            return found
        raise Malformed(
            f"a {module}.{name} cannot travel between workers; named tuples can if this worker has loaded it"
        )
