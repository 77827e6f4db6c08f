"""Kinds of models, found by inspection alone: no forward is run, and no observing module is loaded."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...dependency import ModelError
from ...workers.compute.modules.module_state import HOOKS

#: attributes of every placeholder, which are not the user's parameter's
_OF_PLACEHOLDERS = frozenset({"factory", "fake", "_is_param"})


def takes_stage(model: object) -> bool:
    """Return whether a callable is a builder of stages, and not a function that makes the whole model."""
    if hasattr(model, "num_layers"):
        return True
    try:
        inspect.signature(model).bind()  # type: ignore[arg-type]
    except TypeError:
        return True
    except ValueError:  # built in: no signature is known
        return False
    return False


def needs_observation(model: object) -> bool:
    """Return whether a model is to be cut by observation, as neither a list of layers nor a builder of stages."""
    if isinstance(model, nn.Module):
        return not isinstance(model, nn.Sequential) or _does_more(model)
    return callable(model) and not takes_stage(model)


def _does_more(model: nn.Sequential) -> bool:
    """Return whether a call does more than call the members in turn."""
    held = vars(model)
    more = "forward" in held or type(model).forward is not nn.Sequential.forward
    return more or any(held[hooks] for hooks in HOOKS)


def refuse_lazy(module: nn.Module, where: str) -> None:
    """Raise if there are lazy parameters: their shapes are unknown when the optimizer is made.

    Raises:
        ModelError: the module has one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(f"model: {name} of {where} ({type(module).__name__}) has no shape; run a forward before")


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that the user has given a parameter, such as `no_weight_decay`."""
    return {name: value for name, value in vars(parameter).items() if name not in _OF_PLACEHOLDERS}


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one of another worker (`placeholder.Placeholder`)."""
    return getattr(type(tensor), "of_another_worker", False)
