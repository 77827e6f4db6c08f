"""The record of one observed forward: its events, and the tensors that pass between them."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from .trees import Path


class Depends(IntEnum):
    """The most that a tensor depends on."""

    #: fields of the batch, buffers and constants alone: every stage computes it
    FIELDS = 0
    #: parameters, but no block
    WEIGHTS = 1
    #: outputs of blocks
    BLOCKS = 2


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an event made, or that existed before the forward.

    Args:
        made: index of the event; -1: it existed before.
    """

    tensor: Tensor
    depends: Depends
    made: int = -1


@dataclass(frozen=True, slots=True)
class SideEffect:
    """A side effect of a block: the arguments that hooks see, an attribute, or the new contents of a container.

    Args:
        module: the module that has the hooks or the attribute; None: it is a container that the block was given.
        name: of the attribute; "": hooks see (args, kwargs, result).
        inside: whether the block has filled the list or dict that was there before, which other modules may hold too.
        path: of the container in the (args, kwargs) of the block.
    """

    module: nn.Module | None = None
    name: str = ""
    inside: bool = False
    path: Path = ()


#: a value, with the event that made or last wrote it before it was read; -1: none
Version = tuple[Value, int]


@dataclass(eq=False, slots=True)
class Event:
    """A call of a block, or of a torch function around the blocks."""

    index: int
    #: number of calls of blocks before it
    position: int
    func: Any = None
    module: nn.Module | None = None
    where: str = ""
    depends: Depends = Depends.FIELDS
    #: the trees of tensors that it leaves: its result, then that of each side effect of a block
    trees: list[Any] = field(default_factory=list)
    effects: list[SideEffect] = field(default_factory=list)
    #: names of watched containers with other contents behind it
    fills: list[str] = field(default_factory=list)
    #: the result that a later forward on the same path must have again: a number, or the shape of a tensor
    answer: Any = None
    made: list[Value] = field(default_factory=list)
    reads: set[Version] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    #: storages from before the event that it writes
    writes: set[int] = field(default_factory=set)
    #: its number from 1 among the events at its position that draw random numbers; 0: it draws none
    random: int = 0
    #: whether it runs inside the forward of an `autograd.Function`, which defines a backward
    in_function: bool = False
    #: number of the call of `checkpoint` that recomputes it; 0: none
    checkpoint: int = 0
    #: if it returns data of tensors, such as `item`: these tensors
    asked: set[Version] = field(default_factory=set)
    #: of a test for finite numbers: its result if they are, used by stages without the numbers
    presumed: bool | None = None
    #: whether operators ran
    computes: bool = False
    #: whether the forward may take another path behind it for other data
    decides: bool = False

    @property
    def called(self) -> Any:
        """The block or torch function."""
        return self.func if self.module is None else self.module

    @property
    def is_block(self) -> bool:
        """Whether it is the call of a block."""
        return self.module is not None

    @property
    def is_hook(self) -> bool:
        """Whether it registers a gradient hook on a tensor."""
        return self.func is Tensor.register_hook


@dataclass(frozen=True, slots=True)
class CarriedState:
    """State that one forward leaves in the model for the next, with the events that write or read it.

    Events of the second forward are known by their positions only.
    """

    what: str
    events: list[Event]


@dataclass(eq=False, slots=True)
class Observation:
    """The record of one forward. Its last event stands for the output."""

    events: list[Event]
    values: list[Value]
    #: events that call blocks, in order
    calls: list[Event]
    #: the (args, kwargs) that the forward was given
    fields: Any
    fields_written: bool = False
    carried: list[CarriedState] = field(default_factory=list)
    #: storage -> name of the weight or buffer
    stored: dict[int, str] = field(default_factory=dict)
    #: names of the weights and buffers that were given other storage
    exchanged: set[str] = field(default_factory=set)
    #: (module, name) of the attributes that the forward has changed
    changed: set[tuple[nn.Module, str]] = field(default_factory=set)
    #: events before which transforms of `torch.func` ran around the blocks; functions in these are no events
    transforms: set[int] = field(default_factory=set)
    #: modules that the forward has registered hooks on
    hooked: set[nn.Module] = field(default_factory=set)
    #: whether all stages must run to the end, since the model changes state around the blocks
    to_the_end: bool = False

    @property
    def end(self) -> Event:
        """The event that reads the model's result."""
        return self.events[-1]
