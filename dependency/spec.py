"""The class a schedule subclasses: placement, relation, nominal time.

A schedule adds only what distinguishes it from others. Data flow is the same for all schedules and follows from the
kinds (`kinds.py`): the actions of a microbatch on a stage run in the order of `Spec.actions`, and a payload for the
next or previous stage is the input of the action there that sends its own payload in the same direction:

    F(s,m) <- F(s-1,m)              B(s,m) <- F(s,m), B(s+1,m)     R(s,m) <- F(s,m), and B(s,m) <- R(s,m)
    W(s,m) <- I(s,m)                I(s,m) <- F(s,m), I(s+1,m)     (B may take the place of any I)
    U(s)   <- every B(s,.) or W(s,.), or the sums S(s,.) of all replicas' gradients, each of which needs its B or W

If a schedule is not synchronous, steps follow each other without a flush, and a forward needs the update that makes the
version of the weights that it is declared to use (`version`; see `versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec

from .action import Action
from .errors import ConfigError
from .kinds import B, F, I, R, U, W
from .reductions import NO_REDUCTIONS, Reductions, on_route, reduction_tree
from .versions import before_forward, before_update

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


Order = Literal["ready", "fixed"]
_Arguments = ParamSpec("_Arguments")

#: what every spec has
_NO_PARAMETERS = ("num_workers", "num_microbatches", "num_steps")


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
    #: for asynchronous schedules: how many steps of a stream are considered together
    num_steps: int = field(default=1, repr=False)

    #: paper and section, or the code with which the order was compared
    source: ClassVar[str] = ""
    #: True if the backward is split into `I` (for inputs) and `W` (for weights); see `splits`
    split_backward: ClassVar[bool] = False
    #: True if activations are recomputed (`R`) instead of kept; see `recomputes`
    recompute: ClassVar[bool] = False
    #: False if forwards may overtake updates, so that steps follow each other without a flush, as in PipeDream. In that
    #: case `slot` places `U` too, and `after`, `slot` and `version` count microbatches and updates through the stream
    synchronous: ClassVar[bool] = True
    #: True if waiting for the norm of all gradients (to clip them) would open bubbles: then an update is made before
    #: the norm is known, and validated when it is (Qi et al. 2023, Zero Bubble, section 4)
    post_validation: ClassVar[bool] = False
    #: for asynchronous schedules: how often weights are updated
    update_every: ClassVar[Literal["step", "microbatch"]] = "step"
    #: sizes of the slices of a sequence, in parts of it. With several a microbatch of the step is as many indices, one
    #: for each of its slices; see `slicing.py`
    slice_sizes: ClassVar[tuple[int, ...]] = (1,)
    #: of replicas: 1 if only the owner of a parameter keeps its optimizer state and updates it (ZeRO stage 1)
    zero: ClassVar[int] = 0
    #: of replicas: largest bucket of gradients in MiB
    bucket: ClassVar[float] = 25.0

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_microbatches", "num_steps"):
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

    @property
    def elasticity(self) -> float:
        """How far each update pulls the weights of a route and their common reference to each other; 0: not at all."""
        return 0.0

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

        It is called for the actions of microbatches, and for `U` if the schedule is asynchronous. It may name only
        actions of the same or a neighbouring stage, or of the same worker. Negative microbatches mean "before the
        first" and are ignored, so a window needs no special case.
        """
        return ()

    def slot(self, action: Action) -> int:
        """Return the nominal time of an action of a microbatch, and of `U` if the schedule is asynchronous.

        It must grow along every edge of the relation and differ between actions of one worker: then its
        order is the worker's order, and nothing can deadlock. Without it the order comes from `program`,
        or else from unrolling the whole relation, which is a global pass.
        """
        raise NotImplementedError

    def program(self, worker: int) -> Iterable[Action]:
        """Return the worker's actions in order, for schedules without a short closed form of `slot`."""
        raise NotImplementedError

    def version(self, stage: int, microbatch: int) -> int:
        """Return the version of the weights that the forward and backward of a microbatch use: the number of updates.

        It must follow the same pattern in every step of a stream, except at the beginning, where it is at least 0.

        Args:
            microbatch: counted through the stream.
        """
        return microbatch // self.num_microbatches

    def activation_limit(self, worker: int) -> int | None:
        """Return how many microbatches of its stages `worker` may hold from F to B (or W); None: no limit.

        The limit becomes edges: in the worker's order, the k-th F waits for the (k-limit)-th B or W. It expresses a
        bound that a window of one stage cannot express, such as that of a V schedule.
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

    @property
    def total_microbatches(self) -> int:
        """The number of microbatches in all steps that are considered together."""
        return self.num_microbatches * self.num_steps

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        """Return the actions of a microbatch on a stage, in order of data flow: each needs the one before it.

        A schedule with kinds of its own overrides this method.
        """
        forward = (F(stage, microbatch), R(stage, microbatch)) if self.recomputes(stage) else (F(stage, microbatch),)
        if self.splits(stage, microbatch):
            return *forward, I(stage, microbatch), W(stage, microbatch)
        return *forward, B(stage, microbatch)

    def share(self, action: Action) -> float:
        """Return which part of its microbatch's sequence an action works on: 1, unless sequences are sliced."""
        sizes = self.slice_sizes
        if len(sizes) == 1 or not action.kind.per_microbatch:
            return 1
        return sizes[action.index % len(sizes)] / sum(sizes)

    def updates(self, stage: int, route: int) -> Iterable[Action]:
        """Return the updates of a replica of a stage: one for synchronous schedules, else as `update_every` says."""
        if self.update_every == "microbatch" and not self.synchronous:
            return (U(stage, m) for m in range(self.total_microbatches))
        return [U(stage, route + step * self.num_routes) for step in range(self.num_steps)]

    def worker(self, action: Action) -> int:
        """Return the worker that runs `action`."""
        stage, kind, index = action
        if not kind.per_microbatch:
            return self.place(stage, index % self.num_routes)
        return self.place(stage, self.route(index))

    def hosted(self, worker: int) -> list[tuple[int, int]]:
        """Return (stage, route) of every shard that `worker` holds, in stage order."""
        return list(_hosts(self).get(worker, ()))

    def origin(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage whose payload is the input of `action`; None: there is none."""
        stage, kind, microbatch = action
        return self._going(kind.way, stage - kind.way, microbatch) if kind.way else None

    def successors(self, action: Action) -> list[Action]:
        """Return the actions that take the payload of `action`; none if it has no payload."""
        stage, kind, microbatch = action
        if not kind.per_microbatch:
            return reduction_tree(self).successors(action)
        follower = self._going(kind.way, stage + kind.way, microbatch) if kind.way else None
        return [] if follower is None else [follower]

    def _going(self, way: int, stage: int, microbatch: int) -> Action | None:
        """Return the action that sends the payload of `microbatch` from `stage` in the direction `way`."""
        if not 0 <= stage <= self.last_stage:
            return None
        return next((a for a in self.actions(stage, microbatch) if a.kind.way == way), None)

    def data(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> Iterator[Action]:
        """Yield what `action` needs by data flow alone."""
        stage, kind, microbatch = action
        if kind.per_microbatch:
            own = self.actions(stage, microbatch)
            at = own.index(action) if action in own else 0
            yield from own[max(0, at - 1) : at]
            origin = self.origin(action)
            if origin is not None:
                yield origin
            if not self.synchronous and kind is F:
                yield from before_forward(self, action)
        elif kind is U and not self.synchronous:
            yield from before_update(self, action)
        else:
            shards, others = reduction_tree(self).needs(action, reductions)
            for shard in shards:
                yield from self.accumulations(*shard)
            yield from others

    def accumulations(self, stage: int, route: int) -> Iterator[Action]:
        """Yield the actions that add to the gradients of a replica of a stage in a step."""
        for m in on_route(self, range(self.total_microbatches), route):
            yield from (a for a in self.actions(stage, m) if a.kind.accumulates)

    def needs(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> list[Action]:
        """Return everything that must be finished before `action`: data flow and the schedule's own."""
        needs = list(self.data(action, reductions))
        if self.orders(action):
            needs += [need for need in self.after(action) if need.index >= 0]
        return needs

    def orders(self, action: Action) -> bool:
        """Tell whether `after` and `slot` are called for `action`; they are not for the end of a synchronous step."""
        return action.kind.per_microbatch or (action.kind is U and not self.synchronous)

    def unsliced(self) -> Spec:
        """Return the schedule over whole sequences, by which those that `slicing.sliced` makes evaluate."""
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the schedule's own parameters and their values."""
        own = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in own if name not in _NO_PARAMETERS}


def made_once(make: Callable[_Arguments, type[Spec]]) -> Callable[_Arguments, type[Spec]]:
    """Make the same class for the same arguments: specs of two that are alike would differ."""
    return cache(make)  # type: ignore[return-value]


@lru_cache(maxsize=16)
def _hosts(spec: Spec) -> dict[int, list[tuple[int, int]]]:
    """Return what each worker holds, found once: searching all stages for each of 10,000 workers takes minutes."""
    hosts: dict[int, list[tuple[int, int]]] = {}
    for stage in range(spec.num_stages):
        for route in range(spec.num_routes):
            hosts.setdefault(spec.place(stage, route), []).append((stage, route))
    return hosts
