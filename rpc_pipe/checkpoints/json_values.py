"""How values are written: plain ones as JSON and back, exactly; generators and tensors in files of safetensors.

Nothing that is read back can run code.
"""

import json
import os
import random
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..dependency import ConfigError
from ..system.files import sync
from ..workers.compute.modules.digest import memory_of
from .folder import umask

_TUPLE, _PAIRS, _TENSOR, _DTYPE, _BYTES, _ARRAY = "$tuple", "$pairs", "$tensor", "$dtype", "$bytes", "$array"
#: most bytes of a tensor among plain values: a generator's state has 5,056
_MOST_BYTES = 2**20
_PREFIX = "random."
NAMES = [f"{_PREFIX}{name}" for name in ("torch", "python", "numpy")]


def encoded(value: Any, what: str) -> Any:
    """Return `value` in a form that `json` can write.

    Args:
        what: the value's name in the error.

    Raises:
        ConfigError: something in it is no plain value.

    >>> decoded(encoded({1: (0.9, None), "a": [True, torch.tensor([1, 2]), b"b"]}, "x"))
    {1: (0.9, None), 'a': [True, tensor([1, 2]), b'b']}
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
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, bytes) and len(value) <= _MOST_BYTES:
        return {_BYTES: b64encode(value).decode()}
    if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        return {_ARRAY: encoded(torch.from_numpy(numpy.array(value)), what)}
    if type(value) is Tensor and value.layout == torch.strided and value.nbytes <= _MOST_BYTES:
        plain = memory_of(value.detach().cpu().contiguous())
        return {_TENSOR: [encoded(bytes(plain), what), str(value.dtype).removeprefix("torch."), list(value.shape)]}
    known = f"numbers, texts, bytes and tensors of at most {_MOST_BYTES >> 20} MiB, lists and dicts of these"
    raise ConfigError(f"{what} holds a {type(value).__name__}; must be {known}")


def decoded(value: Any) -> Any:
    """Return the argument of `encoded`."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decoded(each) for each in value[_TUPLE])
    if _PAIRS in value:
        return {decoded(key): decoded(each) for key, each in value[_PAIRS]}
    if _DTYPE in value:
        return getattr(torch, value[_DTYPE])
    if _BYTES in value:
        return b64decode(value[_BYTES])
    if _ARRAY in value:
        return decoded(value[_ARRAY]).numpy()
    if _TENSOR in value:
        first, dtype, *shape = value[_TENSOR]
        if not shape:  # of a checkpoint of before
            return torch.tensor(first, dtype=getattr(torch, dtype))
        made, numbers = torch.empty(shape[0], dtype=getattr(torch, dtype)), decoded(first)
        return made.copy_(torch.frombuffer(bytearray(numbers), dtype=made.dtype).view_as(made)) if numbers else made
    return {key: decoded(each) for key, each in value.items()}


def random_state() -> dict[str, Tensor]:
    """Return the states of the process's generators, of torch's CPU, of Python and of numpy, as tensors by name."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    of_numpy = [name, numpy.asarray(keys).tolist(), position, has_gauss, cached]
    values = {"python": [version, numbers, gauss], "numpy": of_numpy}
    texts = {name: bytearray(json.dumps(value).encode()) for name, value in values.items()}
    found = {name: torch.frombuffer(text, dtype=torch.uint8) for name, text in texts.items()}
    return {_PREFIX + name: state for name, state in ({"torch": torch.get_rng_state()} | found).items()}


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators where `random_state` found them."""
    torch.set_rng_state(states[_PREFIX + "torch"])
    version, numbers, gauss = json.loads(bytes(states[_PREFIX + "python"].tolist()))
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(json.loads(bytes(states[_PREFIX + "numpy"].tolist()))))


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] = {}) -> int:
    """Write contiguous tensors of the CPU to a file, wait until they are on the disk, and return its size.

    Args:
        about: texts for its header.

    Raises:
        OSError: it cannot be written, or safetensors has no name for a type.
    """
    try:
        save_file(dict(tensors), path, {"format": "pt", **about})
    except KeyError as error:
        raise OSError(f"safetensors has no {error}") from error
    except SafetensorError as error:  # which has the number in its text alone
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error
    _order_texts(path)
    path.chmod(0o666 & ~umask())
    sync(path)
    return path.stat().st_size


def _order_texts(path: Path) -> None:
    """Write the texts of a file's header in the order of their names: safetensors has another one in each process."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(ordered) == size:
            file.seek(8)
            file.write(ordered)


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a contiguous tensor of the CPU."""
    return zlib.crc32(memory_of(tensor), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def by_file(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, of the file of each tensor."""
    found: dict[str, list[str]] = {}
    for name, file in files.items():
        found.setdefault(file, []).append(name)
    return found


@contextmanager
def opened(path: Path, error: type[ConfigError]) -> Iterator[Any]:
    """Open a file of safetensors; its tensors are read on demand.

    Raises:
        ConfigError: as the type `error`: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            yield tensors
    except (OSError, SafetensorError) as raised:
        raise error(f"{path}: cannot be read: {raised}") from raised


#: between the name of a tensor and that of a plain one inside
_MARK = "$"


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers itself; so does a member's part of a DTensor."""
    return not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "_local_tensor")


def parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a tensor, by name."""
    inner = [] if is_plain(tensor) else tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    for each in inner:
        yield from parts(f"{name}{_MARK}{each}", getattr(tensor, each))
    if not inner:
        yield name, tensor


def form(tensor: Tensor, what: str) -> Any:
    """Return, as JSON, how a tensor is made of its parts; None of a plain one.

    Raises:
        ConfigError: its class needs more than plain values besides.
    """
    if is_plain(tensor):
        return None
    inner, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {
        "class": _name(type(tensor)),
        "context": encoded(context, f"{what}, a {type(tensor).__name__},"),
        "shape": [list(tensor.shape), list(tensor.stride())],
        "inner": {each: form(getattr(tensor, each), what) for each in inner},
    }


def forms(named: Iterable[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Return the forms of the tensors among named values that are not plain."""
    found = {name: form(value, f"{what}: {name}") for name, value in named if isinstance(value, Tensor)}
    return {name: each for name, each in found.items() if each is not None}


def names(form: Any, name: str) -> list[str]:
    """Return the names of the plain tensors of one."""
    return [name] if form is None else [n for k, f in form["inner"].items() for n in names(f, f"{name}{_MARK}{k}")]


def of_part(name: str) -> str:
    """Return the name of the tensor that a plain one is in."""
    return name.partition(_MARK)[0]


def joined(form: Any, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor, made of its parts.

    Raises:
        ConfigError: its class is not loaded.
    """
    if form is None:
        return tensors[name]
    kind = next((each for each in _subclasses(Tensor) if _name(each) == form["class"]), None)
    if kind is None:
        raise ConfigError(f"{name}: is a {form['class']}, which is not loaded; import what has it")
    inner = {key: joined(each, f"{name}{_MARK}{key}", tensors) for key, each in form["inner"].items()}
    made: Tensor = kind.__tensor_unflatten__(inner, decoded(form["context"]), *map(tuple, form["shape"]))
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclasses(kind: Any) -> Iterator[Any]:
    found: list[Any] = kind.__subclasses__()
    for each in found:
        yield each
        yield from _subclasses(each)
