"""Refusal of forwards that would use stale weights, called by hand or by another pipeline.

In a job of several processes, a user's model has the trained weights of this process's stages only; all other weights
still have their values from before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.by_hand import OfWeight


class _StaleWeights:
    """A forward pre-hook of a module, one for each pipeline of its model. Copies and pickles of it refuse nothing.

    Args:
        weights: the module's weights that only other processes train, by name.
        here: the weights of the whole model that this process trains.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter] = {}, here: Sequence[nn.Parameter] = ()) -> None:
        self._weights, self._here = weights, [ref(parameter) for parameter in here]
        self._noted = self._now()

    def __reduce__(self) -> tuple[Any, ...]:
        return _StaleWeights, ()

    def _now(self) -> tuple[list[Any], list[Any]]:
        return [*map(_state, self._weights.values())], [_state(parameter()) for parameter in self._here]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Refuse the weights, unless nothing has been trained or trained values have been loaded since.

        Raises:
            ModelError: they are stale.
        """
        (before, trained), (now, trained_now) = self._noted, self._now()
        if trained == trained_now:
            return
        stale = [name for name, was, state in zip(self._weights, before, now, strict=True) if was == state]
        if stale:
            raise ModelError(
                f"model: {stale[0]} is trained by another worker, and here has values from before; use pipe.predict, "
                "or state = pipe.weights.state_dict() on all workers, and on worker 0 model.load_state_dict(state)"
            )
        self._noted = now, trained_now


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
        if not known.isdisjoint(module._parameters.values()):
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, _StaleWeights):
                    hook(module, ())
        own = ((prefix + name, p) for name, p in module._parameters.items() if p is not None and p not in known)
        weights = {name: parameter for name, parameter in own if parameter.requires_grad}
        if weights and trained and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            module.register_forward_pre_hook(_StaleWeights(weights, trained))


def _state(parameter: Tensor | None) -> tuple[int, ...]:
    return () if parameter is None else OfWeight.now(parameter)[:2]


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return all modules, each with the prefix of its parameters' names; functions that make layers have none."""
    if isinstance(model, Sequence):
        model = nn.ModuleList([layer if isinstance(layer, nn.Module) else nn.Module() for layer in model])
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    return [(f"{name}." if name else "", module) for name, module in named]
