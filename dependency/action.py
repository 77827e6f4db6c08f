"""Actions, written `2F0` as the field does; their kinds and indexes; entries, a worker's view of its actions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

#: which resource of a worker an action occupies: its device, the copies between device and host, the network, or
#: nothing that counts, as a number that is passed on
Resource = Literal["compute", "copy", "link", "control"]
RESOURCES: tuple[Resource, ...] = ("compute", "copy", "link", "control")


class _Rows(type):
    def __call__(cls, letter: str, *values: Any, **row: Any) -> Any:
        """Return the kind with this row: a file or a cell that is run again makes no other one."""
        made: Kind = super().__call__(letter, *values, **row)
        known = Kind._rows.setdefault(letter, made)
        if vars(known) != vars(made):
            raise ValueError(f"kind {letter!r}: must be a capital letter; taken are {', '.join(Kind._rows)}")
        return known


@dataclass(eq=False, repr=False)
class Kind(metaclass=_Rows):
    """A kind of action: one row of the table below. A kind is callable: `F(2, 0)` is the action `2F0`.

    The row determines an action's needs by data flow. Each of the actions of a microbatch on a stage (`Spec.actions`)
    needs the one before it. An action that sends a payload to a neighbouring stage needs the action that sends it one
    in the same direction. A schedule may add rows; `docs/schedules.md` shows one.

    Args:
        letter: how the kind is written; no other kind has this letter.
        word: the work of an action of this kind, in words.
        index: what the index of an action counts: microbatches, or the routes of a step (see `Spec.num_routes`).
        resource: what an action occupies. Actions of one worker on different resources overlap.
        holds: 1 if the life of activations or weights on the device begins with the action, -1 if that life ends.
        moves: the object of `holds`: `activations` of a microbatch, as a forward leaves them, or a stage's `weights`.
            An action on `copy` takes the time of these bytes, if the bandwidth is known.
        way: where the payload goes: 1 to the next stage, -1 to the previous one, 0 nowhere.
        accumulates: whether it adds to the gradients of the stage's weights.
        colour, ink: its fill in pictures, and the colour of text on it.
    """

    _rows: ClassVar[dict[str, Kind]] = {}
    #: whether weights keep their addresses, as no kind moves any
    stay: ClassVar[bool] = True

    letter: str
    word: str
    _: KW_ONLY
    index: Literal["microbatch", "route"] = "microbatch"
    resource: Resource = "compute"
    holds: Literal[1, 0, -1] = 0
    moves: Literal["activations", "weights"] = "activations"
    way: Literal[1, 0, -1] = 0
    accumulates: bool = False
    colour: str = "#999999"
    ink: str = "#000000"

    def __post_init__(self) -> None:
        letter = self.letter
        if not re.fullmatch("[A-Z]", letter):
            raise ValueError(f"kind {letter!r}: must be a capital letter; taken are {', '.join(self._rows)}")
        rules = {"index": ("microbatch", "route"), "resource": RESOURCES, "holds": (1, 0, -1), "way": (1, 0, -1)}
        for name, known in {**rules, "moves": ("activations", "weights")}.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"kind {letter}: {name} {value!r}: must be one of {', '.join(map(str, known))}")
        for name, shade in (("colour", self.colour), ("ink", self.ink)):
            if not re.fullmatch("#[0-9a-fA-F]{6}", shade):
                raise ValueError(f"kind {letter}: {name} {shade!r}: must be such as #56b4e9")
        #: whether it is done with a microbatch, rather than once at the end of a step
        self.per_microbatch = self.index == "microbatch"
        Kind.stay &= self.moves == "activations"
        #: `holds` of activations
        self.keeps = self.holds * (self.moves == "activations")
        #: whether an action needs the weights of the update before
        self.takes_update = self.way == 1 or self.holds - self.keeps == 1

    @classmethod
    def of(cls, letter: str) -> Kind:
        """Return the kind with this letter.

        Raises:
            KeyError: there is none.
        """
        return cls._rows[letter]

    @classmethod
    def all(cls) -> tuple[Kind, ...]:
        """Return the rows of the table; rows that the user has added come last."""
        return tuple(cls._rows.values())

    @property
    def row(self) -> dict[str, Any]:
        """The row as plain values, for processes that do not run the code that made it; `learn` reads them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def learn(cls, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make the kinds of these rows, except where a letter is taken.

        Raises:
            KeyError, TypeError, ValueError: a row does not describe a kind.
        """
        for row in rows:
            if row["letter"] not in cls._rows:
                cls(**row)

    def __call__(self, stage: int, index: int) -> Action:
        return tuple.__new__(Action, (stage, self, index))  # several times as fast as the named tuple's constructor

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> tuple[Any, ...]:
        return Kind.of, (self.letter,)


class Action(NamedTuple):
    """One unit of a worker's work.

    >>> from rpc_pipe.dependency import B, F
    >>> F(2, 0), str(B(1, 13)), Action.parse("0W7")
    (2F0, '1B13', 0W7)
    """

    stage: int
    kind: Kind
    #: counts microbatches, pieces or routes, as the kind determines
    index: int  # type: ignore[assignment]  # hides a method of tuples, which is not needed here

    @property
    def microbatch(self) -> int:
        """The index of a kind that counts microbatches."""
        return self.index

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.index}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action with this text, as `str` writes it.

        Raises:
            ValueError: the text is not of the form stage, letter of a kind, index.
        """
        match = re.fullmatch(r"([0-9]{1,9})([A-Z])([0-9]{1,9})", text)
        if match is None or match[2] not in Kind._rows:
            raise ValueError(f"not an action: {text!r} (expected stage, kind, microbatch, such as 2F0)")
        return cls(int(match[1]), Kind.of(match[2]), int(match[3]))


class Pulled(NamedTuple):
    """Something another worker finishes first."""

    action: Action
    worker: int
    #: True if its payload flows to this worker; False if only its being finished matters (an order edge)
    carries: bool


class Milestone(NamedTuple):
    """A point inside an action that an action of the same worker can need, such as "bucket 3 of 2B7 is complete".

    An action that finishes has reached all its milestones.
    """

    action: Action
    number: int

    def __str__(self) -> str:
        return str(self.action)


class Entry(NamedTuple):
    """One action of a worker with everything the worker needs to know about it."""

    action: Action
    #: actions of the same worker that must be finished first, and milestones that must be reached
    own: tuple[Action | Milestone, ...]
    #: other workers' actions that must be finished first
    pulled: tuple[Pulled, ...]
    #: other workers that pull the payload of this action
    consumers: tuple[int, ...]
    #: the actions that give the payloads for this one, on any worker
    sources: tuple[Action, ...]
    #: whether an action of this worker computes from the payload of this one
    consumed_locally: bool
    #: (steps earlier, action of the same worker counted within that step) that must be finished first
    earlier: tuple[tuple[int, Action], ...] = ()


def split_step(index: int, per_step: int) -> tuple[int, int]:
    """Return the step of a stream, and the index within that step.

    >>> split_step(17, per_step=8)
    (2, 1)
    """
    return divmod(index, per_step)


def join_step(step: int, index: int, per_step: int) -> int:
    """Return the index in a stream of an index within a step."""
    return step * per_step + index


def split_slice(index: int, slices: int) -> tuple[int, int]:
    """Return the microbatch of sequences, and the number of its slice.

    >>> split_slice(7, slices=4)
    (1, 3)
    """
    return divmod(index, slices)


def slice_in(index: int, slices: int) -> int:
    """Return the number of the slice alone."""
    return index % slices


def join_slice(microbatch: int, number: int, slices: int) -> int:
    """Return the index of a slice of a microbatch of sequences."""
    return microbatch * slices + number


def split_replica(index: int, replicas: int) -> tuple[int, int]:
    """Return the index within a replica, and the replica: of microbatches, and of stages' routes.

    >>> split_replica(5, replicas=2)
    (2, 1)
    """
    return divmod(index, replicas)


def join_replica(index: int, replica: int, replicas: int) -> int:
    """Return the index in all replicas of an index within one."""
    return index * replicas + replica


def split_route(index: int, routes: int) -> tuple[int, int]:
    """Return the step of an update, or the bucket of an exchange, and the route.

    >>> split_route(7, routes=2)
    (3, 1)
    """
    return divmod(index, routes)


def route_in(index: int, routes: int) -> int:
    """Return the route alone."""
    return index % routes


def join_route(number: int, route: int, routes: int) -> int:
    """Return the index of an update in a step, or of the exchange of a bucket, on a route."""
    return number * routes + route


# The table of kinds: everything that a pipeline does. The colours suit colour-blind readers too (Okabe and Ito 2008).
# All kinds from `G` on end a synchronous step (see `reductions.py`). Replicas give their gradients (`G`) to the owners,
# which sum them (`S`); with ZeRO owners also update and give the new parameters (`P`), which replicas take (`A`). The
# loss is collected towards the last stage (`C`) and distributed from there (`D`), as are norms of gradients that are
# clipped (`N`, `T`). Stages update their weights (`U`). If an update does not wait for the norm, it is validated as the
# norm arrives (`V`).
F = Kind("F", "forward", holds=1, way=1, colour="#56b4e9")
B = Kind("B", "backward", holds=-1, way=-1, accumulates=True, colour="#e69f00")
I = Kind("I", "backward for inputs", way=-1, colour="#f0e442")  # noqa: E741  the field's letter
W = Kind("W", "backward for weights", holds=-1, accumulates=True, colour="#009e73")
#: runs the forward again from its input, because the activations were not kept
R = Kind("R", "recompute", colour="#0072b2", ink="#ffffff")
#: index = part * routes + route
H = Kind("H", "hand on gradients", index="route", resource="link", colour="#8c510a", ink="#ffffff")
#: index = bucket * routes + route
G = Kind("G", "reduce-scatter: send gradients", index="route", resource="link", colour="#d55e00")
S = Kind("S", "reduce-scatter: sum gradients", index="route", resource="link", colour="#a84300", ink="#ffffff")
P = Kind("P", "all-gather: send parameters", index="route", resource="link", colour="#f4a582")
A = Kind("A", "all-gather: receive parameters", index="route", resource="link", colour="#fbd3c0")
#: in an asynchronous stream the index of an update counts the updates
U = Kind("U", "update", index="route", colour="#cc79a7")
C = Kind("C", "collect the loss", index="route", resource="control")
D = Kind("D", "distribute the loss", index="route", resource="control")
N = Kind("N", "collect norms of gradients", index="route", resource="control")
T = Kind("T", "distribute the norm", index="route", resource="control")
V = Kind("V", "validate the update", index="route", resource="control")

#: the rows that every process has; the code of a schedule may add rows
BUILT_IN = Kind.all()
