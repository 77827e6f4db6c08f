"""Plans and profiles as JSON: written from the fields of their dataclasses, and read back with their types checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from ..dependency import Kind

_hints: Any = cache(get_type_hints)
#: no count or index is larger
_MOST = 2**31


def said(name: str, unit: float = 1) -> dict[str, Any]:
    """Return the metadata of a field that is called otherwise in JSON, or has another unit there, such as megabytes."""
    return {"name": name, "unit": unit}


def plain(value: Any, unit: float = 1) -> Any:
    """Return a dataclass, and what is in it, as dicts, lists and plain values. Keys that are kinds become letters."""
    if is_dataclass(value):
        return {_name(each): plain(getattr(value, each.name), _unit(each)) for each in fields(value)}
    if isinstance(value, Mapping):  # by kind there are milliseconds
        return {
            key.letter if isinstance(key, Kind) else str(key): round(part, 6) if isinstance(key, Kind) else plain(part)
            for key, part in value.items()
        }
    if isinstance(value, (tuple, list)):
        return [plain(part, unit) for part in value]
    return value if unit == 1 else value / unit


def read(kind: Any, told: Any, name: str = "", unit: float = 1) -> Any:
    """Return the value of type `kind` that `plain` has written as `told` and a user may have edited.

    Args:
        name: what JSON calls it; empty: it is the whole, which may have more beside its fields.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it is another value, or lacks a field.
    """
    if is_dataclass(kind):
        if type(told) is kind:  # read already
            return told
        names = {_name(each): each for each in fields(kind)}
        if name and (unknown := told.keys() - names.keys()):
            raise TypeError(f"{name} has no {min(unknown)}")
        there = [(key, each) for key, each in names.items() if key in told or _is_required(each)]
        found = {each.name: read(_hints(kind)[each.name], told[key], key, _unit(each)) for key, each in there}
        return kind(**found)  # type: ignore[operator]
    origin, (first, *rest) = get_origin(kind), (*get_args(kind), None)
    if origin is Mapping:
        of_key = Kind.of if first is Kind else first
        return {of_key(key): read(rest[0], part, name) for key, part in told.items()}
    if origin is not None:
        if not isinstance(told, Sequence) or (first is int and not all(map(_is_whole, told))):
            raise ValueError(f"{name} must be a list of {'whole numbers' if first is int else 'values'}")
        parts = [read(first, part, name, unit) for part in told]
        return tuple(parts) if origin is tuple else parts
    if kind is int and not _is_whole(told):
        raise ValueError(f"{name} must be a whole number of at least 0")
    return told if kind is Any else kind(told) if unit == 1 else unit * kind(told)


def _name(of: Field[Any]) -> str:
    return str(of.metadata.get("name", of.name))


def _unit(of: Field[Any]) -> float:
    return float(of.metadata.get("unit", 1))


def _is_required(of: Field[Any]) -> bool:
    return of.default is MISSING and of.default_factory is MISSING


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST
