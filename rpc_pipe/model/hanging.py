"""Hooks of parameters that are methods of modules, where those are copied; and parameters that have no shape yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..dependency import ConfigError
from .absent import attributes_of

#: hook -> the hook of a copy
Change = Callable[[Any], Any]


def carry_over(parameter: nn.Parameter, made: nn.Parameter, change: Change) -> None:
    """Let what hangs on `parameter` hang on `made` too, which has its numbers.

    Args:
        change: what makes hooks of the copy's.
    """
    vars(made).update(attributes_of(parameter))
    for hook in (parameter._backward_hooks or {}).values():
        made.register_hook(change(hook))
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        made.register_post_accumulate_grad_hook(change(hook))


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
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return any(change(hook) != hook for hook in hooks)


def refuse_lazy(module: nn.Module, said: str) -> None:
    """Refuse parameters that get their shapes from the first batch: an optimizer needs them before.

    Raises:
        ConfigError: there is one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"model: {name} of {said} ({type(module).__name__}) has no shape before a first forward; run one, or "
                "use a layer whose sizes are given"
            )
