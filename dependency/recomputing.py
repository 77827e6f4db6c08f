"""Any schedule with recomputation on chosen stages: `R` runs right before the backward that needs it.

`R` waits for what the backward waits for. So the activations of a microbatch live twice for a short time, during `F`
and from `R` to the backward, instead of once for a long time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .action import Action
from .errors import ConfigError
from .kinds import R
from .spec import Spec, made_once


@made_once
def recomputing(base: type[Spec], stages: frozenset[int] | None) -> type[Spec]:
    """Return `base` with recomputation on `stages`; None: on all.

    Raises:
        ConfigError: the schedule recomputes by itself, has updates that steps overtake, or actions of its own; in words
            that follow its name.
    """
    if base.recompute:
        raise ConfigError("recomputes by itself; leave it out")
    if not base.synchronous:
        raise ConfigError("lets steps overlap; only synchronous ones recompute")
    if base.actions is not Spec.actions:
        raise ConfigError("says by `actions` what is done with a microbatch; leave it out")

    def recomputes(self: Spec, stage: int) -> bool:
        return stages is None or stage in stages

    def after(self: Spec, action: Action) -> Iterable[Action]:
        if action.kind is not R:
            return base.after(self, action)
        backward = _backward(self, action)
        arriving = self.origin(backward)
        return [*base.after(self, backward), *([] if arriving is None else [arriving])]

    def slot(self: Spec, action: Action) -> int:
        if action.kind is R:
            return 2 * base.slot(self, _backward(self, action)) - 1
        return 2 * base.slot(self, action)

    def program(self: Spec, worker: int) -> Iterator[Action]:
        for action in base.program(self, worker):
            if action.kind.way == -1 and self.recomputes(action.stage):
                yield R(action.stage, action.index)
            yield action

    said = "all" if stages is None else "+".join(map(str, sorted(stages)))
    own: dict[str, Any] = {"recomputes": recomputes, "after": after, "__module__": base.__module__}
    own["__doc__"] = base.__doc__
    own["__qualname__"] = f"{base.__qualname__}[recompute {said}]"
    if base.slot is not Spec.slot:
        own["slot"] = slot
    if base.program is not Spec.program:
        own["program"] = program
    return type(base.__name__, (base,), own)


def _backward(spec: Spec, action: Action) -> Action:
    return next(a for a in spec.actions(action.stage, action.index) if a.kind.way == -1)
