"""The stages that use each parameter and buffer, over all paths of the forward.

Each stage has a copy of the model's buffers, so a buffer that one stage writes must not be used by another, neither in
the same forward nor on another path, as in evaluation.
"""

from __future__ import annotations

from ...dependency import ConfigError
from .assignment import Assignment


class BufferUsers:
    """The users of parameters and buffers in the forwards that were observed so far."""

    def __init__(self) -> None:
        #: parameter or buffer -> the stages that use it; None stands for all stages
        self._users: dict[str, set[int | None]] = {}
        self._written: set[str] = set()

    def note(self, assignment: Assignment) -> None:
        """Add another path of the forward.

        Raises:
            ConfigError: a state that one stage writes is used by another.
        """
        for name, stages in assignment.users.items():
            self._users.setdefault(name, set()).update(stages)
        self._written |= assignment.written
        for name in self._written if assignment.num_stages > 1 else ():
            stages = self._users.get(name, set())
            if len(stages) > 1:
                told = "all" if None in stages else ", ".join(map(str, sorted(s for s in stages if s is not None)))
                raise ConfigError(
                    f"model: {name} is written by a forward that goes one way (as in training), and where it goes "
                    f"another way it is used on other stages (of {told}), each of which has a copy of its own; write "
                    f"and use it in one block"
                )
