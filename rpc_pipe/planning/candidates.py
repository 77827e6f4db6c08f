"""The candidates of a planner: schedules with parameters, microbatches and recomputation. Loads without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..dependency import ConfigError, PipeError, Spec
from ..schedules import SCHEDULES
from .plan import with_recompute
from .specs import find_schedule, make_spec, with_replicas

#: every schedule with its defaults, and with other parameters worth trying
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in SCHEDULES),
    ("interleaved", {"chunks": 4}),
    ("hanayo", {"waves": 2}),
    ("chimera", {"scale": "forward-doubling"}),
    ("chimera", {"pairs": 2}),
)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse names of which plans cannot be made.

    Raises:
        ConfigError: a name is unknown (the nearest is offered), or that of an asynchronous schedule.
    """
    for name in names:
        find_schedule(name)
        if name not in SCHEDULES:
            raise ConfigError(f"--schedule {name}: plans are made of {', '.join(SCHEDULES)}")
        if not SCHEDULES[name].synchronous:
            raise ConfigError(
                f"--schedule {name}: trains other numbers, as steps overtake updates; plans keep them apart"
            )


@dataclass(frozen=True)
class Candidate:
    """A schedule with everything but the cut."""

    schedule: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    num_microbatches: int = 1
    #: stages that recompute their activations
    recompute: tuple[int, ...] = ()

    def spec(self, num_workers: int) -> Spec:
        """Make its spec.

        Raises:
            PipeError: there is none for so many workers.
        """
        return make_spec(self.schedule, num_workers, self.num_microbatches, self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The schedule's parameters for `make_spec`, recomputation included."""
        return with_recompute(self.parameters, self.recompute)


def candidates(
    num_workers: int,
    microbatches: Iterable[int],
    *,
    recompute: bool,
    most_stages: int,
    schedules: Sequence[str] | None = None,
    replicas: Sequence[int] = (1,),
    exchange: Mapping[str, Any] | None = None,
    slices: Sequence[tuple[int, ...]] = ((1,),),
) -> Iterator[Candidate]:
    """Yield the candidates for this number of workers: without recomputation, with it on the first stages, and on all.

    The first stages hold activations for longest, so these recompute first.

    Args:
        most_stages: the most stages that the model can be cut into.
        schedules: names; None: all synchronous ones, as asynchronous ones train other parameters.
        replicas: how many replicas of the pipeline may share the workers.
        exchange: `zero`, `bucket` and `spread` of these, where there are several, as in `Spec`.
        slices: into what each sequence may be cut: sizes of slices, in parts of it.
    """
    seen = set()
    for (name, own), number, sizes in product(VARIANTS, replicas, slices):
        if schedules is not None and name not in schedules:
            continue
        sliced = None if len(sizes) == 1 else ",".join(map(str, sizes)) if len(set(sizes)) > 1 else len(sizes)
        parameters = with_replicas(own, number, slices=sliced, **((exchange or {}) if number > 1 else {})) or {}
        for count in microbatches:
            plain = Candidate(name, parameters, count)
            try:
                spec = plain.spec(num_workers)
            except PipeError:
                continue
            if not spec.synchronous or spec.num_stages > most_stages or spec in seen:
                continue
            seen.add(spec)
            yield plain
            if recompute and not type(spec).recompute:
                depth = spec.num_stages
                for first in sorted({1, depth // 2, depth - 1, depth} - {0}):
                    yield Candidate(name, parameters, count, tuple(range(first)))
