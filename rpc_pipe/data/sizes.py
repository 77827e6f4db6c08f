"""Sizes as users write them."""

from __future__ import annotations

import re

from ..dependency import ConfigError

_TOLD = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def num_bytes(size: int | str, what: str = "memory") -> int:
    """Return how many bytes `size` says: a number, or such as `500MB`, `2GB` or `1.5GiB`.

    Raises:
        ConfigError: it is no size, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(size).lower())
    try:
        value = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value < 1:
        raise ConfigError(f"{what} {size!r}: must be a number of bytes above 0, such as 500MB, 2GB or 1.5GiB")
    return value


def told(size: float) -> str:
    """Return a number of bytes as errors show it, with three digits at least."""
    unit, factor = next(((unit, factor) for unit, factor in _TOLD if size >= factor), ("bytes", 1))
    return f"{size / factor:,.{0 if unit == 'bytes' else 2}f} {unit}"
