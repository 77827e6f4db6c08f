"""Which stages use what the model keeps, over all the ways that its forwards go.

Each stage has a copy of the model's buffers. What a forward writes on one stage another stage does not see: not the one
that uses it in the same forward, and not one that uses it where the forward goes another way, as in evaluation.
"""

from __future__ import annotations

from ..dependency import ConfigError
from .assignment import Assignment


class Users:
    """What was seen of forwards so far."""

    def __init__(self) -> None:
        #: parameter or buffer -> the stages that use it; None: all
        self._users: dict[str, set[int | None]] = {}
        self._written: set[str] = set()

    def note(self, assignment: Assignment) -> None:
        """Hear of another way.

        Raises:
            ConfigError: what is written on one stage is used on another.
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
