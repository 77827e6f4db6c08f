"""The state of modules besides trained weights, as a value: attributes, their contents, hooks and buffers."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .torch_internals import set_version

#: attributes that every module has, which are torch's
OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BOXES = frozenset((list, dict, OrderedDict, set, deque))
#: number of runs that show the modules which they change
_LOOKS = 2

_ABSENT = object()

#: (module, attribute or buffer)
Place = tuple[nn.Module, str]


class Attributes:
    """The present attributes of modules, their contents, and hooks of their calls; not the numbers of tensors.

    Args:
        buffers: whether to keep which tensors their buffers are, too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = False) -> None:
        #: by module, its attributes
        self.held = [(module, dict(vars(module))) for module in modules]
        self._buffers = buffers
        self._inside = [
            (module, value, state)
            for module, held in self.held
            for name, value in held.items()
            # A forward may register hooks, such as hooks that capture outputs.
            if name not in OF_TORCH or name == "_modules" or "_hooks" in name or (buffers and name == "_buffers")
            if (state := _inside(value)) is not None
        ]

    def now(self) -> Attributes:
        """Return the present attributes of the same modules."""
        return Attributes([module for module, _ in self.held], buffers=self._buffers)

    def changed(self) -> set[nn.Module]:
        """Return the modules that have something else now."""
        return {module for module, _ in self.changed_places()}

    def changed_places(self) -> set[Place]:
        """Return where the modules have something else now, by module and attribute; no name: inside of one."""
        found = {(module, "") for module, value, state in self._inside if not _same(_inside(value), state)}
        for module, held in self.held:
            now = vars(module)
            found |= {(module, name) for name in {*now, *held} if now.get(name, _ABSENT) is not held.get(name, _ABSENT)}
        return found

    def put_back(self) -> None:
        """Give the modules these attributes back, in the same dicts, because other objects hold references to them."""
        for module, held in self.held:
            for name in vars(module).keys() - held.keys() - OF_TORCH:
                del vars(module)[name]
            vars(module).update(held)
        for _, value, state in self._inside:
            if not _same(_inside(value), state):  # other threads may read it
                _set(value, state)


class Tensors:
    """The tensors without gradient that modules hold, in buffers and attributes, with copies of their numbers.

    They are copied, because versions do not show every write of a forward: batch normalisation does not raise them,
    nor does `.data`.

    Args:
        weights: parameters besides.
    """

    def __init__(self, modules: Iterable[nn.Module], weights: Iterable[nn.Parameter] = ()) -> None:
        self.held: list[tuple[Place, Tensor]] = [
            ((module, name), value)
            for module in modules
            for held in (module._buffers, vars(module))
            for name, value in held.items()
            if isinstance(value, Tensor) and not value.requires_grad
        ]
        tensors = [*(tensor for _, tensor in self.held), *weights]
        self.copies = {tensor: (tensor.detach().clone(), tensor._version) for tensor in tensors}

    def written(self) -> list[Place]:
        """Return where a tensor was held that has been written since, even with equal numbers."""
        written = {tensor for tensor, (copy, version) in self.copies.items() if _is_written(tensor, copy, version)}
        return [place for place, tensor in self.held if tensor in written]

    def put_back(self) -> None:
        """Give the tensors the numbers that they had; not in place, as graphs may have saved the memory."""
        for tensor, (copy, _) in self.copies.items():
            tensor.data = copy.clone()


def written_since(attributes: Attributes, tensors: Tensors) -> set[Place]:
    """Return where modules have another object or other numbers now."""
    replaced = (place for place, was in tensors.held if getattr(*place, None) is not was)
    return {*attributes.changed_places(), *tensors.written(), *replaced}


class ModuleState:
    """The state of modules besides trained parameters at this moment: buffers such as running means, counters, modes.

    Args:
        weights: parameters that forwards write.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Iterable[nn.Parameter] = ()) -> None:
        self._modules, self._weights = modules, list(weights)
        # The attributes of a ScriptModule cannot be replaced, and its forward does not change them.
        own = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes, self._tensors = Attributes(own, buffers=True), Tensors(modules, self._weights)

    def now(self) -> ModuleState:
        """Return the present state of the same modules and weights."""
        return ModuleState(self._modules, self._weights)

    def forget_weights(self) -> None:
        """Do not restore weights: another update has written them."""
        for weight in self._weights:
            self._tensors.copies.pop(weight, None)
        self._weights = []

    def written(self) -> list[nn.Module]:
        """Return the modules with another state now, or with a written tensor, even with equal values."""
        changed = self._attributes.changed() | {module for module, _ in self._tensors.written()}
        return [module for module in self._modules if module in changed]

    def overwritten(self) -> bool:
        """Return whether a parameter or buffer has other numbers now."""
        return not all(torch.equal(tensor, copy) for tensor, (copy, _) in self._tensors.copies.items())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context that gives the modules this state, and the present state again when it ends."""
        attributes, values = self._attributes.now(), list(map(KeptTensor.now, self._tensors.copies))
        self.put_back()
        try:
            yield
        finally:
            attributes.put_back()
            for value in values:
                value.put()

    def put_back(self) -> None:
        """Restore this state."""
        self._tensors.put_back()
        self._attributes.put_back()


class KeptTensor(NamedTuple):
    """A tensor with the memory that it had at a time, and where a module had it; a weight stays where it is."""

    tensor: Tensor
    data: Tensor
    version: int
    place: Place | None

    @classmethod
    def now(cls, tensor: Tensor, place: Place | None = None) -> KeptTensor:
        """Return the present numbers of a tensor."""
        return cls(tensor, tensor.data, tensor._version, place)

    def put(self) -> None:
        """Let the tensor have this memory, and the module the tensor."""
        self.tensor.data = self.data
        set_version(self.tensor, self.version)
        if self.place is not None and getattr(*self.place, None) is not self.tensor:
            setattr(*self.place, self.tensor)


class ChangingModules:
    """Finds out which modules forwards and steps change, by the first two of each in the same training modes.

    Args:
        modules: of the stage, and stand-ins for modules of other stages, which forwards may hook too.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._nothing = ModuleState([])
        #: (whether of a whole step, training modes) -> modules that it changes, each time
        self._seen: dict[tuple[bool, ...], list[list[nn.Module]]] = {}

    def _changes(self, whole_step: bool) -> list[list[nn.Module]]:
        return self._seen.setdefault((whole_step, *[module.training for module in self._modules]), [])

    def before(
        self, weights: Collection[nn.Parameter] = (), known: Iterable[nn.Module] = (), *, whole_step: bool = False
    ) -> ModuleState:
        """Return the state of the modules that forwards or steps change: of all, until that has been observed.

        Args:
            weights: parameters that they change.
            known: modules that they may change in any case.
        """
        seen = self._changes(whole_step)
        if len(seen) < _LOOKS:
            return ModuleState(self._modules, weights)
        changing = dict.fromkeys(chain(known, *seen))
        return ModuleState(list(changing), weights) if changing or weights else self._nothing

    def note(self, before: ModuleState, *, whole_step: bool = False) -> None:
        """Observe the changes since the state `before`."""
        seen = self._changes(whole_step)
        if len(seen) < _LOOKS:
            seen.append(before.written())


def _is_written(tensor: Tensor, copy: Tensor, version: int) -> bool:
    return not (tensor._version == version and tensor.layout is torch.strided and torch.equal(tensor, copy))


def may_count(module: nn.Module) -> bool:
    """Return whether a forward may write attributes of a module: torch's modules without hooks do not."""
    if isinstance(module, torch.jit.ScriptModule) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return not type(module).__module__.startswith("torch.")


def _generators() -> tuple[Any, ...]:
    """Return the types of generators with the same functions to get and set their state."""
    numpy = sys.modules.get("numpy")
    return (torch.Generator, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))


def _inside(value: Any) -> Any:
    """Return a copy of the contents; None if there are none, or none known."""
    if isinstance(value, _PLAIN):
        return None
    if type(value) in _BOXES:
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _generators()):
        return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
    return None


def _set(value: Any, state: Any) -> None:
    if type(value) in _BOXES:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.bit_generator.state = state


def _same(some: Any, other: Any) -> bool:
    if isinstance(some, Tensor):
        return torch.equal(some, other)
    if isinstance(some, dict):
        some, other = [*some, *some.values()], [*other, *other.values()]
    if isinstance(some, (list, deque)):
        pairs = zip(some, other, strict=False)
        return len(some) == len(other) and all(a is b or (isinstance(a, _PLAIN) and a == b) for a, b in pairs)
    return repr(some) == repr(other)
