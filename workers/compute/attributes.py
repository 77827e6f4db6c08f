"""What modules have besides the numbers of tensors: attributes, what is inside of them, and hooks of their calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from .inner_state import OF_TORCH, InnerState, Place, places_in


class Attributes:
    """What modules have now.

    Args:
        called: modules whose hooks count; by default the same. A forward may register some, such as those that capture
            outputs.
        places: attributes that are looked into; by default all that can be.
        own: leave out what is torch's: buffers, weights, hooks, modes.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        called: Iterable[nn.Module] | None = None,
        places: Sequence[Place] | None = None,
        *,
        own: bool = False,
    ) -> None:
        self._leaves_out = OF_TORCH if own else frozenset()
        #: by module, its attributes
        self.held = [(module, self._of(module)) for module in modules]
        of_modules = [module for module, _ in self.held]
        self._called = of_modules if called is None else called
        self._hooks = [
            (module, hooks, dict(hooks))
            for module in self._called
            for name, hooks in vars(module).items()
            if "_hooks" in name and isinstance(hooks, dict)
        ]
        self._places = places_in(of_modules) if places is None else places
        self._inner = InnerState(self._places)

    def now(self) -> Attributes:
        """Return what the same modules have now."""
        modules = [module for module, _ in self.held]
        return Attributes(modules, self._called, self._places, own=bool(self._leaves_out))

    def _of(self, module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in self._leaves_out}

    def changed(self, is_same: Callable[[Any, Any], bool] = operator.is_) -> set[nn.Module]:
        """Return the modules that have something else now, beside hooks; `is_same(now, then)` judges an exchange."""
        return {module for module, _ in self.changed_places(is_same)}

    def changed_places(self, is_same: Callable[[Any, Any], bool] = operator.is_) -> set[tuple[nn.Module, str]]:
        """Return where the modules have something else now, by module and attribute; no name: inside of one."""
        found = {(module, "") for module in self._inner.changed()}
        for module, held in self.held:
            now = self._of(module)
            both = now.keys() & held.keys()
            exchanged = {name for name in both if not is_same(now[name], held[name])}
            found |= {(module, name) for name in exchanged | (now.keys() ^ held.keys())}
        return found

    def put_back(self) -> set[nn.Module]:
        """Give the modules what they had, in the same dicts, which others know; return those that had other hooks."""
        for module, held in self.held:
            set_attributes(module, held)
        changed = [(module, hooks, before) for module, hooks, before in self._hooks if hooks.keys() != before.keys()]
        for _, hooks, before in changed:
            hooks.clear()
            hooks.update(before)
        self._inner.put_back()
        return {module for module, _, _ in changed}


def set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module these attributes, and no others but torch's."""
    for name in vars(module).keys() - attributes.keys() - OF_TORCH:
        del vars(module)[name]
    vars(module).update(attributes)
