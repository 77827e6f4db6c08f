"""What hangs on a parameter and no copy keeps: hooks of its gradient, and attributes such as `no_weight_decay`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..dependency import ConfigError
from .absent import attributes_of


def attach(copied: nn.Parameter, parameter: nn.Parameter, memo: dict[int, Any] | None = None) -> None:
    """Give a copy of a parameter what hangs on the parameter.

    Args:
        memo: of the deep copy that this is a part of; None: hooks and attributes are the same objects.
    """

    def own(value: Any) -> Any:
        return value if memo is None else copy.deepcopy(value, memo)

    vars(copied).update(own(attributes_of(parameter)))
    if copied.requires_grad:
        for hook in (parameter._backward_hooks or {}).values():
            copied.register_hook(own(hook))
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            copied.register_post_accumulate_grad_hook(own(hook))


def refuse_hooks(parameter: nn.Parameter, name: str, stages: Sequence[int]) -> None:
    """Refuse a parameter of several stages whose gradient has hooks: none of them has the whole of it.

    Raises:
        ConfigError: it has some.
    """
    if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        raise ConfigError(
            f"model: a hook of the gradient of {name} would run on stages {', '.join(map(str, stages))}, on a part of "
            f"that gradient each: remove the hook, or choose a split in which one stage has all uses of {name}"
        )
