"""The class a schedule subclasses, with the relation that follows from its declarations (`declared.py`).

A schedule adds only its distinguishing edges. Data flow is the same for all schedules and follows from the
kinds (`action.py`). The actions of a microbatch on a stage run in the order of `Spec.actions`. A payload for a
neighbouring stage is the input of the action there that sends a payload in the same direction:

    F(s,m) <- F(s-1,m)              B(s,m) <- F(s,m), B(s+1,m)     R(s,m) <- F(s,m), and B(s,m) <- R(s,m)
    W(s,m) <- I(s,m)                I(s,m) <- F(s,m), I(s+1,m)     (B may take the place of any I)
    U(s)   <- every B(s,.) or W(s,.), or the sums S(s,.) of all replicas' gradients, which need their B or W

If a schedule is not synchronous, steps follow each other without a flush. A forward then needs the update that makes
its declared version of the weights (`version`; see `versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import ceil

from .action import Action, F, U, slice_in, split_slice
from .declared import Declared
from .reductions import NO_REDUCTIONS, Reductions, on_route, reduction_tree
from .versions import before_forward, before_update


class Spec(Declared):
    """A schedule for `num_workers` workers and `num_microbatches` microbatches a step.

    Subclasses override `after` and `slot`, and `place` and `num_stages` if a worker holds several
    stages. An annotated attribute with a default (`window: int = 2`) is a parameter of the schedule.
    Instances are immutable and hashable; all methods are pure and local, so a worker asks only about its
    actions and their neighbours.
    """

    def share(self, action: Action) -> float:
        """Return which part of its microbatch's sequence an action works on: 1, unless sequences are sliced."""
        sizes = self.parallelism.slices
        if len(sizes) == 1 or not action.kind.per_microbatch:
            return 1
        return sizes[slice_in(action.index, len(sizes))] / sum(sizes)

    @property
    def parts(self) -> int:
        """Into how many parts a sequence is divided; the sizes of its slices are numbers of parts."""
        return sum(self.parallelism.slices)

    def size(self, action: Action) -> int:
        """Return on how many of the parts of its microbatch's sequence an action works."""
        sizes = self.parallelism.slices
        return sizes[slice_in(action.index, len(sizes))]

    def following(self, steps: int) -> tuple[Spec, int]:
        """Return a spec of several steps, and how often it is run: a stream once, as its order lets steps overlap."""
        return (self, steps) if self.synchronous or steps == 1 else (replace(self, num_steps=steps), 1)

    def extent(self, action: Action) -> tuple[float, float]:
        """Return where in its microbatch's sequence an action begins and ends: 0 to 1, unless sequences are sliced."""
        sizes = self.parallelism.slices
        if len(sizes) == 1 or not action.kind.per_microbatch:
            return 0, 1
        number = slice_in(action.index, len(sizes))
        return sum(sizes[:number]) / sum(sizes), sum(sizes[: number + 1]) / sum(sizes)

    def whole_microbatch(self, action: Action) -> int:
        """Return the number, within its step, of the microbatch of whole sequences that an action is of."""
        return split_slice(action.index, len(self.parallelism.slices))[0] % self.num_whole

    @property
    def num_whole(self) -> int:
        """The number of microbatches of whole sequences in a step."""
        return self.num_microbatches // len(self.parallelism.slices)

    def index_text(self, action: Action) -> str:
        """Return the index of an action as text; of slice 1 of microbatch 3 `3.1`."""
        whole = self.extent(action) == (0, 1)
        parts = [action.index] if whole else split_slice(action.index, len(self.parallelism.slices))
        return ".".join(map(str, parts))

    @property
    def counted(self) -> str:
        """How many microbatches a step has, and of how many slices each, as text."""
        slices = len(self.parallelism.slices)
        return f"{self.num_whole} microbatches" + (f" of {slices} slices" if slices > 1 else "")

    @property
    def state_share(self) -> float:
        """Which part of a stage's optimizer states each of its replicas keeps."""
        return 1 / self.num_routes if self.parallelism.zero else 1.0

    def num_buckets(self, num_bytes: float) -> int:
        """Return into how many buckets each route's part of gradients of `num_bytes` is divided."""
        most = self.parallelism.bucket * 2**20
        return max(1, ceil(num_bytes / self.num_routes / most)) if self.num_routes > 1 else 1

    def origin(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage that sends the input of `action`; None if there is none."""
        stage, kind, microbatch = action
        return self._going(kind.way, stage - kind.way, microbatch) if kind.way else None

    def successors(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> list[Action]:
        """Return the actions that take the payload of `action`; none if it has no payload."""
        stage, kind, microbatch = action
        if not kind.per_microbatch:
            return reduction_tree(self, reductions).successors(action)
        follower = self._going(kind.way, stage + kind.way, microbatch) if kind.way else None
        return [] if follower is None else [follower]

    def _going(self, way: int, stage: int, microbatch: int) -> Action | None:
        """Return the action that sends the payload of `microbatch` from `stage` in the direction `way`."""
        if not 0 <= stage <= self.last_stage:
            return None
        return next((a for a in self.actions(stage, microbatch) if a.kind.way == way), None)

    def data(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> Iterator[Action]:
        """Yield the needs of `action` by data flow alone."""
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
            shards, others = reduction_tree(self, reductions).needs(action)
            for shard in shards:
                yield from self.accumulations(*shard)
            yield from others

    def own_actions(self, worker: int) -> Iterator[Action]:
        """Yield the actions of `worker` by stage and microbatch, without the end of a synchronous step."""
        for stage, route in self.hosted(worker):
            for m in on_route(self, range(self.total_microbatches), route):
                yield from self.actions(stage, m)
            if not self.synchronous:
                yield from self.updates(stage, route)

    def accumulations(self, stage: int, route: int) -> Iterator[Action]:
        """Yield the actions that add to the gradients of a replica of a stage in a step."""
        for m in on_route(self, range(self.total_microbatches), route):
            yield from (a for a in self.actions(stage, m) if a.kind.accumulates)

    def needs(self, action: Action, reductions: Reductions = NO_REDUCTIONS) -> list[Action]:
        """Return everything that must be finished before `action`: data flow and the schedule's edges."""
        needs = list(self.data(action, reductions))
        if self.orders(action):
            needs += [need for need in self.after(action) if need.index >= 0]
        return needs

    def orders(self, action: Action) -> bool:
        """Return whether `after` and `slot` are called for `action`; they are not for the end of a synchronous step."""
        return action.kind.per_microbatch or (action.kind is U and not self.synchronous)

    def unsliced(self) -> Spec:
        """Return the schedule over whole sequences, for the evaluation of sliced ones."""
        return self


class Transformation(Spec):
    """Common part of every schedule that is transformed in one way, such as `slicing.Sliced`."""


def _transformed(way: type[Transformation], base: type[Spec], said: str, **own: object) -> type[Spec]:
    """Return `base` transformed: the same class for the same arguments, as specs of two that are alike would differ.

    Args:
        said: text behind the schedule's name.
        own: added class attributes of the result.
    """
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": f"{base.__qualname__}[{said}]"}
    return type(base.__name__, (way, base), {**names, **own})


transformed: Callable[..., type[Spec]] = cache(_transformed)


def overrides(schedule: type[Spec], name: str) -> bool:
    """Return whether a schedule overrides a method, transformed or not: whether it has slots, for example."""
    having = (cls for cls in schedule.__mro__ if name in vars(cls))
    return next(vars(cls)[name] for cls in having if not issubclass(cls, Transformation)) is not getattr(Spec, name)
