"""Which fields of a batch a stage was seen to use the numbers of, from an observed forward.

What is made of fields alone every stage would compute. It needs to where one of its own operations takes it, and where
the model asks for numbers of it (`if mask.all()`), since every stage must go the same way. To ask a field for its shape
or its device is no use. Whether a stage does without a field is not decided here: its own forward is then observed with
something hollow in the field's place, of which nothing can be computed.
"""

from __future__ import annotations

from .absent import storage_of
from .assignment import Assignment
from .observation import Observation, Value
from .trees import Path, leaves


def unused_fields(observation: Observation, assignment: Assignment, stage: int) -> frozenset[Path]:
    """Return the places in (args, kwargs) of fields whose numbers a stage was not seen to use."""
    role = assignment.role(stage)
    is_last = stage == assignment.num_stages - 1
    wanted: set[Value] = set()
    #: of what is wanted: who writes there before is wanted, too
    storages: set[int] = set()
    for event in reversed(
        observation.events if is_last or observation.to_the_end else observation.events[: role.last + 1]
    ):
        if assignment.stage_of[event.index] is None:
            made = any(value in wanted for value in event.made)
            needed = made or bool(event.asked or event.writes & storages)
        else:
            needed = event.index in role.own
        if needed:
            taken = {value for value, _ in event.reads | event.asked}
            wanted |= taken
            storages |= {storage_of(value.tensor) for value in taken}
    used = {id(value.tensor) for value in wanted}
    return frozenset(path for path, tensor in leaves(observation.fields) if id(tensor) not in used)
