"""An action: one kind of work on one microbatch of one stage, written `2F0` as the field does."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class Kind(enum.Enum):
    """What an action does. A kind is callable: `F(2, 0)` is the action `2F0`."""

    #: forward
    F = "F"
    #: full backward
    B = "B"
    #: backward for the inputs only
    I = "I"  # noqa: E741  the field's letter
    #: backward for the weights only
    W = "W"
    #: forward once more, from the kept input, because the activations were not kept
    R = "R"
    #: exchange of a replica's summed gradients; its microbatch names the route
    G = "G"
    #: optimizer update; its microbatch counts the updates (asynchronous) or names the route (replicas)
    U = "U"

    # Enum hashes the name in Python code; identity is enough and an action is hashed all the time.
    __hash__ = object.__hash__

    def __call__(self, stage: int, microbatch: int) -> Action:
        return Action(stage, self, microbatch)

    def __repr__(self) -> str:
        return self.value


class Action(NamedTuple):
    """One unit of a worker's work.

    >>> F(2, 0), str(B(1, 13)), Action.parse("0W7")
    (2F0, '1B13', 0W7)
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` writes.

        Raises:
            ValueError: the text is not of the form stage, kind letter, microbatch.
        """
        match = re.fullmatch(r"(\d+)([A-Z])(\d+)", text)
        if match is None or match[2] not in Kind.__members__:
            raise ValueError(f"not an action: {text!r} (expected stage, kind, microbatch, such as 2F0)")
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
R, G, U = Kind.R, Kind.G, Kind.U

#: the kinds that add to the gradients of the weights and free the activations of a microbatch
ACCUMULATING = (B, W)
#: the kinds that belong to a replica of a stage instead of a microbatch
PER_REPLICA = (G, U)
