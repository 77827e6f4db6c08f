"""Refusal of forwards and losses that would use stale weights, called by hand or by another pipeline.

In a job of several processes, a user's model has the trained weights of this process's stages only; all other weights
still have their values from before.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..dependency import ModelError
from ..workers.compute.modules.module_state import LOOKS, OfWeight
from ..workers.compute.shard import Shard
from ..workers.transport.payload import tensors_of

#: functions that take the form of another tensor, not its numbers
_FORMS = {"to", "type_as", "expand_as", "view_as", "reshape_as"}


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
            fix = "use pipe.predict, or on all workers pipe.weights.state_dict(), and load that on worker 0"
            raise ModelError(f"model: {stale[0]} is trained by another worker, and old here; {fix}")
        self._noted = now, trained_now


class _Reading(TorchFunctionMode):
    """Refuses functions that take numbers of some weights, such as `weight.detach()` in a loss.

    Args:
        weights: with their names.
    """

    def __init__(self, weights: Mapping[ref[nn.Parameter], str]) -> None:
        super().__init__()
        self._names = {id(weight()): name for weight, name in weights.items()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        takes_numbers = isinstance(found, (float, complex)) or any(True for _ in tensors_of(found))
        if takes_numbers and not name.startswith("new_") and not name.endswith("_like"):
            for tensor in tensors_of(args[:1] if name in _FORMS else (args, kwargs)):
                if id(tensor) in self._names:
                    why = f"reads {self._names[id(tensor)]}, which another worker holds and trains"
                    raise ModelError(f"loss_fn: {why}; return it beside the output, or cut elsewhere (split=)")
        return found


def _watch(shard: Shard, weights: Mapping[ref[nn.Parameter], str]) -> None:
    """Let the first calls of a shard's loss function refuse weights that only other processes train."""
    loss_fn, left = shard.loss_fn, LOOKS

    def watched(output: Any, target: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            shard.loss_fn = loss_fn
        assert loss_fn is not None
        with _Reading(weights):
            return loss_fn(output, target)

    module = getattr(loss_fn, "__module__", None) or ""  # None: exec has made it
    of_torch = module.startswith("torch.")  # also compiled ones, which a mode would change
    if loss_fn is not None and weights and not of_torch and not hasattr(loss_fn, "_torchdynamo_orig_callable"):
        shard.loss_fn = watched


def refuse_stale_weights(
    model: nn.Module | Iterable[Any], here: Sequence[nn.Parameter], shards: Sequence[Shard] = ()
) -> None:
    """Make a user's modules and loss refuse to use weights which only other processes train.

    Args:
        model: the user's model or list of layers.
        here: the parameters that this process trains.
        shards: of this process; the first calls of their loss functions are watched.

    Raises:
        ModelError: another worker of an earlier pipeline has trained some of `here`.
    """
    known, trained = set(here), [parameter for parameter in here if parameter.requires_grad]
    names: dict[ref[nn.Parameter], str] = {}
    for prefix, module in _modules(model):
        if not known.isdisjoint(module._parameters.values()):
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, _StaleWeights):
                    hook(module, ())
        own = ((prefix + name, p) for name, p in module._parameters.items() if p is not None and p not in known)
        weights = {name: parameter for name, parameter in own if parameter.requires_grad}
        if weights and trained and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            module.register_forward_pre_hook(_StaleWeights(weights, trained))
        names |= {ref(parameter): name for name, parameter in weights.items()}
    for shard in shards:
        _watch(shard, names)


def _state(parameter: Tensor | None) -> tuple[int, ...]:
    return () if parameter is None else OfWeight.now(parameter)[:2]


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return all modules, each with the prefix of its parameters' names; functions that make layers have none."""
    if isinstance(model, Sequence):
        model = nn.ModuleList([layer if isinstance(layer, nn.Module) else nn.Module() for layer in model])
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    return [(f"{name}." if name else "", module) for name, module in named]
