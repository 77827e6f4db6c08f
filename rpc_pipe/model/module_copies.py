"""Synchronisation of the copies of a user's modules with edits that the user makes between two calls.

Stages of a whole model compute with copies of its modules, and so do replicas of a stage. Modes, attributes, weights
and buffers that the user changes by hand are changed in the copies too; the copies refer to containers that forwards
only read. Versions and identities show a change; no number of a weight is read. Structural changes (parameters,
modules, hooks, forwards) raise ModelError.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ..dependency import ModelError
from ..workers.compute.modules.module_state import HOOKS, OF_TORCH, PLAIN, OfWeight, fingerprint
from .observe.model_kinds import is_placeholder

#: returns the parts of a module that must stay, by the words that report a change
_Structure = Callable[[nn.Module], dict[str, Any]]
#: name, module of the user, module of the copy
Pairs = list[tuple[str, nn.Module, nn.Module]]


class _ModuleCopy:
    """A module of the user's model and its copy. References are weak, so that neither is kept alive.

    Args:
        copy: the user's module itself, where a stage computes with it.
        structure: the parts of the user's module that must stay.
        weights: names of the parameters that `copy` has copies of.
        changes: whether calls change the user's module too.
        mirrored: names of the buffers that are copied back after every call.
    """

    def __init__(
        self,
        own: nn.Module,
        copy: nn.Module,
        structure: _Structure,
        *,
        weights: Collection[str] = (),
        changes: bool = True,
        mirrored: Collection[str] = (),
    ) -> None:
        self._own, self._copy, self._structure, self._weights = ref(own), ref(copy), structure, weights
        self.user, self._mirrored = id(own), mirrored
        #: whether calls change the user's module
        self.is_changed = changes or bool(mirrored)
        #: containers and objects that the copy refers to; their contents need no comparison
        self._common = {name: value for name, value in vars(own).items() if _is_common(name, value, copy, own)}

    def note(self, anew: bool = False) -> None:
        """Record the state of the user's module if a call may have changed it."""
        if (anew or self.is_changed) and (own := self._own()) is not None:
            self._must_stay, self._noted = self._structure(own), self._state(own)
            self._common = {name: vars(own).get(name) for name in self._common}

    def _state(self, own: nn.Module) -> dict[str, Any]:
        """Return the state that the copy follows, by name."""
        if own is self._copy():
            return {}
        weights = [(name, own._parameters.get(name)) for name in self._weights]
        return fingerprint(own) | {name: OfWeight.now(w) for name, w in weights if w is not None}

    def refuse_change(self) -> None:
        """Raise ModelError if the structure was changed."""
        if (own := self._own()) is not None and (now := self._structure(own)) != self._must_stay:
            what = next(what for what in now if now[what] != self._must_stay[what])
            raise ModelError(f"model: {what.format(type(own).__name__)} after the pipeline was made; make another one")

    def follow(self) -> None:
        """Apply to the copy the changes of the user's module since the last record.

        Raises:
            ModelError: a weight was changed on a device where it is not trained.
        """
        own, made = self._own(), self._copy()
        if own is None or made is None:
            return
        for name, before in self._common.items():
            if (value := vars(own).get(name)) is not before:
                self._common[name] = value
                if vars(made).get(name) is before:  # else forwards write it, as forwards of the user's module may
                    setattr(made, name, value)
        if (now := self._state(own)) == self._noted:
            return
        noted, self._noted = self._noted, now
        for name in [name for name in now | noted if now.get(name) != noted.get(name)]:
            if name in self._weights:
                _follow_weight(name, noted[name], own._parameters[name], made._parameters[name])
            elif (buffer := own._buffers.get(name)) is None or made._buffers.get(name) is None:
                value = vars(own).get(name, buffer)
                setattr(made, name, value.detach().clone() if torch.is_tensor(value) else value)
            elif (held := made._buffers.get(name)) is not None and held is not buffer:
                held.data = buffer.detach().to(held.device, copy=True)  # graphs may have saved the old memory
                increment_version(held)

    def mirror(self) -> None:
        """Copy buffers of the copy, such as running means, back to the user's module, if it is on the same device."""
        own, made = self._own(), self._copy()
        for name in self._mirrored if own is not None and made is not None else ():
            theirs, held = own._buffers.get(name), made._buffers.get(name)  # type: ignore[union-attr]
            if theirs is not None and held is not None and theirs.device == held.device:
                with torch.no_grad():  # counted as a version, for other pipelines of the same model
                    theirs.data = theirs.data if theirs.shape == held.shape else torch.empty_like(held)
                    theirs.copy_(held)


def _is_common(name: str, value: Any, copy: nn.Module, own: nn.Module) -> bool:
    """Return whether a copy of a module has the same container, function or object."""
    is_followed = name in OF_TORCH or name == "forward" or type(value) in PLAIN or torch.is_tensor(value)
    return copy is not own and not is_followed and name in vars(copy) and vars(copy)[name] is value


def _follow_weight(name: str, before: OfWeight, parameter: Any, copy: Any) -> None:
    now, is_written = OfWeight.now(parameter), OfWeight.now(parameter)[:2] != before[:2]
    if now.hooks != before.hooks or (is_written and copy.device != parameter.device):
        raise ModelError(f"model: parameter {name} is written or hooked, with copies on {copy.device}; use pipe.modify")
    if is_written:
        copy.data.copy_(parameter.detach())
        increment_version(copy)  # shows a step under way that it is another
    copy.requires_grad_(parameter.requires_grad)


class ModuleCopies:
    """All copies of a user's modules that this process computes with."""

    def __init__(self) -> None:
        self._modules: list[_ModuleCopy] = []

    def add(
        self,
        pairs: Pairs,
        *,
        runs: bool,
        used: Collection[nn.Module] | None = None,
        mirrored: Collection[str] = (),
        hooked: Collection[str] = (),
    ) -> None:
        """Register the modules of a copy, which has just been made or shares modules with the original.

        Args:
            runs: whether the user's module computes too.
            used: the modules of `copy` that its stage computes with; None: all.
            mirrored: names of the copied buffers that are copied back after every call.
            hooked: names of the modules that forwards register hooks on, as each of them does for itself.
        """
        weights = [_copied(module, made) for _, module, made in pairs]
        for (path, module, made), names in zip(pairs, weights, strict=True):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if made is module:
                self.watch(module, _parts)
                continue
            stays = _parts if path in hooked else structure
            stays = stays if used is None or made in used else _nothing
            buffers = [name for name in module._buffers if (f"{path}.{name}" if path else name) in mirrored]
            changes = runs or any(weights)
            self._modules.append(_ModuleCopy(module, made, stays, weights=names, changes=changes, mirrored=buffers))

    def watch(self, module: nn.Module, structure: _Structure) -> None:
        """Refuse changes of a user's module that other stages would not have; calls may make them themselves."""
        self._modules.append(_ModuleCopy(module, module, structure))

    def begin(self) -> None:
        """Record the state of all modules, when every copy has been made."""
        # A module that a stage computes with is changed by calls, not by hand, for its copies on other stages, too.
        changed = {module.user for module in self._modules if module.is_changed}
        for module in self._modules:
            module.is_changed = module.user in changed
            module.note(anew=True)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context for a call: copies are updated before it; changes that it makes are recorded after it."""
        for module in self._modules:
            module.refuse_change()
        for module in self._modules:
            module.follow()
        try:
            yield
        finally:
            for module in self._modules:
                module.mirror()
            for module in self._modules:
                module.note()


def paired(own: nn.Module, copy: nn.Module) -> Pairs:
    """Return the modules of a module by name, with the modules of its copy."""
    return [(path, module, made) for (path, module), made in zip(own.named_modules(), copy.modules(), strict=True)]


def _copied(own: nn.Module, copy: nn.Module) -> list[str]:
    """Return the names of a module's parameters that `copy` has copies of."""
    held = [(name, own._parameters.get(name), other) for name, other in copy._parameters.items() if other is not None]
    return [name for name, parameter, other in held if other is not parameter and not is_placeholder(other)]


def _nothing(module: nn.Module) -> dict[str, Any]:
    return {}


def structure(module: nn.Module) -> dict[str, Any]:
    """Return the parts with changes that cannot be followed."""
    held = module.__dict__
    return _parts(module) | {
        "the forward of a {} was set": id(held.get("forward")),
        "a hook of a {} was registered or removed": [len(held[name]) for name in HOOKS],
        "a buffer of a {} was registered or removed": len(held["_buffers"]),
    }


def _parts(module: nn.Module) -> dict[str, Any]:
    """Return the part of `structure` that is of parameters and members."""
    parts = [id(each) for held in (module._parameters, module._modules) for each in held.values()]
    return {"a parameter or module of a {} was exchanged, registered or removed": parts}


def unnamed_parts(module: nn.Module) -> dict[str, Any]:
    """Return the same of a module of a list; its parameters may get other names, as when they are pruned."""
    return {what: set(parts) for what, parts in _parts(module).items()}
