"""What the stages behind a block are told of it without running it: so much must be as it was observed.

The numbers of the tensors that a block makes travel, whatever they are. All else that it returns does not: the types of
these tensors, how they are packed, the numbers and words beside them, and what it hands through, which other stages
take from where the block got it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..dependency import ConfigError
from .absent import Absent
from .trees import PLAIN, Path, at, leaves, replaced, tensors

#: what a block handed through: its place in what came back, and where the block got it: the name of a weight or
#: buffer, or the path in (args, kwargs)
_Handed = tuple[Path, str | Path]
_Tells = Callable[[Tensor], bool]


class Promise:
    """What one call of a block must return again.

    Args:
        where: the block's name.
        given: (args, kwargs) of the call.
        owned: returns the name of a weight or a buffer; None: it is none.
    """

    def __init__(self, where: str, result: Any, given: Any, owned: Callable[[Tensor], str | None]) -> None:
        self._where = where
        self._form = form_of(result)
        self._dtypes = [tensor.dtype for tensor in tensors(result)]
        paths = {id(tensor): path for path, tensor in leaves(given)}
        found = ((path, paths.get(id(tensor)) or owned(tensor)) for path, tensor in leaves(result))
        self._handed: list[_Handed] = [(path, source) for path, source in found if source is not None]

    def check(self, result: Any, given: Any, owned: Callable[[str], Tensor]) -> None:
        """Check what a call has returned.

        Args:
            owned: returns a weight or a buffer by its name.

        Raises:
            ConfigError: it is not what other stages were told.
        """
        if (found := form_of(result)) != self._form:
            raise ConfigError(
                f"model: block {self._where} returned {_told(found)}, and {_told(self._form)} when it was observed: "
                f"tensors travel to the other stages, but not what is beside them; return a tensor instead"
            )
        for tensor, dtype in zip(tensors(result), self._dtypes, strict=True):
            if tensor.dtype is not dtype:
                raise ConfigError(
                    f"model: block {self._where} returned a tensor of {tensor.dtype} for this microbatch, and of "
                    f"{dtype} when it was observed, which others may go by; let it always return one type, by .to()"
                )
        for path, source in self._handed:
            if at(result, path) is not (owned(source) if isinstance(source, str) else at(given, source)):
                what = source if isinstance(source, str) else "one of its arguments"
                raise ConfigError(
                    f"model: block {self._where} returned {what} itself when it was observed, and another tensor in "
                    f"its place for this microbatch, which other stages do not get; return a copy by .clone() there"
                )


def check_left(where: str, name: str, tree: Any, observed: Any) -> None:
    """Check what a block has left in an attribute, of which other stages take tensors.

    Raises:
        ConfigError: beside its tensors it is not what it was when it was observed.
    """
    if (found := form_of(tree)) != observed:
        raise ConfigError(
            f"model: block {where} left {_told(found)} in its attribute {name}, and {_told(observed)} when it was "
            f"observed: tensors travel to the other stages, but not what is beside them; leave tensors alone there, as "
            f"many in each forward"
        )


def its_own(result: Any, known: _Tells, left: _Tells, hollow: _Tells) -> Any:
    """Return what a block returns, with aliases where that is what it was given: another time it may not be.

    What has numbers stays what it is, so that the model may decide by it, but for the first: that is what the block
    computes.

    Args:
        known: whether a tensor was there before the block.
        left: whether the block has written it into what it was given, which other stages do not see: what it returns is
            another tensor then.
        hollow: whether it lacks numbers only since a field is not read here, so that elsewhere it has them.
    """
    others: dict[int, Tensor] = {}
    places: dict[Path, Tensor] = {}
    for number, (path, tensor) in enumerate(leaves(result)):
        if left(tensor):
            places[path] = others.setdefault(id(tensor), tensor.clone())
        elif known(tensor) and ((isinstance(tensor, Absent) and not hollow(tensor)) or not number):
            places[path] = others.setdefault(id(tensor), tensor.view_as(tensor))
    return replaced(result, places)


def form_of(tree: Any) -> Any:
    """Return what can be compared of a tree: all but its tensors and the insides of objects."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, float):
        return repr(tree)  # what is no number is as it was
    if isinstance(tree, PLAIN):
        return type(tree), tree
    if isinstance(tree, (tuple, list)):
        return type(tree), tuple([form_of(child) for child in tree])
    if isinstance(tree, Mapping):
        return type(tree), tuple([(key, form_of(child)) for key, child in tree.items()])
    if dataclasses.is_dataclass(tree):
        named = [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
        return type(tree), tuple([(name, form_of(child)) for name, child in named])
    return type(tree), tuple([path for path, _ in leaves(tree)])


def _told(form: Any) -> str:
    """Return a form in so few words that a sentence can hold it."""
    if form is Tensor:
        return "a tensor"
    if isinstance(form, str):
        return form
    kind, inside = form
    if kind in (tuple, list):
        return f"a {kind.__name__} of {', '.join(map(_told, inside[:4]))}{', …' * (len(inside) > 4)}"
    if isinstance(inside, tuple):
        return f"a {kind.__name__}"
    return repr(inside)
