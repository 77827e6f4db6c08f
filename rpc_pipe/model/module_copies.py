"""Synchronisation of the copies of a user's modules: what the user changes between two calls is changed in them too.

Stages of a model with its own forward compute with copies of its modules, and so do replicas of a stage. A user who
changes a mode, a plain attribute, a weight or a buffer by hand expects the pipeline to follow, as one process would.
What cannot be followed is refused: parameters, modules, hooks and forwards that were added, removed or replaced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.by_hand import HOOKS, OfWeight, fingerprint
from ..workers.compute.digest import digest, memory_of
from .observe.given import is_placeholder

#: returns what must stay of a module, by the words that say that it was changed
_Structure = Callable[[nn.Module], dict[str, Any]]


class _Followed:
    """A module of the user's, and the copy that follows it. References are weak, so that nothing is kept alive.

    Args:
        copy: `own` itself, where a stage computes by it.
        structure: what must stay of the user's module.
        runs: whether the user's module computes too, and so changes without the user.
        mirrored: names of the buffers that are copied back after every call.
    """

    def __init__(
        self, own: nn.Module, copy: nn.Module, structure: _Structure, runs: bool, mirrored: Sequence[str] = ()
    ) -> None:
        self._own, self._copy, self._structure, self._mirrored = ref(own), ref(copy), structure, mirrored
        self._is_copied, self._changes = own is not copy, runs or bool(mirrored)
        self._must_stay: dict[str, Any] = {}
        self._noted: dict[str, Any] = {}

    def note(self, anew: bool = False) -> None:
        """Record the state of the user's module, if something else than the user may have changed it."""
        if (anew or self._changes) and (own := self._own()) is not None:
            self._must_stay = self._structure(own)
            self._noted = fingerprint(own, closely=True) if self._is_copied else {}

    def refuse_change(self) -> None:
        """Refuse what cannot be followed.

        Raises:
            ModelError: it was changed.
        """
        if (own := self._own()) is not None and (now := self._structure(own)) != self._must_stay:
            what = next(what for what in now if now[what] != self._must_stay[what])
            raise ModelError(
                f"model: {what.format(type(own).__name__)} after the pipeline was made, and other workers or stages "
                "would not know of it: do so before, or make another pipeline of the model; numbers of weights may be "
                "changed"
            )

    def follow(self) -> None:
        """Apply to the copy what has changed in the user's module since the last record."""
        own, made = self._own(), self._copy()
        if not self._is_copied or own is None or made is None or (now := fingerprint(own, closely=True)) == self._noted:
            return
        for name in [name for name, value in now.items() if value != self._noted.get(name)]:
            buffer, held = own._buffers.get(name), made._buffers.get(name)
            if buffer is None:
                setattr(made, name, now[name])  # a copy, if it is a container
            elif held is not None and held is not buffer:  # autograd graphs may have saved the old memory
                held.data = buffer.detach().to(held.device, copy=True)
        self._noted = fingerprint(own, closely=True)

    def mirror(self) -> None:
        """Copy buffers of the copy, such as running means, back to the user's module, if it is on the same device."""
        own, made = self._own(), self._copy()
        for name in self._mirrored if own is not None and made is not None else ():
            theirs, held = own._buffers.get(name), made._buffers.get(name)  # type: ignore[union-attr]
            if theirs is not None and held is not None and theirs.device == held.device:
                with torch.no_grad():  # counted as a version, for other pipelines of the same model
                    theirs.data = theirs.data if theirs.shape == held.shape else torch.empty_like(held)
                    theirs.copy_(held)


class _Weight:
    """A parameter of the user's, and the copy that follows it."""

    def __init__(self, name: str, own: nn.Parameter, copy: nn.Parameter) -> None:
        self._name, self._own, self._copy = name, ref(own), ref(copy)

    def note(self) -> None:
        self._noted = _of_weight(self._own())

    def follow(self) -> None:
        """Apply to the copy what has changed since the last record.

        Raises:
            ModelError: it cannot be followed.
        """
        parameter, made = self._own(), self._copy()
        if parameter is None or made is None or _of_weight(parameter) == self._noted:
            return
        (now, _), (noted, _) = _of_weight(parameter), self._noted
        if now.hooks != noted.hooks:
            raise ModelError(
                f"model: a hook of parameter {self._name} was registered or removed, of which other workers have "
                "copies: do so before the pipeline is made"
            )
        if made.device != parameter.device and now[:2] != noted[:2]:
            raise ModelError(
                f"model: parameter {self._name} was changed on {parameter.device}, where it is not trained: stages "
                f"compute by copies on {made.device}; move the model there before the pipeline is made"
            )
        with torch.no_grad():
            made.data.copy_(parameter)
        made.requires_grad_(parameter.requires_grad)


class ModuleCopies:
    """All copies of a user's modules with which this process computes."""

    def __init__(self) -> None:
        self._modules: list[_Followed] = []
        self._weights: list[_Weight] = []

    def add(
        self,
        own: nn.Module,
        copy: nn.Module,
        *,
        runs: bool,
        used: Collection[nn.Module] | None = None,
        mirrored: Collection[str] = (),
    ) -> None:
        """Register `copy`, which has just been made of `own`, or of which some modules are those of `own`.

        Args:
            used: the modules of `copy` with which its stage computes; None: all.
            mirrored: names of the buffers that are copied back after every call, of those that are copies.
        """
        others = dict(copy.named_parameters(remove_duplicate=False))
        pairs = ((name, parameter, others.get(name)) for name, parameter in own.named_parameters())
        weights = [
            _Weight(name, parameter, other)
            for name, parameter, other in pairs
            if other is not None and other is not parameter and not is_placeholder(other)
        ]
        self._weights += weights
        for (path, module), made in zip(own.named_modules(), copy.modules(), strict=True):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if made is module:
                self.watch(module, _parts)
                continue
            stays = structure if used is None or made in used else _nothing
            buffers = [name for name in module._buffers if (f"{path}.{name}" if path else name) in mirrored]
            self._modules.append(_Followed(module, made, stays, runs or bool(weights), buffers))

    def watch(self, module: nn.Module, structure: _Structure) -> None:
        """Refuse changes of a user's module that other stages would not have; calls may make them themselves."""
        self._modules.append(_Followed(module, module, structure, runs=True))

    def begin(self) -> None:
        """Record the state of all modules, when every copy has been made."""
        for module in self._modules:
            module.note(anew=True)
        for weight in self._weights:
            weight.note()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context for a call: copies are updated before it; changes that it makes are recorded after it."""
        followed: list[_Followed | _Weight] = [*self._modules, *self._weights]
        for module in self._modules:
            module.refuse_change()
        for each in followed:
            each.follow()
        try:
            yield
        finally:
            for module in self._modules:
                module.mirror()
            for each in followed:
                each.note()


def _nothing(module: nn.Module) -> dict[str, Any]:
    return {}


def structure(module: nn.Module) -> dict[str, Any]:
    """Return what cannot be followed."""
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
    """Return the same of a module of a list, whose parameters may get other names, as when they are pruned."""
    return {what: set(parts) for what, parts in _parts(module).items()}


def _of_weight(parameter: Tensor | None) -> Any:
    """Return a state that differs if a weight was written, even through `.data`, which keeps its version."""
    if parameter is None:
        return ()
    # All of it counts, where no device is waited for: of a large weight a sample would miss a row.
    if parameter.is_cpu and not is_placeholder(parameter) and parameter.is_contiguous():
        return OfWeight.now(parameter), zlib.crc32(memory_of(parameter))
    return OfWeight.now(parameter), digest([parameter])
