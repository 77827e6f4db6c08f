"""Plain values as bytes: a typed form that is written and read without pickle.

    a scalar            letter of its type, number of bytes, bytes
    a tree of values    letter of its type, number of children, children

Reading never imports, calls or builds anything but what is listed here, and checks every number before it believes it.

A named tuple is written as the name of its class, its fields and its values. It is read as that class where the reader
has loaded it already, as workers that run the same program have; elsewhere as a class made of the fields.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from ...dependency import ConfigError, PipeError
from .payload import Place

#: so deep may values lie in each other
_DEEPEST = 100
_HEAD = struct.Struct("<cI")
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Malformed(PipeError, ValueError):
    """What has come is not what any worker of this version sends; the text says why."""


def encode_value(value: Any) -> bytes:
    """Write None, bool, int, float, complex, str, bytes, dtype, Size, Place, and tuples, lists and dicts of them.

    Raises:
        ConfigError: there is something else.
    """
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def decode_value(data: bytes) -> Any:
    """Read what `encode_value` has written.

    Raises:
        Malformed: the bytes are something else.
    """
    try:
        value, end = _read(data, 0, 0)
    except (struct.error, ValueError, TypeError, LookupError) as error:  # of numbers, letters, keys, names
        raise error if isinstance(error, Malformed) else Malformed(f"malformed value: {error}") from error
    if end != len(data):
        raise Malformed(f"malformed value: {len(data) - end} bytes too many")
    return value


def _write(value: Any, parts: list[bytes], depth: int) -> None:
    if depth > _DEEPEST:
        raise ConfigError(f"values more than {_DEEPEST} deep in each other cannot travel between workers")
    kind: Any = type(value)
    if kind in _SCALARS:
        letter, to_bytes, _ = _SCALARS[kind]
        data = to_bytes(value)
        parts += (_HEAD.pack(letter, len(data)), data)
        return
    if kind not in _TREES:
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            kind = namedtuple
        elif kind.__module__ == "torch.return_types":
            kind = torch.return_types
        else:
            raise ConfigError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between workers")
    letter, children_of, _ = _TREES[kind]
    children = children_of(value)
    parts.append(_HEAD.pack(letter, len(children)))
    for child in children:
        _write(child, parts, depth + 1)


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and where it ends."""
    if depth > _DEEPEST:
        raise Malformed(f"malformed value: more than {_DEEPEST} deep")
    letter, size = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    if size > len(data) - at:  # a child takes at least a byte
        raise Malformed(f"malformed value: {size} wanted, {len(data) - at} bytes left")
    if letter in _FROM_BYTES:
        return _FROM_BYTES[letter](data[at : at + size]), at + size
    children = []
    for _ in range(size):
        child, at = _read(data, at, depth + 1)
        children.append(child)
    return _FROM_CHILDREN[letter](children), at


def _items(value: dict[Any, Any]) -> list[Any]:
    return [part for item in value.items() for part in item]


def _pairs(children: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(children[::2], children[1::2], strict=True)


def _named(children: list[Any]) -> Any:
    module, name, fields, *values = children
    if not (type(module) is type(name) is str and type(fields) is tuple and len(fields) == len(values)):
        raise Malformed(f"malformed value: a named tuple with {len(values)} values")
    return tuple.__new__(_named_class(module, name, fields), values)


@lru_cache(maxsize=256)
def _named_class(module: str, name: str, fields: tuple[str, ...]) -> type:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(name.rpartition(".")[2], fields)  # which refuses names that are none


_FLOAT, _COMPLEX, _PLACE = struct.Struct("<d"), struct.Struct("<dd"), struct.Struct("<I?")
#: by type: letter, and how to make bytes of it and it of bytes
_SCALARS: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (b"N", lambda _: b"", {b"": None}.__getitem__),
    bool: (b"T", lambda value: b"\1" if value else b"\0", {b"\0": False, b"\1": True}.__getitem__),
    int: (
        b"i",
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    float: (b"d", _FLOAT.pack, lambda data: _FLOAT.unpack(data)[0]),
    complex: (b"c", lambda value: _COMPLEX.pack(value.real, value.imag), lambda data: complex(*_COMPLEX.unpack(data))),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass"), lambda data: str(data, "utf-8", "surrogatepass")),
    bytes: (b"b", bytes, bytes),
    torch.dtype: (b"D", lambda value: str(value).encode(), lambda data: _DTYPES[str(data, "utf-8")]),
    Place: (b"P", lambda value: _PLACE.pack(*value), lambda data: Place(*_PLACE.unpack(data))),
}
#: by type, or what stands for many: letter, and how to take it apart and put it together
_TREES: dict[Any, tuple[bytes, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    tuple: (b"(", list, tuple),
    list: (b"[", list, list),
    torch.Size: (b"Z", list, torch.Size),
    dict: (b"{", _items, lambda children: dict(_pairs(children))),
    OrderedDict: (b"O", _items, lambda children: OrderedDict(_pairs(children))),
    namedtuple: (b"n", lambda value: [type(value).__module__, type(value).__qualname__, value._fields, *value], _named),
    torch.return_types: (
        b"r",
        lambda value: [type(value).__name__, *value],
        lambda children: vars(torch.return_types)[children[0]](children[1:]),
    ),
}
_FROM_BYTES = {letter: read for letter, _, read in _SCALARS.values()}
_FROM_CHILDREN = {letter: read for letter, _, read in _TREES.values()}
