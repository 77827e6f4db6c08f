"""Plain values as bytes: MessagePack by msgspec, with arrays that begin with the tag of their type.

A message is data. Nothing in it is called or imported, no part refers to another part, and reading takes no more than
twice its size and 1 MiB. The sender pads a message whose values take more. Tuples travel with their class if reading
one runs nothing of the class, and if the receiver has loaded it.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from math import inf
from types import ModuleType
from typing import Any

import torch
from msgspec import msgpack

from ...dependency import ConfigError, Malformed
from .payload import tuple_of

#: containers lie no deeper in each other
_MOST_DEEP = 200
#: values of fewer bytes take less than `_SPARE`, at any type
_LITTLE = 2**13
#: bytes that reading may take beside twice the size of a message
_SPARE = 2**20
_LIST, _TUPLE, _DICT, _ORDERED, _SIZE, _CLASS, _DTYPE, _COMPLEX, _INT, _TEXT, _PADDED = range(11)
_TAGS: dict[type, int] = {list: _LIST, tuple: _TUPLE, torch.Size: _SIZE, dict: _DICT, OrderedDict: _ORDERED}
_ALIKE = frozenset((type(None), bool, float, bytes))
_DTYPES = {str(each)[len("torch.") :]: each for each in vars(torch).values() if isinstance(each, torch.dtype)}
#: methods that would let a class of tuples run code when one is read
_OWN_METHODS = frozenset(
    ("__iter__", "__getitem__", "__len__", "__eq__", "__hash__", "__getattribute__", "__getattr__", "__del__")
)
_encoder, _decoder = msgpack.Encoder(), msgpack.Decoder()


def encode_value(value: Any) -> bytes:
    """Return plain values, dtypes, and tuples, lists and dicts of them, as bytes.

    Raises:
        ConfigError: a value is of another type.
    """
    apart = _apart(value, 0)
    data = _encoder.encode(apart)
    missing = padding(data)
    return _encoder.encode([_PADDED, apart, bytes(missing)]) if missing else data


def decode_value(data: bytes) -> Any:
    """Return the value that `encode_value` has written.

    Raises:
        Malformed: the bytes are something else.
    """
    refuse_heavy(data)
    try:
        return _together(_decoder.decode(data), 0)
    except Exception as error:
        raise malformed(error) from error


def malformed(error: Exception) -> Malformed:
    """Return the refusal of a message that could not be read, because of `error`."""
    return error if isinstance(error, Malformed) else Malformed(f"malformed message: {error}")


# --- writing


def _apart(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _ALIKE or (kind is int and -(2**63) <= value < 2**64) or (kind is str and value.isascii()):
        return value
    if depth > _MOST_DEEP:
        raise ConfigError("containers that lie hundreds deep in each other cannot travel between workers")
    if kind is str:
        return _written_text(value)
    if kind in _TAGS:
        children = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        return [_TAGS[kind], *[_apart(child, depth + 1) for child in children]]
    if kind is int:
        return [_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if kind is complex:
        return [_COMPLEX, value.real, value.imag]
    if kind is torch.dtype:
        return [_DTYPE, str(value)[len("torch.") :]]
    module, name = kind.__module__, kind.__qualname__
    if isinstance(value, tuple) and _class_of(module, name) is kind:
        return [_CLASS, module, name, *[_apart(child, depth + 1) for child in tuple.__iter__(value)]]
    advice = "convert it by int(), float(), str() or list(), or put a tensor in its place"
    if isinstance(value, tuple):
        advice = "its class must be in a module, by its name, and leave iteration and comparison to tuple"
    raise ConfigError(f"a {module}.{name} cannot travel between workers: {advice}")


def _written_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of UTF-16, as in names of files
        return [_TEXT, text.encode("utf-8", "surrogatepass")]
    return text


# --- reading


def _together(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _ALIKE or kind is int or kind is str:
        return value
    if kind is not list or depth > _MOST_DEEP:
        raise Malformed(f"malformed message: a {kind.__name__}, {depth} deep")
    tag, *parts = value
    if type(tag) is not int or not 0 <= tag < len(_MAKERS):
        raise Malformed("malformed message: a value without a type")
    return _MAKERS[tag](*[_together(part, depth + 1) for part in parts])


def _dict_of(kind: type[dict[Any, Any]], *parts: Any) -> Any:
    made = kind(zip(parts[::2], parts[1::2], strict=True))
    if len(made) < len(parts) // 2:
        raise Malformed("malformed message: a key of a dict comes twice")
    return made


def _tuple_of_class(module: str, name: str, *parts: Any) -> Any:
    kind = _class_of(module, name)
    if kind is None:
        raise Malformed(f"a {module}.{name} cannot travel between workers unless this one has loaded the named tuple")
    if len(parts) != len(getattr(kind, "_fields", parts)):
        raise Malformed(f"malformed message: a {module}.{name} of {len(parts)} items")
    return tuple_of(kind, parts)


#: by tag
_MAKERS: tuple[Callable[..., Any], ...] = (
    lambda *parts: list(parts),
    lambda *parts: parts,
    lambda *parts: _dict_of(dict, *parts),
    lambda *parts: _dict_of(OrderedDict, *parts),
    lambda *parts: torch.Size(parts),
    _tuple_of_class,
    lambda name: _DTYPES[name],
    lambda real, imag: complex(real, imag),
    lambda content: int.from_bytes(memoryview(content), "little", signed=True),
    lambda content: bytes(memoryview(content)).decode("utf-8", "surrogatepass"),
    lambda value, _: value,
)


@lru_cache
def _is_record(kind: type) -> bool:
    """Return whether a class is of tuples, and reading one runs none of its methods."""
    if type(kind) is not type or not issubclass(kind, tuple):
        return False
    if hasattr(kind, "n_sequence_fields"):
        return kind.__module__ == "torch.return_types"
    own = kind.__mro__[: kind.__mro__.index(tuple)]
    return all(_OWN_METHODS.isdisjoint(vars(base)) for base in own)


def _class_of(module: str, name: str) -> type | None:
    """Return a class of tuples of a loaded module; None if there is none that may travel."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, (ModuleType, type)):
            return None
        # Past methods such as `__getattr__` of a module, which may import.
        found = (object if isinstance(found, ModuleType) else type).__getattribute__(found, "__dict__").get(part)
    return found if isinstance(found, type) and _is_record(found) else None


# --- how much memory the values of a message take

#: first byte of a MessagePack item -> bytes of its length, bytes behind that, whether items follow, cost of each
_HEADS: dict[int, tuple[int, int, bool, int]] = {byte: (0, 0, False, 0) for byte in (*range(0x80), 0xC0, 0xC2, 0xC3)}
_HEADS |= {byte: (0, 0, False, 0) for byte in range(0xE0, 0x100)}
_HEADS |= {0x90 + count: (0, count, True, 16) for count in range(16)} | {0xDC: (2, 0, True, 16), 0xDD: (4, 0, True, 16)}
_HEADS |= {0xA0 + count: (0, count, False, 4) for count in range(32)}
_HEADS |= {0xD9: (1, 0, False, 4), 0xDA: (2, 0, False, 4), 0xDB: (4, 0, False, 4)}
_HEADS |= {0xC4: (1, 0, False, 1), 0xC5: (2, 0, False, 1), 0xC6: (4, 0, False, 1)}
_HEADS |= {byte: (0, 2 ** (byte - base), False, 0) for base in (0xCC, 0xD0) for byte in range(base, base + 4)}
_HEADS |= {0xCA: (0, 4, False, 0), 0xCB: (0, 8, False, 0)}
#: costs of an array, of another item, and of padding beside its bytes
_ARRAY, _ITEM, _PADDING = 128, 64, 512


def _weight(data: bytes, most: float = inf) -> int:
    """Return how much memory the values of a message take at most, counted until it is more than `most`.

    Raises:
        Malformed: an item is of a type that no message has.
    """
    at, weight, size = 0, 0, len(data)
    while at < size and weight <= most:
        head = _HEADS.get(data[at])
        if head is None:
            raise Malformed(f"malformed message: an item of type {data[at]:#x}")
        long, count, items, cost = head
        at += 1 + long
        if long:
            count = int.from_bytes(data[at - long : at], "big")
        weight += (_ARRAY if items else _ITEM) + cost * count
        at += 0 if items else count
    return weight


def refuse_heavy(data: bytes, little: int = _LITTLE) -> None:
    """Raise Malformed if the values of a message take far more memory than its bytes; `little` bytes may."""
    most = 2 * len(data) + _SPARE
    if len(data) > little and _weight(data, most) > most:
        raise Malformed(f"malformed message: {len(data)} bytes hold more values than their size allows")


def padding(data: bytes) -> int:
    """Return how many bytes a message lacks, so that `refuse_heavy` lets it pass."""
    return 0 if len(data) <= _LITTLE else max(0, _weight(data) + _PADDING - 2 * len(data) - _SPARE)
