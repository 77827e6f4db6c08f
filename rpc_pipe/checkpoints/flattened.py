"""Tensors of classes that consist of plain ones, such as an optimizer's quantised moments, as torch flattens them.

The class is found by its name among the classes that the script has loaded: nothing that is read back can run code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..dependency import ConfigError
from .json_values import decoded, encoded

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
