"""The script of a stage: for every event of the forward, whether the stage runs it, or the value in its place.

A script is made of one observation and followed by every microbatch of the same shapes (`scripted_forward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from ...workers.compute.modules.module_state import ModuleState
from ..assign.assignment import Assignment, Owners, Role, fewest_bytes
from ..observe.observation import Event, Observation
from ..observe.output_contract import form_of
from ..observe.placeholder import Placeholder
from ..observe.skeleton import Skeleton
from ..observe.trees import Path, leaves, mapped, replaced, tensors

#: path in the trees of an event, id of the observed tensor
_Place = tuple[Path, int]


class Departed(BaseException):
    """A script does not serve a forward. A BaseException, so that no model catches it."""


class Diverged(Departed):
    """The forward calls another function than the script, or gets another answer.

    Args:
        event: index of the event.
        func: the function or block that the model called there.
        answer: the answer that it got there, if the call was as expected.
    """

    def __init__(self, event: int, func: Any, answer: Any = None) -> None:
        super().__init__(event, func, answer)
        self.event, self.func, self.answer = event, func, answer


@dataclass(eq=False, slots=True)
class ScriptLine:
    """The instruction of one event.

    Args:
        event: as it was observed. Its trees are of placeholders that hold no graph; if it runs they are the forms
            (`form_of`) for other stages.
        runs: whether to run it; otherwise its trees are returned in its place.
        last: whether the stage's forward ends with it.
        substituted: tensors of these trees that this stage has.
        recorded: tensors of the result that are needed later.
    """

    event: Event
    runs: bool
    last: bool
    substituted: list[_Place] = field(default_factory=list)
    recorded: list[_Place] = field(default_factory=list)


class Script:
    """The script of one stage.

    Args:
        observation: the observed forward. Its tensors are not kept: they hold a graph, and that copies of fields. They
            live until the script is made, so their ids are all different.
    """

    def __init__(
        self, observation: Observation, skeleton: Skeleton, stage: int, cut: Sequence[range], owners: Owners
    ) -> None:
        self._skeleton, self.stage = skeleton, stage
        assignment = Assignment(observation, cut, owners)
        role = assignment.role(stage)
        self.is_last = stage == len(cut) - 1
        self.fields_written = observation.fields_written
        self.transforms = observation.transforms
        self._to_the_end = observation.to_the_end
        self._changed = observation.changed
        self._choices = assignment.choices
        #: whether it was made for new sizes, and no forward has followed it yet
        self.is_new = False
        #: whether the attributes after a first forward that ended with the stage's last event were compared
        self.is_settled = self.is_last or self._to_the_end
        #: names of the weights and buffers that are written here, even with equal values
        own = [event for event, at in zip(observation.events, assignment.stage_of, strict=True) if at in (stage, None)]
        written = {storage for event in own for storage in event.writes & observation.stored.keys()}
        self.writes = {observation.stored[storage] for storage in written} | observation.exchanged
        #: arriving tensors: (shape, maker)
        self.receives = [(value.tensor.shape, observation.events[value.made].where) for value, _ in role.receives]
        #: (id of the observed tensor, place in the payload, whether to copy it)
        self.used = [(id(value.tensor), place, value in role.copied) for value, place in role.used.items()]
        arrives = {version: place for place, version in enumerate(role.receives)}
        #: (place in the payload or None, id of the observed tensor)
        self.sends = [(arrives.get(version), id(version[0].tensor)) for version in role.sends]
        self.fields = [(path, id(tensor)) for path, tensor in leaves(observation.fields)]
        self._stand_ins: dict[int, Tensor] = {}
        self._prepare(observation, assignment, role)

    def _prepare(self, observation: Observation, assignment: Assignment, role: Role) -> None:
        given = {id(value.tensor) for value in role.used}
        wanted = {key for place, key in self.sends if place is None}
        events = zip(observation.events, assignment.stage_of, strict=True)
        runs = [at is None or event.index in role.own for event, at in events]
        for event in observation.events:
            if not runs[event.index]:
                wanted |= set(map(id, tensors(event.trees)))
        real = {key for _, key in self.fields} | given
        real |= {id(value.tensor) for value in observation.values if runs[value.made]}
        self.lines: list[ScriptLine] = []
        for event in observation.events[:-1]:
            is_run, is_own = runs[event.index], event.is_block or event.index in role.own
            trees = list(map(form_of, event.trees)) if is_run else mapped(event.trees, self._plain)
            bare = replace(event, trees=trees, made=[], reads=set(), asked=set())
            found = [(path, id(tensor)) for path, tensor in leaves(event.trees)]
            here = real if not is_run else set() if is_own else given
            recorded = ({id(value.tensor) for value in event.made} & wanted) - given if is_run else set()
            substituted, kept = ([place for place in found if place[1] in some] for some in (here, recorded))
            is_end = event.index == role.last and not self.is_last and not self._to_the_end
            self.lines.append(ScriptLine(bare, is_run, is_end, substituted, kept))

    def _plain(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._stand_ins:
            is_fake = isinstance(tensor, Placeholder)
            fake = tensor.detach() if is_fake else self._skeleton.placeholders.like(tensor)
            self._stand_ins[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        return self._stand_ins[id(tensor)]

    def outline(self) -> list[Any]:
        """Return all but the parts with numbers, to be compared."""
        numbers: dict[int, int] = {}

        def places(found: Sequence[_Place]) -> list[tuple[Path, int]]:
            return [(path, numbers.setdefault(key, len(numbers))) for path, key in found]

        own, receives = [self.transforms, self.writes, self.fields_written], [where for _, where in self.receives]
        found = [*own, self._to_the_end, self._changed, receives, places(self.fields)]
        found.append([(numbers.setdefault(key, len(numbers)), *how) for key, *how in self.used])
        found.append([(place, numbers.setdefault(key, len(numbers))) for place, key in self.sends])
        found.append(list(map(fewest_bytes, self._choices)))
        for line in self.lines:
            event = replace(line.event, answer=None, trees=[], writes=set())
            found.append(([getattr(event, each.name) for each in fields(event)], line.runs, line.last))
            found.append((places(line.substituted), places(line.recorded)))
        return found

    def with_numbers(self) -> list[Any]:
        """Return a tree of the parts with numbers."""
        lines = [[line.event.answer, line.event.trees] for line in self.lines]
        return [[shape for shape, _ in self.receives], self._choices, lines]

    def resized(self, changed: Mapping[Path, Any]) -> Script | None:
        """Return the same script with other numbers; None: the model would be cut at other places.

        Args:
            changed: by path in the tree `with_numbers`.
        """
        made = copy(self)
        shapes, made._choices, lines = replaced(self.with_numbers(), changed)
        if list(map(fewest_bytes, made._choices)) != list(map(fewest_bytes, self._choices)):
            return None
        made.receives = [(shape, where) for shape, (_, where) in zip(shapes, self.receives, strict=True)]
        made.lines = list(self.lines)
        for number, (line, (answer, trees)) in enumerate(zip(self.lines, lines, strict=True)):
            if answer is not line.event.answer or trees is not line.event.trees:
                made.lines[number] = line = copy(line)
                line.event = copy(line.event)
                line.event.answer, line.event.trees = answer, trees
        made.is_new = True
        return made

    def placeholder(self, like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Return a placeholder of another size for one of this script."""
        made = self._skeleton.placeholders.like(like, shape=shape, strides=strides)
        return made.requires_grad_(like.requires_grad)

    def settle(self, before: ModuleState) -> bool:
        """Return whether the script's first forward has left the same attributes as a whole forward.

        If not, forwards run to the model's end from now on: a model may restore behind later blocks a mode that it sets
        for earlier ones (`block.eval()`), or update a counter behind the last block.

        Args:
            before: the state before that forward.
        """
        self.is_settled = True
        blocks = [line.event.called for line in self.lines if line.event.is_block and line.runs]
        own = {module for block in blocks for module in block.modules()}
        changed = before.changed_attributes()
        if changed <= self._changed and {place for place in self._changed if place[0] in own} <= changed:
            return True
        self._to_the_end = True
        for line in self.lines:
            line.last = False
        return False

    def refusal(self, payload: Sequence[Tensor]) -> str:
        """Return the reason why a payload is of another path than this script's; "" if it is not."""
        if len(payload) != len(self.receives):
            sent = f"stage {self.stage - 1} handed on {len(payload)} tensors of {len(self.receives)}"
            return f"model: {sent}, as its forward goes another way on the same inputs, on which alone it must depend"
        for (shape, where), tensor in zip(self.receives, payload, strict=True):
            if tensor.shape != shape:
                shapes = f"{tuple(tensor.shape)}, and {tuple(shape)} when it was observed"
                return f"model: {where} gave a tensor of shape {shapes}, so it depends on numbers; cut elsewhere"
        return ""

    def allows(self, diverged: Diverged) -> bool:
        """Return whether this script agrees with the path of a script that was left."""
        if diverged.event >= len(self.lines):
            return False
        event = self.lines[diverged.event].event
        if event.called != diverged.func:
            return False
        return diverged.answer is None or agrees(event.answer, diverged.answer)


def agrees(expected: Any, found: Any) -> bool:
    """Return whether an answer, or the shape of a result, is as it was observed."""
    if isinstance(found, Tensor):
        found = found.shape
    return bool(type(expected) is type(found) and expected == found)
