"""What hangs on a parameter and no copy keeps: hooks of its gradient, and attributes such as `no_weight_decay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from ..dependency import ConfigError
from .absent import attributes_of

#: a hook, or the attributes -> those of a copy
Change = Callable[[Any], Any]
Hook = Callable[[Any], Any]


def attach(copied: nn.Parameter, parameter: nn.Parameter, change: Change = lambda value: value) -> None:
    """Give a copy of a parameter, which has its numbers, what hangs on the parameter.

    Args:
        change: makes what is the copy's; by default the two have the same objects.
    """
    vars(copied).update(change(attributes_of(parameter)))
    before, after = _hooks(parameter)
    for hook in before if copied.requires_grad else ():
        copied.register_hook(change(hook))
    for hook in after if copied.requires_grad else ():
        copied.register_post_accumulate_grad_hook(change(hook))


def moved_to(modules: Mapping[nn.Module, nn.Module]) -> Change:
    """Return what makes a method of a module one of its copy; what is bound to nothing else stays as it is."""

    def change(hook: Any) -> Any:
        if isinstance(hook, MethodType):
            owner = change(hook.__self__)
            return hook if owner is hook.__self__ else MethodType(hook.__func__, owner)
        if isinstance(hook, partial):
            parts = hook.func, *hook.args, *hook.keywords.values()
            func, *values = map(change, parts)
            if all(new is old for new, old in zip((func, *values), parts, strict=True)):
                return hook
            count = len(hook.args)
            return partial(func, *values[:count], **dict(zip(hook.keywords, values[count:], strict=True)))
        return modules.get(hook, hook) if isinstance(hook, nn.Module) else hook

    return change


def is_moved(parameter: nn.Parameter, change: Change) -> bool:
    """Tell whether a hook of a parameter is another one where its module has been copied."""
    return any(change(hook) != hook for hooks in _hooks(parameter) for hook in hooks)


def refuse_hooks(parameter: nn.Parameter, name: str, stages: Sequence[int]) -> None:
    """Refuse a parameter of several stages whose gradient has hooks: none of them has the whole of it.

    Raises:
        ConfigError: it has some.
    """
    if parameter.requires_grad and any(_hooks(parameter)):
        raise ConfigError(
            f"model: a hook of the gradient of {name} would run on stages {', '.join(map(str, stages))}, on a part of "
            f"that gradient each: remove the hook, or choose a split in which one stage has all uses of {name}"
        )


def _hooks(parameter: nn.Parameter) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks of a parameter's gradient: those before it is added up, and those after."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [*(before or {}).values()], [*(after or {}).values()]
