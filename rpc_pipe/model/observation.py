"""The record of one forward: its events, and the tensors that pass between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from .absent import Absent
from .promise import Promise


class Depends(IntEnum):
    """What a tensor depends on."""

    #: fields, buffers and constants alone: every stage computes it
    FIELDS = 0
    #: parameters, but no block
    WEIGHTS = 1
    #: a block
    BLOCKS = 2


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an event made, or that was there before.

    Args:
        made: the event; -1 if it was there.
    """

    tensor: Tensor
    depends: Depends
    made: int = -1


@dataclass(eq=False, slots=True)
class Output:
    """A tree that an event left somewhere: what it returned; and of blocks what a module inside returned under the
    eyes of a hook (`arguments` are then the call's), or what it left in an attribute (`name`): in the very list or dict
    that was there before, if `inside`, which others may hold too."""

    tree: Any
    module: nn.Module | None = None
    arguments: tuple[Any, Any] | None = None
    name: str = ""
    inside: bool = False


#: a value as it is after the event that made or last wrote it
Version = tuple[Value, int]


@dataclass(eq=False, slots=True)
class Event:
    """A call of a block, or of a torch function around the blocks."""

    index: int
    #: how many calls of blocks came before
    position: int
    func: Any = None
    module: nn.Module | None = None
    where: str = ""
    depends: Depends = Depends.FIELDS
    outputs: list[Output] = field(default_factory=list)
    #: what a later forward must be told too, if it is to go the same way: a number, or the shape of a tensor
    answer: Any = None
    made: list[Value] = field(default_factory=list)
    reads: set[Version] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    #: storages that were there before and that it writes
    writes: set[int] = field(default_factory=set)
    #: what a block must return again
    promise: Promise | None = None
    #: draws random numbers: counted from 1 among those at its position
    random: int = 0
    #: runs in the forward of an `autograd.Function`, whose backward stands for its own
    in_function: bool = False
    #: number of the call of `checkpoint` that will compute it again; 0: none
    checkpoint: int = 0
    #: depends on fields alone, of which some are not read here: it cannot be computed
    hollow: bool = False
    #: then what it was called with beside tensors: on that and their forms the form of its result depends
    said: Any = None
    #: of a question about numbers, what it was asked of
    asked: set[Version] = field(default_factory=set)
    #: of a question about a form, such as a shape, what it was asked of
    looked_at: set[Value] = field(default_factory=set)
    #: whether operators ran
    computes: bool = False
    #: whether for other numbers the forward may go another way behind it
    decides: bool = False

    @property
    def is_block(self) -> bool:
        """Whether it is the call of a block."""
        return self.module is not None

    @property
    def is_hook(self) -> bool:
        """Whether it hangs a hook on a tensor's gradient."""
        return self.func is Tensor.register_hook


@dataclass(frozen=True, slots=True)
class Carried:
    """Something that a forward leaves in the model for the next one, and the events that leave or use it.

    Those of a second forward are known by their positions alone.
    """

    what: str
    events: list[Event]


@dataclass(eq=False, slots=True)
class Observation:
    """What one forward did. The last event stands for the output."""

    events: list[Event]
    values: list[Value]
    #: events that call blocks, in order
    calls: list[Event]
    #: the (args, kwargs) that the forward was given
    fields: Any
    #: whether Python's or numpy's generator was drawn from
    draws_in_python: bool = False
    fields_written: bool = False
    carried: list[Carried] = field(default_factory=list)
    #: parameters that a block has exchanged for others, with the modules that hold them
    renamed: list[str] = field(default_factory=list)
    #: storage -> name of the weight or buffer
    stored: dict[int, str] = field(default_factory=dict)
    #: attributes that are others behind the forward, by module and name
    changed: set[tuple[nn.Module, str]] = field(default_factory=set)
    #: whether all stages must run to the end, since the model counts something around the blocks
    to_the_end: bool = False

    @property
    def end(self) -> Event:
        """The event that takes what the model returns."""
        return self.events[-1]


def is_hollow(value: Value, events: Sequence[Event]) -> bool:
    """Tell whether a value has no numbers because a field that it depends on is not read here."""
    return events[value.made].hollow if value.made >= 0 else not value.depends and isinstance(value.tensor, Absent)
