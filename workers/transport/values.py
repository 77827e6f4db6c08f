"""Plain values as bytes: a typed form that is written and read without pickle.

Reading never imports, calls or builds anything but what is listed here, and checks every length before it believes it.

A named tuple is written as the name of its class and its fields. It is read as that class where the reader has loaded
it already, as workers that run the same program have; elsewhere as a class made of the fields.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...dependency import PipeError
from .payload import Place

#: so deep may values lie in each other
_DEEPEST = 100
_SIZE = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_PLACE = struct.Struct("<I?")
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Malformed(PipeError, ValueError):
    """What has come is not what any worker of this version sends; the text says why."""


def encode_value(value: Any) -> bytes:
    """Write None, bool, int, float, complex, str, bytes, dtype, Size, Place, and tuples, lists and dicts of them.

    Raises:
        TypeError: there is something else.
    """
    parts: list[bytes] = []
    _write(value, parts.append, 0)
    return b"".join(parts)


def decode_value(data: bytes, places: list[Place] | None = None) -> Any:
    """Read what `encode_value` has written; note each `Place` in `places`.

    Raises:
        Malformed: the bytes are something else.
    """
    reader = _Reader(data, places)
    try:
        value = reader.read(0)
    except (struct.error, ValueError, TypeError, KeyError) as error:  # of letters, numbers, keys, names
        raise Malformed(f"malformed value: {error}") from error
    if reader.at != len(data):
        raise Malformed(f"malformed value: {len(data) - reader.at} bytes too many")
    return value


def _write(value: Any, put: Callable[[bytes], Any], depth: int) -> None:
    if depth > _DEEPEST:
        raise TypeError(f"values more than {_DEEPEST} deep in each other cannot travel between workers")
    kind = type(value)
    if value is None:
        put(b"N")
    elif value is True:
        put(b"Y")
    elif value is False:
        put(b"X")
    elif kind is Place:
        put(b"t" + _PLACE.pack(*value))
    elif kind is int:
        _write_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), put)
    elif kind is float:
        put(b"d" + _FLOAT.pack(value))
    elif kind is complex:
        put(b"c" + _COMPLEX.pack(value.real, value.imag))
    elif kind is str:
        _write_bytes(b"s", value.encode("utf-8", "surrogatepass"), put)
    elif kind is bytes:
        _write_bytes(b"b", value, put)
    elif kind is torch.dtype:
        _write_bytes(b"D", str(value).encode(), put)
    elif kind in _SEQUENCES:
        put(_SEQUENCES[kind] + _SIZE.pack(len(value)))
        for child in value:
            _write(child, put, depth + 1)
    elif kind in _MAPPINGS:
        put(_MAPPINGS[kind] + _SIZE.pack(len(value)))
        for key, child in value.items():
            _write(key, put, depth + 1)
            _write(child, put, depth + 1)
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        put(b"n")
        _write((kind.__module__, kind.__qualname__, kind._fields, tuple(value)), put, depth + 1)
    elif kind.__module__ == "torch.return_types":
        put(b"r")
        _write((kind.__name__, tuple(value)), put, depth + 1)
    else:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between workers")


def _write_bytes(tag: bytes, data: bytes, put: Callable[[bytes], Any]) -> None:
    put(tag + _SIZE.pack(len(data)) + data)


_SEQUENCES: dict[type, bytes] = {tuple: b"(", list: b"[", torch.Size: b"Z"}
_MAPPINGS: dict[type, bytes] = {dict: b"{", OrderedDict: b"O"}
_KINDS = {tag: kind for kind, tag in (_SEQUENCES | _MAPPINGS).items()}
_CONSTANTS = {b"N": None, b"Y": True, b"X": False}


class _Reader:
    def __init__(self, data: bytes, places: list[Place] | None) -> None:
        self._data = data
        self._places = places
        self.at = 0

    def read(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Malformed(f"malformed value: more than {_DEEPEST} deep")
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"t":
            place = Place(*_PLACE.unpack(self._take(_PLACE.size)))
            if self._places is None:
                raise Malformed("malformed value: a tensor where there can be none")
            self._places.append(place)
            return place
        if tag == b"d":
            return _FLOAT.unpack(self._take(8))[0]
        if tag == b"c":
            return complex(*_COMPLEX.unpack(self._take(16)))
        if tag == b"n":
            return _named_tuple(*self.read(depth + 1))
        if tag == b"r":
            name, children = self.read(depth + 1)
            return vars(torch.return_types)[name](children)
        size: int = _SIZE.unpack(self._take(4))[0]
        if tag in (b"(", b"[", b"Z"):
            return _KINDS[tag]([self.read(depth + 1) for _ in range(self._count(size))])
        if tag in (b"{", b"O"):
            # An expression for the key and one for the value: the order in which they are read.
            return _KINDS[tag]([(self.read(depth + 1), self.read(depth + 1)) for _ in range(self._count(size))])
        data = self._take(size)
        if tag == b"i":
            return int.from_bytes(data, "little", signed=True)
        if tag == b"s":
            return str(data, "utf-8", "surrogatepass")
        if tag == b"b":
            return data
        name = str(data, "utf-8") if tag == b"D" else ""
        if name not in _DTYPES:
            raise Malformed(f"malformed value: {tag!r} is no type, or {name!r} none of torch's")
        return _DTYPES[name]

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._data):
            raise Malformed(f"malformed value: {size} bytes wanted, {len(self._data) - self.at} left")
        data, self.at = self._data[self.at : end], end
        return data

    def _count(self, count: int) -> int:
        if count > len(self._data) - self.at:  # each takes at least a byte
            raise Malformed(f"malformed value: {count} values wanted, {len(self._data) - self.at} bytes left")
        return count


def _named_tuple(module: Any, name: Any, fields: Any, children: Any) -> Any:
    if not (type(module) is type(name) is str and type(fields) is type(children) is tuple):
        raise Malformed("malformed value: a named tuple without name or fields")
    if len(fields) != len(children) or not all(type(field) is str for field in fields):
        raise Malformed(f"malformed value: {name} with {len(children)} values for {len(fields)} fields")
    return tuple.__new__(_named_tuple_class(module, name, fields), children)


@lru_cache(maxsize=256)
def _named_tuple_class(module: str, name: str, fields: tuple[str, ...]) -> type:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(name.rpartition(".")[2], fields)  # which refuses names that are none
