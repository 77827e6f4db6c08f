"""Any schedule over slices of a sequence (TeraPipe, Li et al. 2021; Seq1F1B, Sun et al. 2024, arXiv:2406.03488).

Each microbatch is cut along its sequence into k slices, which run one by one: slice j of microbatch m has the index
m*k + j. A later slice reads the keys and values, or the recurrent state, of earlier slices. So the relation gains the
edges

    F(m,j) <- F(m,j-1)              B(m,j) <- B(m,j+1)              I and W as B

The schedule itself is asked about *units*. A forward of index i is its unit i. Backwards of a microbatch run from the
last slice to the first, and the first of them needs the last forward: so backwards count from the last slice on, and
k - 1 units later than forwards. The schedule's slots in these units grow along all edges, the two above included, and
its windows become k - 1 slices wider. A unit that no slice has (the last k - 1 forwards, the first k - 1 backwards)
hands its needs on.

In a stream without a flush, units are counted through the stream. All slices of a microbatch use one version of the
weights: the newest that the schedule declares for its first unit and that backwards, which are late, have made by then.

Workers keep to the order of these slots, unless the schedule declares another order. A window that is k - 1 slices
wider would let a backward overtake a forward that arrives a moment late, and the stages behind it would wait.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import ClassVar

from .action import Action, F, U, join_slice, slice_in, split_slice
from .crossings import refuse_kinds
from .declared import Order, Parallelism
from .errors import ConfigError
from .spec import Spec, Transformation, overrides, transformed
from .versions import microbatches_of


def sliced(base: type[Spec], sizes: tuple[int, ...]) -> type[Spec]:
    """Return `base` over slices of a sequence.

    Its `num_microbatches` counts slices, so it must be a multiple of their number.

    Args:
        sizes: of each slice, in parts of a sequence, first to last; (1, 1, 1, 1) are four equal slices.

    Raises:
        ConfigError: the schedule cannot be sliced, and why, in words that follow its name.
    """
    refuse_kinds("slices", base)
    said = f"slices {'+'.join(map(str, sizes))}"
    return transformed(Sliced, base, said, parallelism=Parallelism(slices=sizes), whole=base)


class Sliced(Transformation):
    """A schedule over slices."""

    #: the schedule over whole sequences
    whole: ClassVar[type[Spec]]

    def __post_init__(self) -> None:
        super().__post_init__()
        k = len(self.parallelism.slices)
        if self.num_microbatches % k:
            raise ConfigError(f"num_microbatches {self.num_microbatches}: must be a multiple of the {k} slices")

    def _of_whole(self, count: int) -> Spec:
        return self.whole(num_workers=self.num_workers, num_microbatches=count, **self.parameters())

    def unsliced(self) -> Spec:
        return self._of_whole(self.num_microbatches // len(self.parallelism.slices))

    @cached_property
    def _units(self) -> Spec:
        """The spec that is asked about units; it counts the units of a step as microbatches."""
        return self._of_whole(self.num_microbatches + self._shift * self.synchronous)

    @cached_property
    def _shift(self) -> int:
        """How many units later than forwards the backwards are.

        0: they go from the last index to the first, as GPipe's do, so that an index is its unit.
        """
        return 0 if _goes_back(self._of_whole(self.num_microbatches)) else len(self.parallelism.slices) - 1

    @property
    def order(self) -> Order:
        cls = type(self)
        return "fixed" if overrides(cls, "slot") and not overrides(cls, "order") else super().order

    def after(self, action: Action) -> Iterable[Action]:
        k, step = len(self.parallelism.slices), -1 if action.kind is F else 1
        goes_on = action.kind.per_microbatch and 0 <= slice_in(action.index, k) + step < k
        before = [action.kind(action.stage, action.index + step)] if goes_on else []
        return [*dict.fromkeys([*before, *self._said_after(action)])]

    def _said_after(self, action: Action) -> Iterator[Action]:
        """Yield the schedule's edges; an edge to a unit without a slice becomes the edges of that unit."""
        todo, seen = list(self._units.after(self._unit(action))), set[Action]()
        while todo:
            need = todo.pop(0)
            if need.index < 0 or need in seen:
                continue
            seen.add(need)
            exists = self._slice(need)
            if exists is not None:
                yield exists
                continue
            todo += self._units.after(need)
            if need.kind is F:
                todo.append(F(need.stage, self.num_microbatches - 1))

    def slot(self, action: Action) -> int:
        if action.kind.per_microbatch:
            return 2 * self._units.slot(self._unit(action))
        stage, taken = action.stage, microbatches_of(self, action)[-len(self.parallelism.slices) :]
        return 1 + max(self.slot(a) for m in taken for a in self.actions(stage, m) if a.kind.accumulates)

    def version(self, stage: int, microbatch: int) -> int:
        k = len(self.parallelism.slices)
        of_sequences, _ = split_slice(microbatch, k)  # with one version for all of its slices
        first = F(stage, join_slice(of_sequences, 0, k))
        version = self._units.version(stage, first.index)
        if self.update_every == "microbatch":  # a microbatch's last unit comes k - 1 units late
            return max(0, split_slice(version - self._shift, k)[0])
        while version and self.slot(U(stage, version - 1)) > self.slot(first):
            version -= 1
        return version

    def program(self, worker: int) -> Iterator[Action]:
        return (action for unit in self._units.program(worker) if (action := self._slice(unit)) is not None)

    def activation_limit(self, worker: int) -> int | None:
        return self._wider(self._units.activation_limit(worker), worker)

    def peak_activations(self, worker: int) -> int | None:
        return self._wider(self._units.peak_activations(worker), worker)

    def _wider(self, most: int | None, worker: int) -> int | None:
        """Return a bound on microbatches of a worker's stages as a bound on their slices."""
        stages = len(self.hosted(worker))
        most = None if most is None else most + self._shift * stages
        return most if most is None or not self.synchronous else min(most, self.num_microbatches * stages)

    def _unit(self, action: Action) -> Action:
        """Return the unit of a slice's action; of an update after each microbatch, that of its last backward."""
        k, index = len(self.parallelism.slices), action.index
        if not action.kind.per_microbatch:
            late = self.update_every == "microbatch"
            return action.kind(action.stage, join_slice(index, k - 1, k) + self._shift) if late else action
        if action.kind is F or not self._shift:
            return action
        return action.kind(action.stage, self._reversed(index) + self._shift)

    def _slice(self, unit: Action) -> Action | None:
        """Return the slice's action that has this unit, or the last update up to it; None: there is none."""
        k, turn = len(self.parallelism.slices), unit.index - (0 if unit.kind is F else self._shift)
        if not unit.kind.per_microbatch:
            index = split_slice(turn - k + 1, k)[0] if self.update_every == "microbatch" else unit.index
            return unit.kind(unit.stage, index) if index >= 0 else None
        if turn < 0 or (turn >= self.num_microbatches and self.synchronous):
            return None
        return unit if unit.kind is F or not self._shift else unit.kind(unit.stage, self._reversed(turn))

    def _reversed(self, index: int) -> int:
        """Swap a slice with the one that is as far from the end of its microbatch as it is from the beginning."""
        k = len(self.parallelism.slices)
        microbatch, number = split_slice(index, k)
        return join_slice(microbatch, k - 1 - number, k)


def _goes_back(spec: Spec) -> bool:
    """Return whether backwards run from the last microbatch to the first."""
    if not overrides(type(spec), "slot") or spec.num_microbatches == 1:
        return False
    first, second = (next(a for a in spec.actions(0, m) if a.kind.way == -1) for m in (0, 1))
    return spec.slot(first) > spec.slot(second)
