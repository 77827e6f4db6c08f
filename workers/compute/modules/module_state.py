"""The state of modules besides trained weights, as a value, and the search for its changes by the first two runs."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import numpy
import torch
from torch import Tensor, nn

from ....dependency import Kind
from .torch_internals import set_version

#: attributes that every module has, which are torch's
OF_TORCH = frozenset(vars(nn.Module()))
#: number of runs that show their changes, draws and writes
LOOKS = 2
#: behind the name of an attribute: its contents
INSIDE = "[]"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BOXES = frozenset((list, dict, OrderedDict, set, deque))
#: generators of random numbers besides Python's
_GENERATORS: tuple[Any, ...] = (torch.Generator, numpy.random.Generator, numpy.random.RandomState)
_ABSENT = object()

#: (module, attribute or buffer)
Place = tuple[nn.Module, str]


class ModuleState:
    """The state of modules at this moment: attributes and their contents, hooks, modes, buffers.

    The numbers of tensors without gradient are copied, because versions do not show every write of a forward: batch
    normalisation does not raise them, nor does `.data`.

    Args:
        weights: parameters that forwards write.
        numbers: whether to keep numbers.

    Attributes:
        key: the training modes, and the kind of the run that `Probe` asks for.
    """

    key: tuple[bool, ...] = ()

    def __init__(
        self, modules: Iterable[nn.Module], weights: Iterable[nn.Parameter] = (), *, numbers: bool = True
    ) -> None:
        self.modules, self._weights, self._numbers = list(modules), list(weights), numbers
        # The attributes of a ScriptModule cannot be replaced, and its forward does not change them.
        own = (module for module in self.modules if not isinstance(module, torch.jit.ScriptModule))
        self._held = [(module, dict(vars(module))) for module in own]
        self._inside = [
            ((module, name + INSIDE), value, state)
            for module, held in self._held
            for name, value in held.items()
            # A forward may register hooks, such as hooks that capture outputs.
            if name not in OF_TORCH or name == "_modules" or name == "_buffers" or "_hooks" in name
            if (state := contents(value)) is not None
        ]
        self._tensors: list[tuple[Place, Tensor]] = [
            ((module, name), value)
            for module in (self.modules if numbers else ())
            for held in (module._buffers, vars(module))
            for name, value in held.items()
            if isinstance(value, Tensor) and not value.requires_grad
        ]
        kept = chain((tensor for _, tensor in self._tensors), self._weights)
        self._copies = {tensor: (tensor.detach().clone(), tensor._version) for tensor in kept}

    def now(self) -> ModuleState:
        """Return the present state of the same modules and weights."""
        return ModuleState(self.modules, self._weights, numbers=self._numbers)

    def forget_weights(self) -> None:
        """Do not restore weights: another update has written them."""
        for weight in self._weights:
            self._copies.pop(weight, None)
        self._weights = []

    def written(self) -> set[Place]:
        """Return where a tensor was held that has been written since, even with equal numbers."""
        written = {t for t, (copy, version) in self._copies.items() if _is_written(t, copy, version)}
        return {place for place, tensor in self._tensors if tensor in written}

    def changed(self) -> set[Place]:
        """Return where the modules have something else now, or a written tensor."""
        replaced = {place for place, was in self._tensors if getattr(*place, None) is not was}
        return self.changed_attributes() | replaced | self.written()

    def changed_attributes(self) -> set[Place]:
        """Return the attributes that are others now, or have other contents (`INSIDE`)."""
        found = {place for place, value, state in self._inside if not _same(contents(value), state)}
        for module, held in self._held:
            now = vars(module)
            found |= {(module, name) for name in {*now, *held} if now.get(name, _ABSENT) is not held.get(name, _ABSENT)}
        return found

    def overwritten(self, modules: Collection[nn.Module]) -> bool:
        """Return whether a parameter, or a buffer of some modules, has other numbers now."""
        held, own = {t for _, t in self._tensors}, set(modules)
        elsewhere = held - {t for (module, _), t in self._tensors if module in own}
        return not all(torch.equal(t, copy) for t, (copy, _) in self._copies.items() if t not in elsewhere)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context that gives the modules this state, and the present state again when it ends."""
        present, values = ModuleState(self.modules, numbers=False), list(map(KeptTensor.now, self._copies))
        self.put_back()
        try:
            yield
        finally:
            present.put_back()
            for value in values:
                value.put()

    def put_back(self) -> None:
        """Restore this state, in the same dicts, because other objects hold references to them.

        Tensors get other memory, as graphs may have saved theirs.
        """
        for tensor, (copy, _) in self._copies.items():
            tensor.data = copy.clone()
        for module, held in self._held:
            for name in vars(module).keys() - held.keys() - OF_TORCH:
                del vars(module)[name]
            vars(module).update(held)
        for _, value, state in self._inside:
            if not _same(contents(value), state):  # other threads may read it
                _fill(value, state)


class Probe:
    """Observes the first two runs in the same training modes: which modules they change, and where.

    Args:
        modules: of a stage, and stand-ins for modules of other stages, which forwards may hook too.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._nothing = ModuleState([])
        #: by key of `ModuleState`: number of observed runs, and the modules that these have changed
        self._runs = Counter[tuple[bool, ...]]()
        self._changing: defaultdict[tuple[bool, ...], dict[nn.Module, None]] = defaultdict(dict)

    def _key(self, whole_step: bool) -> tuple[bool, ...]:
        return whole_step, *[module.training for module in self._modules]

    def is_due(self) -> bool:
        """Return whether the next forward in these modes is to be observed."""
        return self._runs[self._key(False)] < LOOKS

    def is_of_now(self, before: ModuleState) -> bool:
        """Return whether modules have the training modes that they had in the state `before`."""
        return before.key == self._key(False)

    def before(
        self, weights: Collection[nn.Parameter] = (), known: Iterable[nn.Module] = (), *, whole_step: bool = False
    ) -> ModuleState:
        """Return the state of the modules that forwards or steps change: of all, until that has been observed.

        Args:
            weights: parameters that they change.
            known: modules that they may change in any case.
        """
        is_due = self._runs[key := self._key(whole_step)] < LOOKS
        changing = dict.fromkeys(chain(known, self._modules if is_due else self._changing[key]))
        if not changing and not weights:
            return self._nothing
        state = ModuleState(changing, weights)
        state.key = key if is_due else ()
        return state

    def note(self, before: ModuleState) -> set[Place]:
        """Return the changes of an observed run since the state `before`; nothing of any other run."""
        if not before.key or self._runs[before.key] == LOOKS:
            return set()
        self._runs[before.key] += 1
        changed = before.changed()
        self._changing[before.key] |= dict.fromkeys(module for module, _ in changed)
        return changed


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


class KeptAttribute(NamedTuple):
    """The value of an attribute that forwards set to a new tensor, without a copy. None: another forward unsets it."""

    place: Place
    value: Tensor | None

    def put(self) -> None:
        """Let the module have the value."""
        setattr(*self.place, self.value)


def may_count(module: nn.Module) -> bool:
    """Return whether a forward may write attributes of a module: torch's modules without hooks do not."""
    if isinstance(module, torch.jit.ScriptModule) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return not type(module).__module__.startswith("torch.")


def _is_written(tensor: Tensor, copy: Tensor, version: int) -> bool:
    return not (tensor._version == version and tensor.layout is torch.strided and torch.equal(tensor, copy))


def contents(value: Any) -> Any:
    """Return a copy of the contents, or a generator's state; None if there are none, or none known."""
    if isinstance(value, _PLAIN):
        return None
    if type(value) in _BOXES:
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _GENERATORS):
        return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
    return None


def _fill(value: Any, state: Any) -> None:
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
    if type(some) in _BOXES and not some:  # as most tables of hooks
        return not other
    if isinstance(some, dict):
        some, other = [*some, *some.values()], [*other, *other.values()]
    if isinstance(some, (list, deque)):
        pairs = zip(some, other, strict=False)
        return len(some) == len(other) and all(a is b or (isinstance(a, _PLAIN) and a == b) for a, b in pairs)
    return repr(some) == repr(other)


#: types of attributes that are changed by hand
PLAIN = frozenset((bool, int, float, str))
#: where a module has the hooks of its calls
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OfWeight(NamedTuple):
    """A value that differs if a weight was changed, except through `.data`."""

    version: int
    address: int
    trained: bool
    #: how many its gradient has
    hooks: int

    @classmethod
    def now(cls, weight: Tensor) -> OfWeight:
        hooks = len(weight._backward_hooks or ()) + len(getattr(weight, "_post_accumulate_grad_hooks", None) or ())
        return cls(weight._version, weight.data_ptr() * Kind.stay, weight.requires_grad, hooks)


def fingerprint(module: nn.Module, *, tensors: bool = True) -> dict[str, Any]:
    """Return values that differ if a module was changed by hand, by name: mode, plain attributes, and buffers.

    Args:
        tensors: also tensors that are other attributes.
    """
    held = vars(module)
    found: dict[str, Any] = {"training": held.get("training")}
    for name in held.keys() - OF_TORCH:
        value = held[name]
        if type(value) in PLAIN:
            found[name] = value
        elif tensors and isinstance(value, Tensor):
            found[name] = _OfTensor(value)
    for name, buffer in (held.get("_buffers") or {}).items():
        if buffer is not None:
            found[name] = _OfTensor(buffer)
    return found


class _OfTensor:
    """A value that differs if a tensor was exchanged or written, except through `.data` or numpy."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = ref(tensor)  # no `id`, which another one gets when this is gone
        self._version = -1 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _OfTensor):
            return False
        return self._tensor() is other._tensor() and self._version == other._version
