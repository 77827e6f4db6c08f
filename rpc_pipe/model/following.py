"""Copies of a user's modules follow them: what is changed there by hand between two calls is changed here.

Stages of a model with a forward of its own compute by copies of its modules, and so do replicas of a stage. In one
process all of it would be the user's own modules: modes, a factor in an attribute, weights and buffers that are loaded.
What copies cannot follow is refused: other parameters, modules, hooks and forwards than those they were made of.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ConfigError
from ..workers.compute.by_hand import HOOKS, PLAIN, OfWeight
from ..workers.compute.digest import digest
from ..workers.compute.inner_state import OF_TORCH
from .absent import Absent
from .undoing import Writes

_NONE: list[Any] = []
#: what is changed by hand inside, such as a list of names
_BOXES = frozenset((list, dict, set))
#: larger ones are taken for tables, which nobody changes
_MOST = 64


class _Group:
    """The modules of one that a user has, and those of a copy, by weak references: nothing is kept alive for this.

    Args:
        runs: whether the user's own modules compute too, and so change by themselves.
    """

    def __init__(self, own: nn.Module, copy: nn.Module, runs: bool) -> None:
        self._modules = [
            (ref(module), ref(other), *_names_of(module))
            for module, other in zip(own.modules(), copy.modules(), strict=True)
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._numbers = {id(module()): number for number, (module, *_) in enumerate(self._modules)}
        others = dict(copy.named_parameters(remove_duplicate=False))
        pairs = [(name, parameter, others.get(name)) for name, parameter in own.named_parameters()]
        self._parameters = [
            (name, ref(parameter), ref(other))
            for name, parameter, other in pairs
            if other is not None and other is not parameter and not isinstance(other, Absent)
        ]
        self._runs = runs or bool(self._parameters)
        self._noted: list[tuple[list[Any], list[Any], list[Any]]] = []
        self._weights: list[Any] = []

    def note(self, anew: bool = False) -> None:
        """Take note of the user's modules as they are, if that may have changed otherwise than by hand."""
        if anew or self._runs:
            self._noted = [_state(module(), names, boxes) for module, _, names, boxes in self._modules]
            self._weights = [_of_weight(parameter()) for _, parameter, _ in self._parameters]

    def note_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Take note of buffers that it was not the user who has changed."""
        for module in modules:
            if (number := self._numbers.get(id(module))) is not None:
                self._noted[number] = (*self._noted[number][:2], _state(module, [], [])[2])

    def follow(self) -> None:
        """Change the copies as the user's modules have been changed since."""
        changed = False
        for (own, other, names, boxes), noted in zip(self._modules, self._noted, strict=True):
            module, made = own(), other()
            if module is None or made is None or (now := _state(module, names, boxes)) == noted:
                continue
            changed = True
            for name, value, before in zip(names + boxes, now[0] + now[1], noted[0] + noted[1], strict=True):
                if value != before and value is not None:
                    setattr(made, name, copy.copy(value))
            for (name, buffer), before in zip(module._buffers.items(), noted[2], strict=False):
                held = made._buffers.get(name)
                if buffer is not None and held is not None and held is not buffer and _of_buffer(buffer) != before:
                    held.data = buffer.detach().to(held.device, copy=True)  # others may have saved what it was
        for (name, theirs, mine), before in zip(self._parameters, self._weights, strict=True):
            parameter, mine_now = theirs(), mine()
            if parameter is None or mine_now is None or _of_weight(parameter) == before:
                continue
            changed = True
            _follow_weight(name, parameter, mine_now, before)
        if changed:
            self.note(True)


class _Mirror:
    """Lets a user's buffers be what a stage has made of its copies: running means belong to the trained weights.

    Args:
        buffers: names of those that are this stage's to tell.
        writes: those of the copy's that forwards have been seen to write, which need not count as versions.
    """

    def __init__(self, own: nn.Module, copy: nn.Module, buffers: Collection[str], writes: Writes) -> None:
        self._buffers = [
            (ref(module), ref(made), name)
            for (prefix, module), made in zip(own.named_modules(), copy.modules(), strict=True)
            for name, buffer in module._buffers.items()
            if buffer is not None and (f"{prefix}.{name}" if prefix else name) in buffers
        ]
        self._seen: list[Any] = [_of_buffer(made()._buffers[name]) for _, made, name in self._buffers]  # type: ignore[union-attr]
        self._writes = ref(writes)

    def reflect(self) -> Iterator[nn.Module]:
        """Copy what has been written, and yield the user's module; elsewhere the weights are not the user's either."""
        writes = self._writes()
        for i, (own, other, name) in enumerate(self._buffers):
            module, made = own(), other()
            if writes is None or module is None or made is None:
                continue
            theirs, held = module._buffers.get(name), made._buffers.get(name)
            now = _of_buffer(held)
            if theirs is None or held is None or (now == self._seen[i] and (made, name) not in writes.buffers):
                continue
            self._seen[i] = now
            if theirs.device == held.device:
                with torch.no_grad():  # counted as a version, for other pipelines of the same model
                    theirs.data = theirs.data if theirs.shape == held.shape else torch.empty_like(held)
                    theirs.copy_(held)
                yield module


class Following:
    """All copies of a user's modules that this process computes by."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._mirrors: list[_Mirror] = []
        #: by id: modules of which others are copies, whether they compute too, and what they consist of
        self._forms: dict[int, list[Any]] = {}
        #: of modules by which stages compute themselves: the kind, where it has parameters or members, and what they
        #: have been so far; and all of them as they are
        self._held: list[tuple[str, dict[str, Any], set[int]]] = []
        self._parts: list[int] = []

    def keep(self, module: nn.Module) -> None:
        """Refuse new parameters and members of a user's module that a stage computes by itself: no stage has them, or
        another one, perhaps in another process."""
        for part in module.modules():
            held = [part.__dict__[name] for name in ("_parameters", "_modules")]
            self._held += [(type(part).__name__, each, set(map(id, each.values()))) for each in held]

    def add(self, own: nn.Module, copy: nn.Module, *, runs: bool) -> None:
        """Let `copy` follow `own`, of which it has just been made."""
        self._groups.append(_Group(own, copy, runs))
        for module in own.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.watch(module, runs)

    def mirror(self, own: nn.Module, copy: nn.Module, buffers: Collection[str], writes: Writes) -> None:
        """Let buffers of `own` be what becomes of those of `copy`. Arguments as of `_Mirror`."""
        self._mirrors.append(_Mirror(own, copy, buffers, writes))

    def watch(self, module: nn.Module, runs: bool = True) -> None:
        """Refuse other parameters, members and hooks of a module; `runs`: but for those that it exchanges itself."""
        self._forms[id(module)] = [ref(module), runs, _form(module)]

    def begin(self) -> None:
        """Take note of all as it is: what has been made is complete."""
        for group in self._groups:
            group.note(True)
        self._note_forms()
        self._note_parts()

    def _note_parts(self) -> None:
        now = [*map(id, chain.from_iterable([held.values() for _, held, _ in self._held]))]
        if now != self._parts:
            self._parts = now
            for _, held, had in self._held:
                had.update(map(id, held.values()))

    def _refuse_parts(self) -> None:
        if self._parts != [*map(id, chain.from_iterable([held.values() for _, held, _ in self._held]))]:
            for kind, held, had in self._held:
                if not had.issuperset(map(id, held.values())):
                    raise _changed(kind, "a parameter or a module in", "exchanged or registered")

    def _note_forms(self, runs_only: bool = False) -> None:
        for watched in self._forms.values():
            if (watched[1] or not runs_only) and (module := watched[0]()) is not None:
                watched[2] = _form(module)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context for a call: the copies become what the user's modules are, whose changes by it are noted."""
        for own, _, form in self._forms.values():
            if (module := own()) is not None and _form(module) != form:
                raise _cannot_follow(module, form)
        self._refuse_parts()
        for group in self._groups:
            group.follow()
        try:
            yield
        finally:
            written = [module for mirror in self._mirrors for module in mirror.reflect()]
            for group in self._groups:
                group.note()
                group.note_buffers(written)
            self._note_forms(runs_only=True)
            self._note_parts()


def _names_of(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the attributes that a user may set, and those whose inside he may change."""
    held = vars(module).items()
    boxes = [name for name, value in held if name not in OF_TORCH and type(value) in _BOXES and _inside(value)]
    return [name for name, value in held if _is_set(name, value)], boxes


def _is_set(name: str, value: Any) -> bool:
    return type(value) in PLAIN and (name == "training" or name not in OF_TORCH)


def _inside(box: Any) -> bool:
    """Tell whether plain values are in a box, and only those."""
    if len(box) > _MOST:
        return False
    return PLAIN.issuperset(map(type, box)) and (type(box) is not dict or PLAIN.issuperset(map(type, box.values())))


def _state(module: nn.Module | None, names: list[str], boxes: list[str]) -> tuple[list[Any], list[Any], list[Any]]:
    if module is None:
        return [], [], []
    held = module.__dict__
    plain = list(map(held.get, names))
    if not PLAIN.issuperset(map(type, plain)):
        plain = [value if type(value) in PLAIN else None for value in plain]
    inside = _NONE
    if boxes:
        found = (held.get(name) for name in boxes)
        inside = [copy.copy(box) if type(box) in _BOXES and _inside(box) else None for box in found]
    buffers = held["_buffers"]
    return plain, inside, [_of_buffer(buffer) for buffer in buffers.values()] if buffers else _NONE


def _form(module: nn.Module) -> list[int]:
    """Return what a module consists of: forward, numbers of hooks and of buffers, parameters and members."""
    held = module.__dict__
    found = [
        id(held.get("forward")),
        *[len(held[name]) for name in HOOKS],
        len(held["_buffers"]),
        *map(id, held["_parameters"].values()),
        -1,
    ]
    return [*found, *map(id, members.values())] if (members := held["_modules"]) else found


def _cannot_follow(module: nn.Module, before: list[int]) -> ConfigError:
    """Say what a user has done to a module of which others are copies."""
    now = _form(module)
    parameters, members = now[6 : now.index(-1)], now[now.index(-1) :]
    what, done = "a buffer of", "registered or removed"
    if now[0] != before[0]:
        what, done = "the forward of", "set"
    elif now[1:5] != before[1:5]:
        what = "a hook of"
    elif parameters != before[6 : before.index(-1)]:
        what, done = "a parameter of", "exchanged for another object, registered or removed"
    elif members != before[before.index(-1) :]:
        what, done = "a module in", "exchanged, added or removed"
    return _changed(type(module).__name__, what, done)


def _changed(kind: str, what: str, done: str) -> ConfigError:
    return ConfigError(
        f"model: {what} a {kind} was {done} after the pipeline was made, and other workers or stages "
        "would not know of it: do so before, or make another pipeline of the model; numbers of weights may be changed"
    )


def _follow_weight(name: str, parameter: nn.Parameter, made: nn.Parameter, before: Any) -> None:
    now, _ = _of_weight(parameter)
    noted, _ = before
    if now.hooks != noted.hooks:
        raise ConfigError(
            f"model: a hook of parameter {name} was registered or removed, of which other workers have copies: "
            "do so before the pipeline is made"
        )
    if made.device != parameter.device and now[:2] != noted[:2]:
        raise ConfigError(
            f"model: parameter {name} was changed on {parameter.device}, where it is not trained: stages compute by "
            f"copies on {made.device}; move the model there before the pipeline is made"
        )
    with torch.no_grad():
        made.data.copy_(parameter)
    made.requires_grad_(parameter.requires_grad)


def _of_buffer(buffer: Tensor | None) -> Any:
    return None if buffer is None else (id(buffer), buffer._version)


def _of_weight(parameter: Tensor | None) -> Any:
    """Return what tells whether a weight was changed, also through `.data`, which counts no versions."""
    return () if parameter is None else (OfWeight.now(parameter), digest([parameter]))
