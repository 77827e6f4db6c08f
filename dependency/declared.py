"""A schedule's declarations: placement, order, nominal time, versions. `Spec` (`spec.py`) derives the rest.

A field of `Parallelism` is the one place of an option that divides training further than into stages: its default, its
type, its rule and its help text. `Pipeline`, the command line and `make_spec` read them here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from .action import Action, B, F, I, R, U, W, join_route, route_in, split_step
from .errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


#: names of FSDP2 as a stage's division over members: gathered for each microbatch, or once a step
FSDP_KEPT = "fsdp-kept"
FSDP = ("fsdp", FSDP_KEPT)
#: most slices of a sequence, and parts of a slice
_MOST_SLICES = 65_536


class _Option(NamedTuple):
    """How an option is read."""

    #: makes the value from a given one, which may be text
    kind: Callable[[Any], Any]
    allows: Callable[[Any], bool]
    #: text of the error if the value is not allowed
    rule: str
    #: whether it has a meaning only if there are several replicas
    of_replicas: bool
    #: arguments of the option of the command line
    typed: Mapping[str, Any]


def _option(
    usual: Any, kind: Callable[[Any], Any], allows: Callable[[Any], bool], rule: str, of_replicas: bool, **typed: Any
) -> Any:
    return field(default=usual, metadata={"option": _Option(kind, allows, rule, of_replicas, typed)})


def _sizes(said: int | str | None) -> tuple[int, ...]:
    """Read the cut of each sequence: sizes of its slices, in parts of the sequence.

    >>> _sizes("4"), _sizes("8,6,5,4")
    ((1, 1, 1, 1), (8, 6, 5, 4))
    """
    if said is None:
        return (1,)
    sizes = tuple(int(part) for part in str(said).split(","))
    return (1,) * min(sizes[0], _MOST_SLICES + 1) if len(sizes) == 1 else sizes


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How training is divided beyond the stages of a schedule."""

    #: number of replicas of the pipeline, with gradients that are summed; see `replicating.py`
    replicas: int = _option(
        1, int, lambda count: count > 0, "must be a whole number of at least 1", False,
        least=1, help="replicas of the pipeline, which share the workers (1)",
    )  # fmt: skip
    #: 1 if only the owner of a parameter keeps its optimizer state and updates it (ZeRO stage 1)
    zero: int = _option(
        0, int, lambda stage: stage in (0, 1), "must be 0, or 1 to divide optimizer states among replicas; take 1",
        True, least=0, help="1: divide optimizer states among the replicas (0)",
    )  # fmt: skip
    #: largest bucket of gradients in MiB
    bucket: float = _option(
        25.0, float, lambda size: 0 < size < float("inf"), "must be a size in MiB above 0; take 25",
        True, metavar="MIB", help="largest part of gradients that replicas exchange at once (25)",
    )  # fmt: skip
    #: the workers with numbers far apart: of each pipeline, or of each stage
    spread: str = _option(
        "pipelines", str, lambda what: what in ("pipelines", "stages"),
        "must be pipelines, each over all hosts, or stages, each pipeline on as few hosts as can be; take stages",
        True, help="stages: put the replicas of a stage far apart, not each pipeline (pipelines)",
    )  # fmt: skip
    #: sizes of the slices of a sequence, in parts of it. Each slice of a microbatch has an index; see `slicing.py`
    slices: tuple[int, ...] = _option(
        (1,), _sizes, lambda sizes: 1 <= min(sizes) and max(*sizes, len(sizes)) <= _MOST_SLICES,
        f"must be a number from 1 to {_MOST_SLICES}, or sizes, such as 8,6,5,4",
        False, metavar="K", help="cut sequences into K slices, or sizes such as 8,6,5,4 (1)",
    )  # fmt: skip

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], own: Collection[str]) -> Parallelism:
        """Take the options out of a schedule's parameters, except the names in `own`.

        Raises:
            ConfigError: an option has an impossible value, or is of replicas, and there is one.
        """
        read = {name: _read(name, parameters.pop(name)) for name in OPTIONS if name in parameters.keys() - own}
        made = cls(**{name: value for name, (_, value) in read.items()})
        for name in EXCHANGE if made.replicas == 1 else ():
            if getattr(made, name) != getattr(cls, name):
                rule = "is of replicas, and there is one; take replicas 2, or leave it out"
                raise ConfigError(f"{name} {read[name][0]}: {rule}")
        return made


def _read(name: str, said: Any) -> tuple[Any, Any]:
    """Return an option as it was given, and its value."""
    option = OPTIONS[name]
    try:
        found = option.kind(said)
        is_right = option.allows(found) and (option.kind is not int or str(found) == str(said))
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{name} {said}: {option.rule}")
    return said, found


#: the options by name, in the order of their fields
OPTIONS: Mapping[str, _Option] = {each.name: each.metadata["option"] for each in fields(Parallelism)}
#: how replicas exchange gradients, and where they are
EXCHANGE = tuple(name for name, option in OPTIONS.items() if option.of_replicas)
REPLICAS = ("replicas", *EXCHANGE)


def with_parallelism(parameters: Mapping[str, Any] | None, **said: Any) -> Mapping[str, Any] | None:
    """Return a schedule's parameters with the options that are given and not default."""
    found = {name: said[name] for name in OPTIONS if said.get(name) not in (None, getattr(Parallelism, name))}
    return {**(parameters or {}), **found} if found else parameters


Order = Literal["ready", "fixed"]
#: between two workers' parts of a replica: the last backward of a part, its `H`, the first backward of the next part
Handover = tuple[Action, Action, Action]
#: parameters of every spec
NO_PARAMETERS = ("num_workers", "num_microbatches", "num_steps")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Frozen:
    """Makes every subclass a frozen keyword-only dataclass, so that a parameter is one annotated line."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)


class Declared(_Frozen):
    """The methods and properties that a schedule may override, and the placement that follows from them."""

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
    #: parameters with which `plan` tries the schedule
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    #: the workers with which the job began; None: these
    numbers: ClassVar[range | None] = None
    #: replicas and slices, which transformations of a schedule add
    parallelism: ClassVar[Parallelism] = Parallelism()

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_microbatches", "num_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")

    # --- declarations of a schedule

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
    def averaging_pull(self) -> float:
        """How far each update pulls the weights of a route and their common reference to each other; 0: not at all."""
        return 0.0

    def place(self, stage: int, route: int) -> int:
        """Return the worker that hosts `stage` for the microbatches of `route`."""
        return stage % self.num_workers

    def route(self, microbatch: int) -> int:
        """Return the route that `microbatch` takes."""
        return microbatch % self.num_routes

    def splits(self, stage: int, microbatch: int) -> bool:
        """Return whether this backward is `I` and `W` instead of `B`; a schedule may mix them."""
        return self.split_backward

    def recomputes(self, stage: int) -> bool:
        """Return whether `stage` keeps only its inputs and runs `R` before backward."""
        return self.recompute

    def after(self, action: Action) -> Iterable[Action]:
        """Return the actions to finish before `action`, beyond data flow: windows, a flush, a lag.

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
        return split_step(microbatch, self.num_microbatches)[0]

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

    def peak_weights(self, worker: int) -> int | None:
        """Return the most stages that have weights on `worker` at once, at any timing; None: no claim.

        For schedules with kinds that move weights. The checker proves a claim.
        """
        return None

    def moved(self, action: Action) -> int:
        """Return the stage whose activations or weights an action moves."""
        return action.stage

    # --- the placement that follows

    @property
    def workers(self) -> Collection[int]:
        """The workers that take part."""
        return range(self.num_workers)

    @property
    def handovers(self) -> Sequence[Handover]:
        """The places where a part of a replica ends, and the next one begins on another worker."""
        return ()

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    @property
    def num_separate(self) -> int:
        """How many routes of a replica have separate weights: all, where updates follow each other; else 1."""
        return 1 if self.synchronous else self.num_routes // self.parallelism.replicas

    def alike(self, route: int) -> range:
        """Return the routes with the weights of a route, whose gradients are summed."""
        return range(route % self.num_separate, self.num_routes, self.num_separate)

    @property
    def round_size(self) -> int:
        """How many microbatches of a step, on all routes together, are between an update of a route and the next."""
        if self.update_every == "microbatch" and not self.synchronous:
            return len(self.parallelism.slices) * self.parallelism.replicas
        return self.num_microbatches

    @property
    def num_rounds(self) -> int:
        """How many updates a step has on each route."""
        return -(-self.num_microbatches // self.round_size)

    @property
    def takes_steps(self) -> bool:
        """Whether each update takes the gradients of a whole step, on all routes."""
        return self.synchronous or (self.update_every == "step" and self.num_separate == 1)

    @property
    def total_microbatches(self) -> int:
        """The number of microbatches in all steps that are considered together."""
        return self.num_microbatches * self.num_steps

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        """Return the actions of a microbatch on a stage, in order of data flow: each needs the one before it.

        A schedule that adds kinds overrides this method.
        """
        forward = (F(stage, microbatch), R(stage, microbatch)) if self.recomputes(stage) else (F(stage, microbatch),)
        if self.splits(stage, microbatch):
            return *forward, I(stage, microbatch), W(stage, microbatch)
        return *forward, B(stage, microbatch)

    def updates(self, stage: int, route: int) -> Iterable[Action]:
        """Return the updates of a replica of a stage: one for synchronous schedules, else by `update_every`."""
        numbers = range(self.num_rounds * self.num_steps)
        return (U(stage, join_route(number, route, self.num_routes)) for number in numbers)

    def worker(self, action: Action) -> int:
        """Return the worker that runs `action`."""
        stage, kind, index = action
        if not kind.per_microbatch:
            return self.place(stage, route_in(index, self.num_routes))
        return self.place(stage, self.route(index))

    def hosted(self, worker: int) -> list[tuple[int, int]]:
        """Return (stage, route) of every shard that `worker` holds, in stage order."""
        return list(_hosts(self).get(worker, ()))

    def own_place(self, worker: int) -> tuple[int, int]:
        """Return the replica of `worker`, and which worker of it `worker` is."""
        return 0, worker

    def carried(self, worker: int) -> list[tuple[int, int]]:
        """Return (stage, route) of every shard with microbatches that `worker` may run."""
        return self.hosted(worker)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that this schedule adds, and their values."""
        own = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in own if name not in NO_PARAMETERS}


@lru_cache(maxsize=16)
def _hosts(spec: Declared) -> dict[int, list[tuple[int, int]]]:
    """Return each worker's (stage, route) pairs. Cached: a search per worker takes minutes with 10,000 workers."""
    hosts: dict[int, list[tuple[int, int]]] = {}
    for stage in range(spec.num_stages):
        for route in range(spec.num_routes):
            hosts.setdefault(spec.place(stage, route), []).append((stage, route))
    return hosts
