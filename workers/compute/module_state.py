"""What modules hold besides trained weights, as a value: attributes, what is inside of them, hooks and buffers."""

from __future__ import annotations

import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

#: what every module has, which is torch's
OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
BOXES = frozenset((list, dict, set, deque))
#: so many runs show which modules they change
_LOOKS = 2
#: larger ones of these are taken for tables, which nobody changes
MOST_INSIDE = 1024

#: (module, attribute)
Place = tuple[nn.Module, str]


class Attributes:
    """What modules have now: attributes, what is inside of them, and hooks of their calls; not the numbers of tensors.

    Args:
        called: modules whose hooks count; by default the same. A forward may register some, such as those that capture
            outputs.
        places: attributes that are looked into; by default all that can be.
        own: leave out what is torch's: buffers, weights, hooks, modes.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        called: Iterable[nn.Module] | None = None,
        places: Sequence[Place] | None = None,
        *,
        own: bool = False,
    ) -> None:
        self._leaves_out = OF_TORCH if own else frozenset()
        #: by module, its attributes
        self.held = [(module, self._of(module)) for module in modules]
        of_modules = [module for module, _ in self.held]
        self._called = of_modules if called is None else called
        self._hooks = [
            (module, hooks, dict(hooks))
            for module in self._called
            for name, hooks in vars(module).items()
            if "_hooks" in name and isinstance(hooks, dict)
        ]
        self.places = places_in(of_modules) if places is None else places
        inside = [(module, vars(module).get(name)) for module, name in self.places]
        self._inside = [(module, value, state) for module, value in inside if (state := _inside(value)) is not None]

    def now(self) -> Attributes:
        """Return what the same modules have now."""
        modules = [module for module, _ in self.held]
        return Attributes(modules, self._called, self.places, own=bool(self._leaves_out))

    def _of(self, module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in self._leaves_out}

    def changed(self) -> set[nn.Module]:
        """Return the modules that have something else now, beside hooks."""
        return {module for module, _ in self.changed_places()}

    def changed_places(self, is_same: Callable[[Any, Any], bool] = operator.is_) -> set[tuple[nn.Module, str]]:
        """Return where the modules have something else now, by module and attribute; no name: inside of one.

        Args:
            is_same: judges `(now, then)` of an exchanged attribute.
        """
        found = {(module, "") for module, value, state in self._inside if not _same(_inside(value), state)}
        for module, held in self.held:
            now = self._of(module)
            both = now.keys() & held.keys()
            exchanged = {name for name in both if not is_same(now[name], held[name])}
            found |= {(module, name) for name in exchanged | (now.keys() ^ held.keys())}
        return found

    def put_back(self) -> set[nn.Module]:
        """Give the modules what they had, in the same dicts, which others know; return those that had other hooks."""
        for module, held in self.held:
            set_attributes(module, held)
        changed = [(module, hooks, before) for module, hooks, before in self._hooks if hooks.keys() != before.keys()]
        for _, hooks, before in changed:
            hooks.clear()
            hooks.update(before)
        for _, value, state in self._inside:
            _set(value, state)
        return {module for module, _, _ in changed}


def set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module these attributes, and no others but torch's."""
    for name in vars(module).keys() - attributes.keys() - OF_TORCH:
        del vars(module)[name]
    vars(module).update(attributes)


class ModuleState:
    """What modules hold besides trained parameters at this moment: buffers such as running means, counters, modes.

    Tensors are copied, because their versions do not tell which of them a forward writes (batch normalisation does not
    raise them). Restoring replaces tensors; writing the old values in place would change what backward needs.

    Args:
        called: modules whose hooks are kept; also stand-ins for modules of other stages are called.
        places: attributes whose inside is kept too; by default all whose type is known.
        weights: parameters that forwards write.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        called: Sequence[nn.Module] | None = None,
        places: Sequence[Place] | None = None,
        weights: Iterable[nn.Parameter] = (),
    ) -> None:
        self._called = modules if called is None else called
        # The attributes of a ScriptModule cannot be replaced, and its forward does not change them.
        self.modules = modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = Attributes(modules, self._called, places)
        self._buffers = [dict(module._buffers) for module in modules]
        tensors = [
            tensor
            for held in (*(attributes for _, attributes in self._attributes.held), *self._buffers)
            for tensor in held.values()
            if isinstance(tensor, Tensor) and not tensor.requires_grad
        ]
        self._copies = {tensor: tensor.clone() for tensor in tensors}
        self._versions = {tensor: tensor._version for tensor in self._copies}
        #: (weight, copy) of weights that forwards write
        self._weights = [(weight, weight.detach().clone()) for weight in weights]

    def now(self) -> ModuleState:
        """Return the present state of the same modules and weights."""
        weights = [weight for weight, _ in self._weights]
        return ModuleState(self.modules, self._called, self._attributes.places, weights)

    def forget_weights(self) -> None:
        """Do not restore weights: another update has written them."""
        self._weights = []

    def written(self) -> list[nn.Module]:
        """Return the modules that hold something else now, or of which a tensor was written, even with equal values."""
        changed, written = self._attributes.changed(), set(filter(self._was_written, self._copies))
        return [
            module
            for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True)
            if module in changed
            or not _same_objects(module._buffers, buffers)
            or any(isinstance(v, Tensor) and v in written for v in (*attributes.values(), *buffers.values()))
        ]

    def _was_written(self, tensor: Tensor) -> bool:
        same = tensor._version == self._versions[tensor] and tensor.layout is torch.strided
        return not (same and torch.equal(tensor, self._copies[tensor]))

    def counted_in(self, under_way: ModuleState, num_under_way: int, num_since: int) -> str:
        """Name what has changed since then although forwards under way have read it; "" if nothing has.

        Of plain attributes only integers count that grow alike with every forward: others may be notes that nobody
        reads, such as the last shape.

        Args:
            num_under_way, num_since: how many forwards have run to the state `under_way`, and to the present one.
        """
        if any(not torch.equal(weight, before) for weight, before in self._weights):
            return "a parameter"
        pairs = zip(self._attributes.held, self._buffers, under_way._attributes.held, strict=True)
        for (module, attributes), buffers, (_, theirs) in pairs:
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is not buffer or (buffer in self._copies and not torch.equal(buffer, self._copies[buffer])):
                    return f"buffer {name} of a {type(module).__name__}"
            for name, value in attributes.items():
                now, then = vars(module).get(name), theirs.get(name)
                if type(value) is type(now) is type(then) is int and value < min(now, then):
                    if (now - value) * num_under_way == (then - value) * num_since:
                        return f"{name} of a {type(module).__name__}"
        return ""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which the modules have this state; on leaving it they get back the present one."""
        now = self._attributes.now()
        self._attributes.put_back()
        for (module, attributes), buffers in zip(self._attributes.held, self._buffers, strict=True):
            set_attributes(module, self._copied(attributes) | {"_buffers": self._copied(buffers)})
        try:
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Restore this state."""
        for weight, before in self._weights:
            weight.data.copy_(before)  # by `data`: autograd graphs of other microbatches have recorded the version
        for tensor, copy in self._copies.items():
            tensor.data = copy.clone()  # not in place: graphs of other microbatches may have saved the old memory
        self._attributes.put_back()
        for module, buffers in zip(self.modules, self._buffers, strict=True):
            module._buffers.update(buffers)

    def _copied(self, held: Mapping[str, Any]) -> dict[str, Any]:
        return {k: self._copies.get(v, v) if isinstance(v, Tensor) else v for k, v in held.items()}


class ChangingModules:
    """Finds out, by the first two runs of a kind, such as forwards in the same modes, which modules these change.

    Args:
        modules: to be looked at.
        called: as of `ModuleState`.
    """

    def __init__(self, modules: Sequence[nn.Module], called: Sequence[nn.Module]) -> None:
        self._modules, self._called = modules, called
        self._nothing = ModuleState([])
        #: kind of a run -> modules that it changes, each time
        self._seen: dict[Any, list[list[nn.Module]]] = {}
        #: attributes whose inside can be kept; None: not searched yet
        self._places: list[Place] | None = None

    def state(self, kind: Any, weights: Collection[nn.Parameter] = (), known: Iterable[nn.Module] = ()) -> ModuleState:
        """Return the state of the modules that runs of a kind change: of all, until that has been observed.

        Args:
            weights: parameters that they change.
            known: modules that they may change in any case.
        """
        seen = self._seen.get(kind, [])
        if self._places is None:
            self._places = places_in(self._modules)
        if len(seen) < _LOOKS:
            return ModuleState(self._modules, self._called, self._places, weights)
        changing = dict.fromkeys(chain(known, *seen))
        if not (changing or weights):
            return self._nothing
        places = [place for place in self._places if place[0] in changing]
        return ModuleState(list(changing), list(changing), places, weights)

    def note(self, kind: Any, before: ModuleState) -> None:
        """Observe what a run has changed."""
        seen = self._seen.setdefault(kind, [])
        if len(seen) < _LOOKS:
            seen.append(before.written())


def _same_objects(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return some.keys() == others.keys() and all(value is others[name] for name, value in some.items())


def equal(some: Any, other: Any) -> bool:
    """Return whether two values of an attribute are the same object or have equal numbers."""
    if some is other:
        return True
    if type(some) is not type(other):
        return False
    if isinstance(some, Tensor):
        dense = some.layout is torch.strided is other.layout
        return dense and some.dtype == other.dtype and some.device == other.device and torch.equal(some, other)
    return isinstance(some, (bool, int, float, str, torch.Size)) and bool(some == other)


def may_count(module: nn.Module) -> bool:
    """Tell whether a forward may write attributes of a module: those of torch, without anybody's hooks, do not."""
    if isinstance(module, torch.jit.ScriptModule) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return not type(module).__module__.startswith("torch.")


def places_in(modules: Sequence[nn.Module]) -> list[Place]:
    """Return the attributes that can be looked into."""
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if (name not in OF_TORCH or (name == "_modules" and value)) and _inside(value) is not None
        if not (type(value) in BOXES and len(value) > MOST_INSIDE)
    ]


def _generators() -> tuple[Any, ...]:
    """Return the types of generators whose state is got and set alike."""
    numpy = sys.modules.get("numpy")
    return (torch.Generator, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))


def _inside(value: Any) -> Any:
    """Return a copy of what is inside; None: there is nothing, or nothing known."""
    if isinstance(value, _PLAIN):
        return None
    if type(value) in BOXES:
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _generators()):
        return value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
    return None


def _set(value: Any, state: Any) -> None:
    if type(value) in BOXES:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.bit_generator.state = state


def _same(some: Any, other: Any) -> bool:
    if isinstance(some, torch.Tensor):
        return torch.equal(some, other)
    if isinstance(some, dict):
        return list(some) == list(other) and _same([*some.values()], [*other.values()])
    if isinstance(some, (list, deque)):
        return len(some) == len(other) and all(
            a is b or (isinstance(a, _PLAIN) and a == b) for a, b in zip(some, other, strict=True)
        )
    return repr(some) == repr(other)
