"""Copies of a user's modules follow them: what is changed there by hand between two calls is changed here.

Stages of a model with a forward of its own compute by copies of its modules, and so do replicas of a stage. In one
process all of it would be the user's own modules: modes, a factor in an attribute, weights and buffers that are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ConfigError
from ..workers.compute.by_hand import PLAIN, hooks_of
from ..workers.compute.inner_state import OF_TORCH
from .absent import Absent

_NONE: list[Any] = []


class _Group:
    """The modules of one that a user has, and those of a copy, by weak references: nothing is kept alive for this.

    Args:
        runs: whether the user's own modules compute too, and so change by themselves.
    """

    def __init__(self, own: nn.Module, copy: nn.Module, runs: bool) -> None:
        self._modules = [
            (ref(module), ref(other), [name for name, value in vars(module).items() if _is_set(name, value)])
            for module, other in zip(own.modules(), copy.modules(), strict=True)
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        others = dict(copy.named_parameters(remove_duplicate=False))
        pairs = [(name, parameter, others.get(name)) for name, parameter in own.named_parameters()]
        self._parameters = [
            (name, ref(parameter), ref(other))
            for name, parameter, other in pairs
            if other is not None and other is not parameter and not isinstance(other, Absent)
        ]
        self._runs = runs or bool(self._parameters)
        self._noted: list[tuple[list[Any], list[Any]]] = []
        self._weights: list[Any] = []
        self.note(True)

    def note(self, anew: bool = False) -> None:
        """Take note of the user's modules as they are, if that may have changed otherwise than by hand."""
        if anew or self._runs:
            self._noted = [_state(module(), names) for module, _, names in self._modules]
            self._weights = [_of_weight(parameter()) for _, parameter, _ in self._parameters]

    def follow(self) -> None:
        """Change the copies as the user's modules have been changed since."""
        changed = False
        for (own, other, names), noted in zip(self._modules, self._noted, strict=True):
            module, copy = own(), other()
            if module is None or copy is None or (now := _state(module, names)) == noted:
                continue
            changed = True
            for name, value, before in zip(names, now[0], noted[0], strict=True):
                if value != before and value is not None:
                    setattr(copy, name, value)
            for (name, buffer), before in zip(module._buffers.items(), noted[1], strict=False):
                held = copy._buffers.get(name)
                if buffer is not None and held is not None and held is not buffer and _of_buffer(buffer) != before:
                    held.data = buffer.detach().to(held.device, copy=True)  # others may have saved what it was
        for (name, theirs, mine), noted_weight in zip(self._parameters, self._weights, strict=True):
            parameter, made = theirs(), mine()
            if parameter is None or made is None or _of_weight(parameter) == noted_weight:
                continue
            changed = True
            if _of_weight(parameter)[-1] != noted_weight[-1]:
                raise ConfigError(
                    f"model: a hook of parameter {name} was registered or removed, of which other workers have copies: "
                    "do so before the pipeline is made"
                )
            with torch.no_grad():
                made.data.copy_(parameter)
            made.requires_grad_(parameter.requires_grad)
        if changed:
            self.note(True)


class Following:
    """All copies of a user's modules that this process computes by."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def add(self, own: nn.Module, copy: nn.Module, *, runs: bool) -> None:
        """Let `copy` follow `own`, of which it has just been made."""
        self._groups.append(_Group(own, copy, runs))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context for a call: the copies become what the user's modules are, whose changes by it are noted."""
        for group in self._groups:
            group.follow()
        try:
            yield
        finally:
            for group in self._groups:
                group.note()


def _is_set(name: str, value: Any) -> bool:
    return type(value) in PLAIN and (name == "training" or name not in OF_TORCH)


def _state(module: nn.Module | None, names: list[str]) -> tuple[list[Any], list[Any]]:
    if module is None:
        return [], []
    held = module.__dict__
    plain = list(map(held.get, names))
    if not PLAIN.issuperset(map(type, plain)):
        plain = [value if type(value) in PLAIN else None for value in plain]
    return plain, [_of_buffer(buffer) for buffer in buffers.values()] if (buffers := held["_buffers"]) else _NONE


def _of_buffer(buffer: Tensor | None) -> Any:
    return None if buffer is None else (id(buffer), buffer._version)


def _of_weight(parameter: Tensor | None) -> Any:
    return (
        ()
        if parameter is None
        else (parameter._version, parameter.data_ptr(), parameter.requires_grad, hooks_of(parameter))
    )
