"""Refusal of forwards that would use stale weights, called by hand or by another pipeline.

In a job of several processes, a user's model has the trained weights of this process's stages only; all other weights
still have their values from before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.by_hand import OfWeight
from ..workers.compute.digest import digest


class _StaleWeights:
    """The weights of a module that only other processes train.

    Args:
        weights: these, by name.
        here: the weights of the whole model that this process trains.
    """

    def __init__(self, weights: dict[str, nn.Parameter], here: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._here = [ref(parameter) for parameter in here]
        self._note()

    def _note(self) -> None:
        self._before = self._now()
        self._trained = [_state(parameter()) for parameter in self._here]

    def _now(self) -> list[Any]:
        return [(_state(weight), digest([weight])) for weight in self._weights.values()]

    def refuse(self) -> None:
        """Refuse their use, unless nothing has been trained or trained values have been loaded since.

        Raises:
            ModelError: they are stale.
        """
        if self._trained == [_state(parameter()) for parameter in self._here]:
            return
        pairs = zip(self._weights, self._before, self._now(), strict=True)
        stale = [name for name, before, now in pairs if before == now]
        if stale:
            raise ModelError(
                f"model: {stale[0]} is trained by another worker, and what this process has of it is from before; use "
                "`pipe.predict` or `pipe.evaluate`, or load the trained weights first: "
                "`state = pipe.weights.state_dict()` on all workers, and on worker 0, which gets them, "
                "`model.load_state_dict(state)`"
            )
        self._note()


class _Refusal:
    """A forward pre-hook of a user's module. Copies of the module and pickles of it have one that refuses nothing."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else ref(module)
        #: one entry for each pipeline of the module
        self.stale: list[_StaleWeights] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._module is not None and module is self._module():
            for each in self.stale:
                each.refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Refusal, ()


def refuse_stale_weights(model: nn.Module | Iterable[Any], here: Sequence[nn.Parameter]) -> None:
    """Make a user's modules refuse calls that would use weights which only other processes train.

    Args:
        model: the user's model or list of layers.
        here: the parameters that this process trains.

    Raises:
        ModelError: another worker of an earlier pipeline has trained some of them.
    """
    known, trained = set(here), [parameter for parameter in here if parameter.requires_grad]
    for prefix, module in _modules(model):
        refusal = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Refusal)), None)
        if refusal is not None and not known.isdisjoint(module._parameters.values()):
            refusal(module, ())
        own = ((prefix + name, p) for name, p in module._parameters.items() if p is not None and p not in known)
        weights = {name: parameter for name, parameter in own if parameter.requires_grad}
        if weights and trained and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            if refusal is None:
                module.register_forward_pre_hook(refusal := _Refusal(module))
            refusal.stale.append(_StaleWeights(weights, trained))


def _state(parameter: Tensor | None) -> tuple[int, ...]:
    return () if parameter is None else OfWeight.now(parameter)[:2]


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return all modules, each with the prefix of its parameters' names; functions that make layers have none."""
    if isinstance(model, Sequence):
        model = nn.ModuleList([layer if isinstance(layer, nn.Module) else nn.Module() for layer in model])
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    return [(f"{name}." if name else "", module) for name, module in named]
