"""The class a schedule subclasses: placement, relation, nominal time.

A schedule adds only what makes it itself. Data flow is the same for all and is given here:

    F(s,m) <- F(s-1,m)              B(s,m) <- F(s,m), B(s+1,m)     R(s,m) <- F(s,m), and B(s,m) <- R(s,m)
    W(s,m) <- I(s,m)                I(s,m) <- F(s,m), I(s+1,m)     (B may take the place of any I)
    U(s)   <- every B(s,.) or W(s,.), or the G(s,.) of all replicas, each of which needs its own B or W
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .action import PER_REPLICA, Action, B, F, G, I, Kind, R, U, W
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
    #: True if backward is done as `I` (inputs) and `W` (weights) instead of `B`; see `splits`
    split_backward: ClassVar[bool] = False
    #: True if activations are computed a second time (`R`) instead of kept; see `recomputes`
    recompute: ClassVar[bool] = False
    #: False if `U` are placed by `slot` (see `updates`) and may be overtaken, as in PipeDream
    synchronous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")

    # --- what a schedule may declare

    @property
    def num_stages(self) -> int:
        """Into how many stages the model is cut."""
        return self.num_workers

    @property
    def num_routes(self) -> int:
        """How many routes microbatches take over the workers; each has a replica of every stage."""
        return 1

    @property
    def order(self) -> Order:
        """The order that suits the schedule best: `fixed` waits for the next in slot order, `ready` does not."""
        return "ready"

    def place(self, stage: int, route: int) -> int:
        """Return the worker that hosts `stage` for the microbatches of `route`."""
        return stage % self.num_workers

    def route(self, microbatch: int) -> int:
        """Return the route that `microbatch` takes."""
        return microbatch % self.num_routes

    def splits(self, stage: int, microbatch: int) -> bool:
        """Tell whether this backward is `I` and `W` instead of `B`; a schedule may mix them."""
        return self.split_backward

    def recomputes(self, stage: int) -> bool:
        """Tell whether `stage` keeps only its inputs and runs `R` before backward."""
        return self.recompute

    def after(self, action: Action) -> Iterable[Action]:
        """Return what must be finished before `action`, beyond data flow: windows, a flush, a lag.

        Asked about every kind but `G`, and about `U` only if not synchronous.

        Only actions of the same or a neighbouring stage, or of the same worker. Negative microbatches mean
        "before the first" and are dropped, so a window needs no special case.
        """
        return ()

    def slot(self, action: Action) -> int:
        """Return the nominal time of an action (of `U` only if not synchronous, of `G` never).

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

    def activation_limit(self, worker: int) -> int | None:
        """Return how many microbatches of its stages `worker` may hold from F to B (or W); None: no limit here.

        It becomes edges: in the worker's order, the k-th F waits for the (k-limit)-th B or W. For a bound
        that no window of one stage expresses, such as that of a V schedule.
        """
        return None

    def peak_activations(self, worker: int) -> int | None:
        """Return the bound on microbatches of a stage kept from F to B (or W) on `worker`, at any timing.

        None: no claim. The checker proves a claim.
        """
        return self.activation_limit(worker)

    # --- what follows from it

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        """Return what is done with a microbatch on a stage, in order of data flow."""
        forward = (F(stage, microbatch), R(stage, microbatch)) if self.recomputes(stage) else (F(stage, microbatch),)
        if self.splits(stage, microbatch):
            return *forward, I(stage, microbatch), W(stage, microbatch)
        return *forward, B(stage, microbatch)

    def backward(self, stage: int, microbatch: int) -> Action:
        """Return the action that makes the gradient of the stage's inputs: `B` or `I`."""
        return (I if self.splits(stage, microbatch) else B)(stage, microbatch)

    def accumulation(self, stage: int, microbatch: int) -> Action:
        """Return the action that adds to the gradients of the stage's weights: `B` or `W`."""
        return (W if self.splits(stage, microbatch) else B)(stage, microbatch)

    def worker(self, action: Action) -> int:
        """Return the worker that runs `action`."""
        stage, kind, microbatch = action
        if kind is G or (kind is U and self.synchronous):
            return self.place(stage, microbatch)
        return self.place(stage, self.route(microbatch))

    def hosted(self, worker: int) -> list[tuple[int, int]]:
        """Return (stage, route) of every shard that `worker` holds, in stage order."""
        pairs = ((s, r) for s in range(self.num_stages) for r in range(self.num_routes))
        return [(s, r) for s, r in pairs if self.place(s, r) == worker]

    def successors(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that the payload of `action` flows to; none if it makes none."""
        stage, kind, microbatch = action
        if kind is F:
            return (F(stage + 1, microbatch),) if stage < self.last_stage else ()
        if kind is B or kind is I:
            return (self.backward(stage - 1, microbatch),) if stage > 0 else ()
        if kind is G:
            return tuple(U(stage, route) for route in range(self.num_routes) if route != microbatch)
        return ()

    def data(self, action: Action) -> Iterator[Action]:
        """Yield what `action` needs by data flow alone."""
        stage, kind, microbatch = action
        if kind is F:
            if stage > 0:
                yield F(stage - 1, microbatch)
        elif kind is W:
            yield I(stage, microbatch)
        elif kind is R:
            yield F(stage, microbatch)
        elif kind is U and self.num_routes > 1:
            yield from (G(stage, route) for route in range(self.num_routes))
        elif kind in PER_REPLICA:
            for m in range(self.num_microbatches):
                if self.route(m) == microbatch:
                    yield self.accumulation(stage, m)
        else:
            yield (R if self.recomputes(stage) else F)(stage, microbatch)
            if stage < self.last_stage:
                yield self.backward(stage + 1, microbatch)

    def needs(self, action: Action) -> list[Action]:
        """Return everything that must be finished before `action`: data flow and the schedule's own."""
        if action.kind is U and not self.synchronous:
            needs: list[Action] = []
        else:
            needs = list(self.data(action))
        if self._asks_after(action.kind):
            needs += [need for need in self.after(action) if need.microbatch >= 0]
        return needs

    def _asks_after(self, kind: Kind) -> bool:
        """Tell whether `after` and `slot` are asked about `kind`; the rest follows from data flow alone."""
        return not self.synchronous if kind is U else kind is not G

    def parameters(self) -> dict[str, Any]:
        """Return the schedule's own parameters and their values."""
        own = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in own if name not in ("num_workers", "num_microbatches")}
