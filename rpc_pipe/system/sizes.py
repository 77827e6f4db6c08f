"""Sizes as users write them."""

import re

from ..dependency import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_bytes(size: int | str) -> float | None:
    """Return the bytes of `size`: a number, or a text such as `500MB`, `2GB` or `1.5GiB`; None if it is no size.

    >>> read_bytes("1.5GB"), read_bytes("2 KiB"), read_bytes("much")
    (1500000000.0, 2048.0, None)
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)", str(size).strip().lower())
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else float("inf")
    except (KeyError, ValueError):
        return None
    return value if value < float("inf") else None


def num_bytes(size: int | str, what: str = "memory") -> int:
    """Return the bytes of `size`, as `read_bytes`.

    Raises:
        ConfigError: it is no size, or not above 0.
    """
    value = read_bytes(size)
    if value is None or value < 1:
        raise ConfigError(f"{what} {size!r}: must be a number of bytes above 0, such as 500MB, 2GB or 1.5GiB")
    return int(value)


def format_bytes(amount: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(3.2e9), format_bytes(512)
    ('3.2 GB', '512 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.3g} B"
