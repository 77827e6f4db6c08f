"""Readers of typed values, for `add_argument`: each raises ArgumentTypeError with the value and the rule."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..system.sizes import read_bytes

if TYPE_CHECKING:
    from ..planning.simulator import Link


def _need(is_met: object, text: str, rule: str) -> None:
    """Raise ArgumentTypeError with the value and the rule unless the rule is met."""
    if not is_met:
        raise ArgumentTypeError(f"{text}: {rule}")


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text}: must be a whole number") from None
        _need(found >= least, text, f"must be at least {least}")
        _need(most is None or found <= most, text, f"must be at most {most}")
        return found

    return read


def span(text: str) -> str | bool:
    """Read the least and the most workers as MIN:MAX; `on` is True."""
    if text == "on":
        return True
    _need(re.fullmatch("[0-9]+:[0-9]+", text), text, "must be MIN:MAX, two numbers of workers, such as 2:4")
    least, most = map(int, text.split(":"))
    low, high = sorted((max(2, least), max(2, most)))
    _need(2 <= least <= most, text, f"must be at least 2 workers, the least number first; take {low}:{high}")
    return text


def wholes(text: str) -> list[int]:
    """Read whole numbers of at least 1 with commas."""
    known = re.fullmatch("0*[1-9][0-9]*(,0*[1-9][0-9]*)*", text)
    _need(known, text, "must be whole numbers of at least 1 with commas, such as 3,2,2,3")
    return [int(part) for part in text.split(",")]


def indices(text: str) -> list[int]:
    """Read whole numbers from 0 with commas."""
    _need(re.fullmatch("[0-9]+(,[0-9]+)*", text), text, "must be whole numbers from 0 with commas, such as 0,2")
    return [int(part) for part in text.split(",")]


def number(text: str) -> float:
    """Read a number of at least 0; whole numbers stay whole, so that sums of them are exact."""
    try:
        found = int(text) if text.isdecimal() else float(text)
    except ValueError:
        found = -1
    _need(0 <= found < float("inf"), text, "must be a number of at least 0")
    return found


def numbers(text: str) -> list[float]:
    """Read numbers of at least 0 with commas, one above 0."""
    found = [number(part.strip()) for part in text.split(",")]
    _need(any(found), text, "must have a number above 0")
    return found


def positive(text: str) -> float:
    """Read a number above 0."""
    _need(found := number(text), text, "must be above 0")
    return found


def fraction(text: str) -> float:
    """Read a share."""
    _need((found := number(text)) < 1, text, "must be less than 1")
    return found


def size(text: str) -> float:
    """Read an amount of memory.

    >>> size("1.5GB")
    1500000000.0
    """
    if (found := read_bytes(text)) is None:
        raise ArgumentTypeError(f"{text}: must be a number of bytes, such as 500MB or 1.5GB")
    return found


def rate(text: str) -> float:
    """Read a bandwidth in bytes a unit of time, or in bytes a second, such as 12GB/s, where that is a millisecond."""
    return some(text.removesuffix("/s")) / (1e3 if text.endswith("/s") else 1)


def memory(text: str) -> dict[str, float]:
    """Read the memory of a worker, `limit`, and with `copy=` its bandwidth to host memory, or one of the two.

    A small limit needs a unit: 40 bytes hold no model.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        _need(name == "copy" or not equals, part, "must be a number of bytes, such as 8GB, or copy=12GB/s")
        found[name or "limit"] = rate(value) if name else some(part)
        small = not name and found["limit"] < 1e6 and part.isdecimal()
        _need(not small, part, f"is {part} bytes; write a unit, such as {part}GB")
    return found


def some(text: str) -> float:
    """Read an amount of memory that is not 0."""
    _need(found := size(text), text, "must be above 0")
    return found


def link(text: str) -> Link:
    """Read a link, `LATENCY` or `LATENCY/BANDWIDTH`, in bytes a unit of time.

    >>> link("2.5/1MB")
    Link(latency=2.5, bandwidth=1000000.0)
    """
    from ..planning.simulator import Link  # a worker does without

    latency, slash, bandwidth = text.partition("/")
    try:
        return Link(number(latency), some(bandwidth) if slash else float("inf"))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{text}: {str(error).rpartition(': ')[2]}") from None


def device(text: str) -> str:
    """Read the name of a device; only torch knows whether it exists."""
    _need(re.fullmatch(r"[a-z]+(:\d+)?", text), text, "must be cpu, cuda or cuda:N")
    return text
