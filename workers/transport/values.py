"""Plain values as bytes: JSON, in which what JSON does not know has a tag. Written and read without pickle.

    None, bool, int, float, str, list    as they are
    everything else                      {"its tag": [what it is made of]}

Reading never imports, calls or builds anything but what is listed here, and checks what it is made of.

A named tuple is written as the name of its class, its fields and its values. It is read as that class where the reader
has loaded it already, as workers that run the same program have; elsewhere as a class made of the fields.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from ...dependency import ConfigError, PipeError
from .payload import Place

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_RETURN_TYPES = {name: kind for name, kind in vars(torch.return_types).items() if isinstance(kind, type)}
#: JSON has these
_OWN = {type(None), bool, int, float, str}


class Malformed(PipeError, ValueError):
    """What has come is not what any worker of this version sends; the text says why."""


def encode_value(value: Any) -> bytes:
    """Write None, bool, int, float, complex, str, bytes, dtype, Size, Place, or a tree of them, in one line.

    Raises:
        ConfigError: there is something else, or values lie too deep in each other.
    """
    try:
        return _encoder.encode(_tagged(value)).encode()
    except RecursionError:
        raise ConfigError("values hundreds deep in each other cannot travel between workers") from None


def decode_value(data: bytes) -> Any:
    """Read what `encode_value` has written.

    Raises:
        Malformed: the bytes are something else.
    """
    try:
        return _decoder.decode(str(data, "utf-8"))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise error if isinstance(error, Malformed) else Malformed(f"malformed value: {error}") from error


def _tagged(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _OWN:
        return value
    if kind is Place:  # as most parts of a payload are
        return {"place": value}
    if kind is list:
        return [_tagged(child) for child in value]
    if kind not in _KINDS:
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            kind = namedtuple
        elif kind.__module__ == "torch.return_types":
            kind = torch.return_types
        else:
            raise ConfigError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between workers")
    tag, parts_of, _ = _KINDS[kind]
    return {tag: [_tagged(part) for part in parts_of(value)]}


def _built(tagged_value: dict[str, Any]) -> Any:
    ((tag, parts),) = tagged_value.items()
    return _BUILDERS[tag](*parts)


def _named(module: str, name: str, fields: tuple[str, ...], *values: Any) -> Any:
    if type(module) is not str or type(name) is not str or type(fields) is not tuple or len(fields) != len(values):
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


#: by type, or what stands for many: tag, how to take it apart, and what to call with the parts
_KINDS: dict[Any, tuple[str, Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    tuple: ("tuple", iter, lambda *parts: parts),
    dict: ("dict", dict.items, lambda *items: dict(items)),
    OrderedDict: ("ordered", OrderedDict.items, lambda *items: OrderedDict(items)),
    torch.Size: ("size", iter, lambda *parts: torch.Size(parts)),
    Place: ("place", iter, Place),
    complex: ("complex", lambda value: (value.real, value.imag), complex),
    bytes: ("bytes", lambda value: (b64encode(value).decode(),), b64decode),
    torch.dtype: ("dtype", lambda value: (str(value),), DTYPES.__getitem__),
    namedtuple: (
        "named", lambda value: (type(value).__module__, type(value).__qualname__, value._fields, *value), _named
    ),
    torch.return_types: (
        "returned",
        lambda value: (type(value).__name__, *value),
        lambda name, *parts: _RETURN_TYPES[name](parts),
    ),
}  # fmt: skip
_BUILDERS = {tag: build for tag, _, build in _KINDS.values()}
_encoder, _decoder = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder(object_hook=_built)
