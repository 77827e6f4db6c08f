"""Synchronisation of the copies of a user's modules: what the user changes between two calls is changed in them too.

Stages of a model with its own forward compute with copies of its modules, and so do replicas of a stage. A user who
changes a mode, a plain attribute, a weight or a buffer by hand expects the pipeline to follow, as one process would.
What cannot be followed is refused: parameters, modules, hooks and forwards that were added, removed or replaced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.by_hand import HOOKS, OfWeight, fingerprint
from ..workers.compute.digest import digest, memory_of
from .observe.given import is_placeholder

if TYPE_CHECKING:
    from .replay.observed_stage import ObservedStage


#: returns what must stay of a module, by the words that say that it was changed
_Structure = Callable[[nn.Module], dict[str, Any]]


class _Copy:
    """A user's module and one copy, module by module. References are weak, so that nothing is kept alive.

    Args:
        runs: whether the user's own modules compute too, and so change without the user.
    """

    def __init__(self, own: nn.Module, copy: nn.Module, runs: bool) -> None:
        self._modules = [
            (ref(module), ref(other))
            for module, other in zip(own.modules(), copy.modules(), strict=True)
            if module is not other and not isinstance(module, torch.jit.ScriptModule)
        ]
        self._numbers = {id(module()): number for number, (module, *_) in enumerate(self._modules)}
        others = dict(copy.named_parameters(remove_duplicate=False))
        pairs = [(name, parameter, others.get(name)) for name, parameter in own.named_parameters()]
        self._parameters = [
            (name, ref(parameter), ref(other))
            for name, parameter, other in pairs
            if other is not None and other is not parameter and not is_placeholder(other)
        ]
        self._runs = runs or bool(self._parameters)
        self._noted: list[dict[str, Any]] = []
        self._weights: list[Any] = []

    def note(self, anew: bool = False) -> None:
        """Record the state of the user's modules, if something else than the user may have changed it."""
        if anew or self._runs:
            self._noted = [_fingerprint(module()) for module, _ in self._modules]
            self._weights = [_of_weight(parameter()) for _, parameter, _ in self._parameters]

    def note_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Record the buffers of modules that the pipeline has written."""
        for module in modules:
            if (number := self._numbers.get(id(module))) is not None:
                self._noted[number] = _fingerprint(module)

    def follow(self) -> None:
        """Apply to the copy what has changed in the user's modules since the last record."""
        changed = False
        for (own, other), noted in zip(self._modules, self._noted, strict=True):
            module, made = own(), other()
            if module is None or made is None or (now := _fingerprint(module)) == noted:
                continue
            changed = True
            for name in [name for name, value in now.items() if value != noted.get(name)]:
                buffer, held = module._buffers.get(name), made._buffers.get(name)
                if buffer is None:
                    setattr(made, name, now[name])  # a copy, if it is a container
                elif held is not None and held is not buffer:  # autograd graphs may have saved the old memory
                    held.data = buffer.detach().to(held.device, copy=True)
        for (name, theirs, mine), before in zip(self._parameters, self._weights, strict=True):
            parameter, mine_now = theirs(), mine()
            if parameter is None or mine_now is None or _of_weight(parameter) == before:
                continue
            changed = True
            _follow_weight(name, parameter, mine_now, before)
        if changed:
            self.note(True)


class _BufferMirror:
    """Copies buffers of a stage, such as running means, back to the user's module.

    Args:
        stage: it has the valid values of its `buffers`.
    """

    def __init__(self, own: nn.Module, stage: ObservedStage) -> None:
        self._buffers = [
            (ref(module), ref(made), name)
            for (prefix, module), made in zip(own.named_modules(), stage.module.modules(), strict=True)
            for name, buffer in module._buffers.items()
            if made is not module and buffer is not None and (f"{prefix}.{name}" if prefix else name) in stage.buffers
        ]

    def reflect(self) -> Iterator[nn.Module]:
        """Copy the buffers, if they are on the device of the user's; yield the user's modules."""
        for own, other, name in self._buffers:
            module, made = own(), other()
            if module is None or made is None:
                continue
            theirs, held = module._buffers.get(name), made._buffers.get(name)
            if theirs is not None and held is not None and theirs.device == held.device:
                with torch.no_grad():  # counted as a version, for other pipelines of the same model
                    theirs.data = theirs.data if theirs.shape == held.shape else torch.empty_like(held)
                    theirs.copy_(held)
                yield module


class ModuleCopies:
    """All copies of a user's modules with which this process computes."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._mirrors: list[_BufferMirror] = []
        #: by id: a module, whether it computes and so changes by itself, and what must stay of it
        self._watched: dict[int, tuple[ref[nn.Module], bool, _Structure]] = {}
        #: by id: what must stay, as it was
        self._structures: dict[int, dict[str, Any]] = {}

    def add(self, own: nn.Module, copy: nn.Module, *, runs: bool, used: Collection[nn.Module] | None = None) -> None:
        """Register `copy`, which has just been made of `own`, or of which some modules are those of `own`.

        Args:
            used: the modules of `copy` with which its stage computes; None: all.
        """
        self._copies.append(_Copy(own, copy, runs))
        for module, made in zip(own.modules(), copy.modules(), strict=True):
            if used is not None and made not in used:
                continue
            if made is module:
                self.watch_own(module, _parts)
            elif not isinstance(module, torch.jit.ScriptModule):
                self.watch(module, runs)

    def mirror(self, own: nn.Module, stage: ObservedStage) -> None:
        """Copy buffers of a stage back to `own` after every call."""
        self._mirrors.append(_BufferMirror(own, stage))

    def watch(self, module: nn.Module, runs: bool = True) -> None:
        """Refuse structural changes of a module; `runs`: except those that it makes itself in a call."""
        self._watched[id(module)] = ref(module), runs, _structure

    def watch_own(self, module: nn.Module, structure: _Structure) -> None:
        """Refuse other parameters and members of a user's module that a stage uses: no stage would have them."""
        self._watched[id(module)] = ref(module), True, structure

    def begin(self) -> None:
        """Record the state of all modules, when every copy has been made."""
        for copied in self._copies:
            copied.note(True)
        self._note_structures()

    def _note_structures(self, runs_only: bool = False) -> None:
        for key, (own, runs, structure) in self._watched.items():
            if (runs or not runs_only) and (module := own()) is not None:
                self._structures[key] = structure(module)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context for a call: copies are updated before it; changes that it makes are recorded after it."""
        for key, (own, _, structure) in self._watched.items():
            if (module := own()) is not None and (now := structure(module)) != (before := self._structures[key]):
                raise _changed(next(what for what in now if now[what] != before[what]), type(module).__name__)
        for copied in self._copies:
            copied.follow()
        try:
            yield
        finally:
            written = [module for mirror in self._mirrors for module in mirror.reflect()]
            for copied in self._copies:
                copied.note()
                copied.note_buffers(written)
            self._note_structures(runs_only=True)


def _fingerprint(module: nn.Module | None) -> dict[str, Any]:
    return {} if module is None else fingerprint(module, closely=True)


def _structure(module: nn.Module) -> dict[str, Any]:
    """Return what cannot be followed."""
    held = module.__dict__
    return _parts(module) | {
        "the forward of a {} was set": id(held.get("forward")),
        "a hook of a {} was registered or removed": [len(held[name]) for name in HOOKS],
        "a buffer of a {} was registered or removed": len(held["_buffers"]),
    }


def _parts(module: nn.Module) -> dict[str, Any]:
    """Return the part of `_structure` that is of parameters and members."""
    parts = [id(each) for held in (module._parameters, module._modules) for each in held.values()]
    return {"a parameter or module of a {} was exchanged, registered or removed": parts}


def unnamed_parts(module: nn.Module) -> dict[str, Any]:
    """Return the same of a module of a list, whose parameters may get other names, as when they are pruned."""
    return {what: set(parts) for what, parts in _parts(module).items()}


def _changed(what: str, kind: str) -> ModelError:
    return ModelError(
        f"model: {what.format(kind)} after the pipeline was made, and other workers or stages "
        "would not know of it: do so before, or make another pipeline of the model; numbers of weights may be changed"
    )


def _follow_weight(name: str, parameter: nn.Parameter, made: nn.Parameter, before: Any) -> None:
    now, _ = _of_weight(parameter)
    noted, _ = before
    if now.hooks != noted.hooks:
        raise ModelError(
            f"model: a hook of parameter {name} was registered or removed, of which other workers have copies: "
            "do so before the pipeline is made"
        )
    if made.device != parameter.device and now[:2] != noted[:2]:
        raise ModelError(
            f"model: parameter {name} was changed on {parameter.device}, where it is not trained: stages compute by "
            f"copies on {made.device}; move the model there before the pipeline is made"
        )
    with torch.no_grad():
        made.data.copy_(parameter)
    made.requires_grad_(parameter.requires_grad)


def _of_weight(parameter: Tensor | None) -> Any:
    """Return a state that differs if a weight was written, even through `.data`, which keeps its version."""
    if parameter is None:
        return ()
    # All of it counts, where no device is waited for: of a large weight a sample would miss a row.
    if parameter.is_cpu and not is_placeholder(parameter) and parameter.is_contiguous():
        return OfWeight.now(parameter), zlib.crc32(memory_of(parameter))
    return OfWeight.now(parameter), digest([parameter])
