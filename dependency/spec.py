"""The class a schedule subclasses: placement, relation, nominal time.

A schedule adds only what makes it itself. Data flow is the same for all and is given here:

    F(s,m) <- F(s-1,m)              B(s,m) <- F(s,m), B(s+1,m)
    W(s,m) <- I(s,m)                I(s,m) <- F(s,m), I(s+1,m)
    U(s)   <- every B(s,.) or W(s,.) of its replica
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .action import Action, B, F, I, Kind, U, W
from .errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


#: `num_microbatches` of a stream that never ends
ENDLESS = sys.maxsize

Order = Literal["ready", "fixed"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Frozen:
    """Makes every subclass a frozen keyword-only dataclass, so that a parameter is one annotated line."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)


class Spec(_Frozen):
    """A schedule for `num_workers` workers and `num_microbatches` microbatches a step.

    Subclasses override `after` and `slot`, and `place` and `num_stages` if a worker holds several
    stages. An annotated attribute with a default (`window: int = 2`) is a parameter of the schedule.
    Instances are immutable and hashable; all methods are pure and local, so a worker asks only about its
    own actions and their neighbours.
    """

    num_workers: int
    num_microbatches: int

    #: paper and section, or the code that the order was compared with
    source: ClassVar[str] = ""
    #: the order that suits the schedule best: `fixed` waits for the next in slot order, `ready` does not
    order: ClassVar[Order] = "ready"
    #: True if backward is done as `I` (inputs) and `W` (weights) instead of `B`
    split_backward: ClassVar[bool] = False
    #: False if `U` are placed by `slot` (see `updates`) and may be overtaken, as in PipeDream
    synchronous: ClassVar[bool] = True
    #: how many routes microbatches take over the workers; on each every stage is placed once
    num_routes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")

    # --- what a schedule may declare

    @property
    def num_stages(self) -> int:
        """Into how many stages the model is cut."""
        return self.num_workers

    def place(self, stage: int, route: int) -> int:
        """Return the worker that hosts `stage` for the microbatches of `route`."""
        return stage % self.num_workers

    def route(self, microbatch: int) -> int:
        """Return the route that `microbatch` takes."""
        return microbatch % self.num_routes

    def after(self, action: Action) -> Iterable[Action]:
        """Return what must be finished before `action`, beyond data flow: windows, a flush, a lag.

        Asked about `F`, `B`, `I` and `W`, and about `U` if not synchronous.

        Only actions of the same or a neighbouring stage, or of the same worker. Negative microbatches mean
        "before the first" and are dropped, so a window needs no special case.
        """
        return ()

    def slot(self, action: Action) -> int:
        """Return the nominal time of an `F`, `B`, `I` or `W` (and of `U` if not synchronous).

        It must grow along every edge of the relation and differ between actions of one worker: then its
        order is the worker's order, and nothing can deadlock. Without it the order comes from `program`,
        or else from unrolling the whole relation, which is a global pass.
        """
        raise NotImplementedError

    def program(self, worker: int) -> Iterable[Action]:
        """Return the worker's actions in order, where no closed form of `slot` is short."""
        raise NotImplementedError

    def updates(self, stage: int, route: int) -> Iterable[Action]:
        """Return the updates of a replica of a stage; one a step for synchronous schedules."""
        return (U(stage, route),)

    def peak_activations(self, worker: int) -> int | None:
        """Return the bound on microbatches of a stage kept from F to B (or W) on `worker`; None: no claim."""
        return None

    # --- what follows from it

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    @property
    def accumulates(self) -> Kind:
        """The kind that adds to the gradients of the weights."""
        return W if self.split_backward else B

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that run once for every stage and microbatch."""
        return (F, I, W) if self.split_backward else (F, B)

    def worker(self, action: Action) -> int:
        """Return the worker that runs `action`."""
        if action.kind is U and self.synchronous:
            return self.place(action.stage, action.microbatch)
        return self.place(action.stage, self.route(action.microbatch))

    def hosted(self, worker: int) -> list[tuple[int, int]]:
        """Return (stage, route) of every shard that `worker` holds, in stage order."""
        pairs = ((s, r) for s in range(self.num_stages) for r in range(self.num_routes))
        return [(s, r) for s, r in pairs if self.place(s, r) == worker]

    def successor(self, action: Action) -> Action | None:
        """Return the action that the payload of `action` flows to, or None if it makes none."""
        stage, kind, microbatch = action
        if kind is F and stage < self.last_stage:
            return F(stage + 1, microbatch)
        if kind in (B, I) and stage > 0:
            return kind(stage - 1, microbatch)
        return None

    def data(self, action: Action) -> Iterator[Action]:
        """Yield what `action` needs by data flow alone."""
        stage, kind, microbatch = action
        if kind is F:
            if stage > 0:
                yield F(stage - 1, microbatch)
        elif kind is W:
            yield I(stage, microbatch)
        elif kind is U:
            for m in range(self.num_microbatches):
                if self.route(m) == microbatch:
                    yield self.accumulates(stage, m)
        else:
            yield F(stage, microbatch)
            if stage < self.last_stage:
                yield kind(stage + 1, microbatch)

    def needs(self, action: Action) -> list[Action]:
        """Return everything that must be finished before `action`: data flow and the schedule's own."""
        own_update = action.kind is U and self.synchronous  # follows from data flow alone
        needs = list(self.data(action)) if own_update or action.kind is not U else []
        if not own_update:
            needs += [need for need in self.after(action) if need.microbatch >= 0]
        return needs

    def parameters(self) -> dict[str, Any]:
        """Return the schedule's own parameters and their values."""
        own = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in own if name not in ("num_workers", "num_microbatches")}
