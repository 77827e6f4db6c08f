"""Any schedule with recomputation on chosen stages: `R` runs right before the backward that needs it.

`R` has the needs of the backward. So the activations of a microbatch live twice for a short time, during `F`
and from `R` to the backward, instead of once for a long time.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from .action import Action, R
from .crossings import refuse_kinds
from .spec import Spec, Transformation, transformed


def recomputing(base: type[Spec], stages: frozenset[int] | None) -> type[Spec]:
    """Return `base` with recomputation on `stages`; None: on all.

    Raises:
        ConfigError: the schedule recomputes by itself, has updates that steps overtake, or adds kinds; in words
            that follow its name.
    """
    refuse_kinds("recompute", base)
    said = "all" if stages is None else "+".join(map(str, sorted(stages)))
    return transformed(Recomputing, base, f"recompute {said}", _recomputed=stages)


class Recomputing(Transformation):
    """A schedule with recomputation."""

    _recomputed: ClassVar[frozenset[int] | None]

    def recomputes(self, stage: int) -> bool:
        return self._recomputed is None or stage in self._recomputed

    def after(self, action: Action) -> Iterable[Action]:
        if action.kind is not R:
            return super().after(action)
        backward = self._backward(action)
        arriving = self.origin(backward)
        return [*super().after(backward), *([] if arriving is None else [arriving])]

    def slot(self, action: Action) -> int:
        if action.kind is R:
            return 2 * super().slot(self._backward(action)) - 1
        return 2 * super().slot(action)

    def program(self, worker: int) -> Iterator[Action]:
        for action in super().program(worker):
            if action.kind.way == -1 and self.recomputes(action.stage):
                yield R(action.stage, action.index)
            yield action

    def _backward(self, action: Action) -> Action:
        return next(a for a in self.actions(action.stage, action.index) if a.kind.way == -1)
