"""Any schedule over slices of a sequence (TeraPipe, Li et al. 2021; Seq1F1B, Sun et al. 2024, arXiv:2406.03488).

Each microbatch is cut along its sequence into k slices, which run one by one: slice j of microbatch m has the index
m*k + j. A later slice reads what earlier ones left (keys and values, a recurrent state), so beyond the schedule's own
relation

    F(m,j) <- F(m,j-1)              B(m,j) <- B(m,j+1)              I and W as B

The schedule itself is asked about *units*. A forward of index i is its unit i. Backwards of a microbatch run from the
last slice to the first, and the first of them needs the last forward: so backwards count from the last slice on, and
k - 1 units later than forwards. The schedule's slots in these units grow along all edges, the two above included, and
its windows become k - 1 slices wider. A unit that no slice has (the last k - 1 forwards, the first k - 1 backwards)
hands on what it waits for.

Workers keep to the order of these slots, unless the schedule says another order: in a window that is k - 1 slices wider
a forward that arrives a moment late would be overtaken by a backward, for which the stages behind it would wait too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from .action import Action
from .errors import ConfigError
from .kinds import F
from .spec import Spec, made_once


@made_once
def sliced(base: type[Spec], sizes: tuple[int, ...]) -> type[Spec]:
    """Return `base` over slices of a sequence.

    Its `num_microbatches` counts slices, so it must be a multiple of their number.

    Args:
        sizes: of each slice, in parts of a sequence, first to last; (1, 1, 1, 1) are four equal slices.

    Raises:
        ConfigError: the schedule cannot be sliced, and why, in words that follow its name.
    """
    why_not = _why_not(base)
    if why_not:
        raise ConfigError(f"{why_not}; 1f1b, zb-h1 and zb-v can be sliced")
    k = len(sizes)

    def check_number(self: Spec) -> None:
        base.__post_init__(self)
        if self.num_microbatches % k:
            raise ConfigError(f"num_microbatches {self.num_microbatches}: must be a multiple of the {k} slices")

    def unsliced(self: Spec) -> Spec:
        return base(
            num_workers=self.num_workers, num_microbatches=max(1, self.num_microbatches // k), **self.parameters()
        )

    own: dict[str, Any] = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": f"{base.__qualname__}[slices {'+'.join(map(str, sizes))}]",
        "__post_init__": check_number,
        "slice_sizes": sizes,
        "unsliced": unsliced,
        **_methods(base, k),
    }
    return type(base.__name__, (base,), own)


def _methods(base: type[Spec], k: int) -> dict[str, Any]:
    """Return what `base` over k slices answers instead of `base`."""

    @lru_cache(maxsize=16)
    def units_of(spec: Spec) -> _Units:
        count, said = spec.num_microbatches, spec.parameters()
        exact = base(num_workers=spec.num_workers, num_microbatches=count, **said)
        if _goes_back(exact):
            return _Units(exact, count, k, None)
        later = base(num_workers=spec.num_workers, num_microbatches=count + k - 1, **said)
        return _Units(later, count, k, k - 1)

    def after(self: Spec, action: Action) -> Iterable[Action]:
        j, step = action.index % k, -1 if action.kind is F else 1
        before = [action._replace(index=action.index + step)] if 0 <= j + step < k else []
        return [*dict.fromkeys([*before, *units_of(self).after(action)])]

    def slot(self: Spec, action: Action) -> int:
        units = units_of(self)
        return units.spec.slot(units.unit(action))

    def program(self: Spec, worker: int) -> Iterator[Action]:
        units = units_of(self)
        return (action for unit in units.spec.program(worker) if (action := units.action(unit)) is not None)

    def activation_limit(self: Spec, worker: int) -> int | None:
        units = units_of(self)
        return units.wider(units.spec.activation_limit(worker), worker)

    def peak_activations(self: Spec, worker: int) -> int | None:
        units = units_of(self)
        return units.wider(units.spec.peak_activations(worker), worker)

    methods: dict[str, Any] = {
        "after": after,
        "activation_limit": activation_limit,
        "peak_activations": peak_activations,
    }
    if base.slot is not Spec.slot:
        methods["slot"] = slot
        if base.order is Spec.order:
            methods["order"] = property(lambda spec: "fixed")
    if base.program is not Spec.program:
        methods["program"] = program
    return methods


def _why_not(base: type[Spec]) -> str:
    """Return why a schedule cannot be sliced; "": it can."""
    if not base.synchronous:
        return "lets steps overlap"
    if base.num_routes is not Spec.num_routes:
        return "has several replicas of every stage"
    if base.recompute:
        return "recomputes by itself"
    if base.actions is not Spec.actions:
        return "says by `actions` what is done with a microbatch"
    if base.splits is not Spec.splits:
        return "splits some backwards and others not"
    return ""


class _Units:
    """What the schedule itself is asked about, and how its actions and those of slices correspond.

    Args:
        spec: the schedule of as many units as there are.
        count: number of slices in a step.
        shift: by how many units backwards are later; None: backwards go from the last index to the first, as GPipe's
            do, so that each is its own unit.
    """

    def __init__(self, spec: Spec, count: int, k: int, shift: int | None) -> None:
        self.spec, self._count, self._k, self._shift = spec, count, k, shift

    def unit(self, action: Action) -> Action:
        """Return the unit of a slice's action."""
        if action.kind is F or self._shift is None:
            return action
        return action._replace(index=self._reversed(action.index) + self._shift)

    def action(self, unit: Action) -> Action | None:
        """Return the slice's action that has this unit; None: there is none."""
        if unit.kind is F or self._shift is None:
            return unit if 0 <= unit.index < self._count else None
        turn = unit.index - self._shift
        return unit._replace(index=self._reversed(turn)) if 0 <= turn < self._count else None

    def _reversed(self, index: int) -> int:
        """Swap a slice with the one that is as far from the end of its microbatch as it is from the beginning."""
        m, j = divmod(index, self._k)
        return m * self._k + self._k - 1 - j

    def after(self, action: Action) -> list[Action]:
        """Return what the schedule adds to be itself."""
        found: list[Action] = []
        todo, seen = list(self.spec.after(self.unit(action))), set[Action]()
        while todo:
            need = todo.pop(0)
            if need.index < 0 or need in seen:
                continue
            seen.add(need)
            exists = self.action(need)
            if exists is not None:
                found.append(exists)
                continue
            todo += self.spec.after(need)
            if need.kind is F:
                todo.append(F(need.stage, self._count - 1))
        return found

    def wider(self, most: int | None, worker: int) -> int | None:
        """Return a bound on microbatches of a worker's stages as a bound on their slices."""
        if most is None:
            return None
        stages = len(self.spec.hosted(worker))
        return min(most + (self._shift or 0) * stages, self._count * stages)


def _goes_back(spec: Spec) -> bool:
    """Return whether backwards run from the last microbatch to the first."""
    if type(spec).slot is Spec.slot or spec.num_microbatches == 1:
        return False
    first, second = (next(a for a in spec.actions(0, m) if a.kind.way == -1) for m in (0, 1))
    return spec.slot(first) > spec.slot(second)
