"""What layers of several stages hold, each with a copy of its own, or in an order of its own: a counter, a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...dependency import ConfigError
from .counts import Place, changed, held
from .inner_state import BOXES
from .occasional_checks import OccasionalChecks
from .read_names import read_by


class Common:
    """Checks some forwards.

    Args:
        modules: what they read of these before they write it counts, and
        objects: of these all, as somebody else may read it: lists and the like, too.
    """

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        self._modules, self._objects = modules, objects
        self._checks = OccasionalChecks()
        #: what a forward has changed; what is made once, such as a mask, does not change again
        self._changed: set[tuple[int, str]] = set()

    def before(self) -> dict[Place, tuple[Any, Any]] | None:
        """Return what is held before a forward; None: it is not looked at."""
        if not self._checks.due():
            return None
        boxes = [_Box(each) for each in self._objects if type(each) in BOXES]
        others = [each for each in self._objects if type(each) not in BOXES]
        return held((*self._modules, *others, *boxes))

    def refuse_changed(self, before: dict[Place, tuple[Any, Any]]) -> None:
        """Refuse that forwards change it.

        Raises:
            ConfigError: they do.
        """
        places = changed(before)
        read = read_by(self._modules) if places else frozenset()
        for owner, name in places:
            if isinstance(owner, nn.Module) and name not in read:
                continue
            what = (
                f"a {type(owner.inside).__name__}" if isinstance(owner, _Box) else f"{name} of a {type(owner).__name__}"
            )
            if (key := (id(getattr(owner, "inside", owner)), name)) in self._changed:
                raise ConfigError(
                    f"model: forwards change {what} that layers of several stages hold, each stage for itself: let one "
                    f"layer hold it, or choose a split that keeps those layers together"
                )
            self._changed.add(key)


class _Box:
    """An object that holds a list or the like."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
