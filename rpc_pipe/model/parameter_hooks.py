"""Properties that torch does not copy with parameters: the gradient's hooks and type, and attributes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from ..dependency import ModelError
from .observe.model_kinds import attributes_of

#: maps a hook, or a dict of attributes, to that of a copy
Change = Callable[[Any], Any]
Hook = Callable[[Any], Any]


def copy_attachments(copied: nn.Parameter, parameter: nn.Parameter, change: Change = lambda value: value) -> None:
    """Give a copy of a parameter the attributes, gradient hooks and type of gradient of the parameter.

    Args:
        change: maps each of them to that of the copy; by default both have the same objects.
    """
    vars(copied).update(change(attributes_of(parameter)))
    if copied.grad_dtype != parameter.grad_dtype:
        copied.grad_dtype = parameter.grad_dtype
    before, after = _hooks(parameter)
    for hook in before if copied.requires_grad else ():
        copied.register_hook(change(hook))
    for hook in after if copied.requires_grad else ():
        copied.register_post_accumulate_grad_hook(change(hook))


def rebinding(modules: Mapping[nn.Module, nn.Module]) -> Change:
    """Return a change that binds methods of modules to the copies of these modules and leaves other hooks alone."""

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


def needs_rebinding(parameter: nn.Parameter, change: Change) -> bool:
    """Return whether a hook of a parameter must be changed for a copy."""
    return any(change(hook) != hook for hooks in _hooks(parameter) for hook in hooks)


def refuse_hooks(parameter: nn.Parameter, name: str, stages: Sequence[int]) -> None:
    """Raise if a parameter of several stages has gradient hooks: no stage has the whole gradient.

    Raises:
        ModelError: the parameter has hooks.
    """
    if parameter.requires_grad and any(_hooks(parameter)):
        why = f"a hook of {name} would see a part of its gradient on each of stages {stages}"
        raise ModelError(f"model: {why}; remove it, or cut so that one stage has all uses of {name} (split=)")


def _hooks(parameter: nn.Parameter) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks that run before a gradient is accumulated, and the hooks after."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [*(before or {}).values()], [*(after or {}).values()]
