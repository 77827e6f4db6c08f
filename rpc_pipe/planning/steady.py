"""The figures of a schedule of any size: by streams where these describe it, else by a simulation of every action.

Loads without torch.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from ..dependency import Action, ConfigError, Order, Spec, check, check_all
from ..dependency.streams import NotRegular, Streams
from ..schedules import SCHEDULES, name_of
from ..system.garbage import uncollected
from .simulator import Cost, Link, Simulation, different, simulate
from .waves import Priced as Priced
from .waves import run

#: most forwards that are simulated action by action, in 3 GB
MAX_SIMULATED = 1_000_000
#: most microbatches of all steps that are priced, in seconds: each takes some moments of a run
MOST_PRICED = 100_000
#: up to this number of forwards, every worker's part is checked before a simulation
MAX_CHECKED = 5_000


def price(
    spec: Spec,
    cost: Cost,
    *,
    comm: float = 0,
    order: Order | None = None,
    steps: int = 1,
    links: Mapping[tuple[int, int], Link] | None = None,
    payload: Callable[[Action], float] | None = None,
    uplinks: Mapping[int, float] | None = None,
) -> Priced | Simulation:
    """Return the figures that `simulate` finds for the same arguments, or its simulation.

    Raises:
        ConfigError: every action would have to be simulated, which are too many.
        ScheduleError: the run cannot finish.
    """
    links, order = links or {}, order or spec.order

    def latency(source: int, target: int) -> float:
        link = links.get((source, target))
        return comm if link is None else link.latency

    if not uplinks and all(link.bandwidth == float("inf") for link in different(links)):
        one_run, times = spec.following(steps)
        try:
            with uncollected():
                streams = _streams(one_run, cost, order == "fixed")
                streams = streams if times == 1 else streams.followed(times)
                return run(streams, [comm, *(link.latency for link in different(links))], latency)
        except NotRegular:
            pass
    refuse_many(spec, steps, f"schedule {name_of(spec)}")
    return simulate(spec, cost, comm=comm, order=order, steps=steps, links=links, payload=payload, uplinks=uplinks)


@lru_cache(maxsize=1)
def _streams(spec: Spec, cost: Cost, fixed: bool) -> Streams:
    """Return the streams of a step. Cached: a comparison asks for one step and for several."""
    return Streams(spec, cost, fixed=fixed)


def check_some(spec: Spec) -> None:
    """Check the part of every worker; with many forwards, of worker 0 of a schedule that is not built in.

    A run shows the faults of the rest.

    Raises:
        ScheduleError: a rule is broken.
    """
    if spec.num_stages * spec.num_microbatches <= MAX_CHECKED:
        check_all(spec)
    elif name_of(spec) not in SCHEDULES:
        check(spec, 0)


def refuse_long(num_microbatches: int, steps: int = 1) -> None:
    """Refuse to price more microbatches than any schedule can be priced with.

    Raises:
        ConfigError: there are too many.
    """
    if (count := num_microbatches * steps) > MOST_PRICED:
        said = f"--microbatches {num_microbatches}" + f" --steps {steps}" * (steps > 1)
        raise ConfigError(f"{said}: {count} microbatches are more than {MOST_PRICED}, the most; steps are alike")


def refuse_many(spec: Spec, steps: int, what: str) -> None:
    """Refuse a simulation of each action that would take minutes, and more memory than most machines have.

    Raises:
        ConfigError: there are too many actions.
    """
    forwards = spec.num_stages * spec.num_microbatches * steps
    if forwards > MAX_SIMULATED:
        raise ConfigError(f"{what}: needs every action; {forwards} forwards are more than {MAX_SIMULATED}, the most")
