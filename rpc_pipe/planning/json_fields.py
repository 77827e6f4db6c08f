"""Dataclasses as JSON: plans and profiles are written by their fields, and read back with their types checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from ..dependency import Kind

_hints: Any = cache(get_type_hints)
#: counts and indices are below this
_MOST = 2**31
#: times and sizes are, so that sums and products of them are finite
_MOST_FLOAT = 1e100


def json_field(name: str, unit: float = 1) -> dict[str, Any]:
    """Return the metadata of a field with another name in JSON, or another unit, such as 1e6 for megabytes."""
    return {"name": name, "unit": unit}


def to_json_value(value: Any, unit: float = 1) -> Any:
    """Return a dataclass and its contents as JSON values. Keys that are kinds become letters."""
    if is_dataclass(value):
        return {_name(each): to_json_value(getattr(value, each.name), _unit(each)) for each in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, Kind) for key in value):  # values by kind are milliseconds
        return {key.letter: round(part, 6) for key, part in value.items()}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json_value(part, unit) for part in value]
    return value if unit == 1 else value / unit


def from_json_value(kind: Any, value: Any, name: str = "", unit: float = 1) -> Any:
    """Return the value of type `kind` that `to_json_value` has written and a user may have edited.

    Args:
        name: its name in JSON; empty: it is the outermost value, which may have other keys besides its fields.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it has another type, or lacks a field.
    """
    if is_dataclass(kind):
        if type(value) is kind:  # has been read already
            return value
        names = {_name(each): each for each in fields(kind)}
        _refuse_no_object(name, value)
        if name and (unknown := value.keys() - names.keys()):
            raise TypeError(f"{name} has no {min(unknown)}: known are {', '.join(names)}")
        lacking = {each.name for each in names.values() if each.default is each.default_factory is MISSING}
        there = [(key, each) for key, each in names.items() if key in value or each.name in lacking]
        hints = _hints(kind)
        found = {each.name: from_json_value(hints[each.name], value[key], key, _unit(each)) for key, each in there}
        return kind(**found)  # type: ignore[operator]
    origin, (first, *rest) = get_origin(kind), (*get_args(kind), None)
    if origin is Mapping:
        _refuse_no_object(name, value)
        of_key = Kind.of if first is Kind else first
        return {of_key(key): from_json_value(rest[0], part, name) for key, part in value.items()}
    if origin is not None:
        if not isinstance(value, Sequence) or (first is int and not all(map(_is_whole, value))):
            raise ValueError(f"{name} must be a list of {'whole numbers' if first is int else 'values'}")
        parts = [from_json_value(first, part, name, unit) for part in value]
        return tuple(parts) if origin is tuple else parts
    if kind is int and not _is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 0")
    if kind is float and not (isinstance(value, (int, float)) and 0 <= value < _MOST_FLOAT):
        raise ValueError(f"{name} {value!r} must be a number, at least 0 and finite")
    return value if kind is Any else kind(value) if unit == 1 else unit * kind(value)


def _refuse_no_object(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} {value!r} must be an object, such as {{...}}")


def _name(of: Field[Any]) -> str:
    return str(of.metadata.get("name", of.name))


def _unit(of: Field[Any]) -> float:
    return float(of.metadata.get("unit", 1))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST
