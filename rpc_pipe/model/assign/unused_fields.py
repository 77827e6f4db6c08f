"""The fields of a batch whose data a stage does not use, by an observed forward.

A stage uses a field if one of its own operations reads the field or results of it, and if the model makes a decision by
its data (`if mask.all()`), since every stage must take the same path. Reading a shape or device is no use. The result
is a guess: the stage's own forward is then observed with placeholders for these fields.
"""

from __future__ import annotations

from ..observe.observation import Observation, Value
from ..observe.placeholder import storage_of
from ..observe.trees import Path, leaves
from .assignment import Assignment


def unused_fields(observation: Observation, assignment: Assignment, stage: int) -> frozenset[Path]:
    """Return the paths in (args, kwargs) of the fields whose data a stage does not use."""
    role = assignment.role(stage)
    is_last = stage == assignment.num_stages - 1
    wanted: set[Value] = set()
    #: storages of wanted values, whose writers are wanted too
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
