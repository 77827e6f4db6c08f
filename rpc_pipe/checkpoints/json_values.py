"""Plain values as JSON and back, exactly: also tuples, dicts with keys that are no text, and single numbers as tensors.

Nothing that is read back can run code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dependency import ConfigError

_TUPLE, _PAIRS, _TENSOR = "$tuple", "$pairs", "$tensor"


def encoded(value: Any, what: str) -> Any:
    """Return what `json` can write of `value`.

    Args:
        what: named in the error.

    Raises:
        ConfigError: something in it is no plain value.

    >>> decoded(encoded({1: (0.9, None), "a": [True]}, "x"))
    {1: (0.9, None), 'a': [True]}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encoded(each, what) for each in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(each, what) for each in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encoded(each, what) for key, each in value.items()}
        return {_PAIRS: [[encoded(key, what), encoded(each, what)] for key, each in value.items()]}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {_TENSOR: [value.item(), str(value.dtype).removeprefix("torch.")]}
    raise ConfigError(
        f"{what} holds a {type(value).__name__}: a checkpoint takes numbers, texts, lists and dicts of them"
    )


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decoded(each) for each in value[_TUPLE])
    if _PAIRS in value:
        return {decoded(key): decoded(each) for key, each in value[_PAIRS]}
    if _TENSOR in value:
        number, dtype = value[_TENSOR]
        return torch.tensor(number, dtype=getattr(torch, dtype))
    return {key: decoded(each) for key, each in value.items()}
