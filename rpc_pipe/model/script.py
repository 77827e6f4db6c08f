"""What one stage answers to every event of the forward: prepared once, followed by every microbatch of these shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dependency import ConfigError
from ..workers.compute.attributes import Attributes
from .absent import Absent
from .assignment import Assignment, Owners, Role
from .hollow import Hollow, NeedsField
from .observation import Event, Observation, Output, is_hollow
from .promise import Promise, form_of
from .skeleton import Skeleton
from .trees import Path, leaves, replaced
from .users import Users

#: number of an output, path in it, tensor as it was observed (by its id)
_Place = tuple[int, Path, int]


class Departed(BaseException):
    """The forward left the script; not an Exception, so that no model swallows it.

    Args:
        event: where.
        func: what the model called there instead, or the block.
        answer: or what it was told there instead.
    """

    def __init__(self, event: int, func: Any, answer: Any = None) -> None:
        super().__init__(event, func, answer)
        self.event, self.func, self.answer = event, func, answer


@dataclass(eq=False, slots=True)
class Cue:
    """What to do at one event.

    Args:
        func: the torch function, or the block, that must be called here.
        runs: whether to run it; otherwise `outputs` says what to return in its place.
        swapped: what of that has a real counterpart on this stage.
        noted: what of the result others need later.
        promise: what of it others have been told already; None: there are none. For what a block leaves in attributes
            the form of it stands in `outputs` in place of a tree.
        said: what it must be called with beside tensors, where nothing computes what it returns; None: anything.
        number: of the random operation at its position; 0 if it draws nothing.
    """

    func: Any
    position: int
    is_block: bool
    runs: bool
    last: bool
    number: int
    answer: Any
    outputs: list[Output] = field(default_factory=list)
    swapped: list[_Place] = field(default_factory=list)
    noted: list[_Place] = field(default_factory=list)
    promise: Promise | None = None
    said: Any = None


class Script:
    """The cues of one stage.

    Args:
        observation: the forward that was observed; not kept.
        users: hears which stages use what.

    Raises:
        NeedsField: the stage takes something that is made of a field that is not read here.
    """

    def __init__(
        self,
        observation: Observation,
        skeleton: Skeleton,
        stage: int,
        cut: Sequence[range],
        owners: Owners,
        users: Users,
    ) -> None:
        self._skeleton, self.stage = skeleton, stage
        assignment = Assignment(observation, cut, owners)
        users.note(assignment)
        role = assignment.role(stage)
        self.is_last = stage == len(cut) - 1
        self.is_alone = len(cut) == 1
        self.draws_in_python = observation.draws_in_python
        self.fields_written = observation.fields_written
        self._to_the_end = observation.to_the_end
        self._changed = observation.changed
        #: whether it has been seen what a forward leaves that ends with the stage's last event
        self.is_settled = self.is_last or self._to_the_end
        #: names of the weights and buffers that are written here, if only by what was there
        self.writes = {
            observation.stored[storage]
            for event, at in zip(observation.events, assignment.stage_of, strict=True)
            if at in (stage, None)
            for storage in event.writes & observation.stored.keys()
        }
        #: questions whose answers others have been told
        self._told = role.told
        #: what arrives: observed tensor, shape, where it came from
        self.takes = [
            (id(value.tensor), value.tensor.shape, observation.events[value.made].where) for value, _ in role.takes
        ]
        #: where what is handed on, and what arrives, was made, in words
        self.handed = ", ".join([observation.events[value.made].where for value, _ in role.hands])
        self.taken = ", ".join([where for _, _, where in self.takes])
        #: whether the next stage has been told
        self.is_told = self.is_last
        #: (observed tensor, place in what arrives, whether to copy it)
        self.given = [(id(value.tensor), place, value in role.copied) for value, place in role.given.items()]
        arrives = {version: place for place, version in enumerate(role.takes)}
        #: place in what arrives, or the observed tensor
        self.hands = [(arrives.get(version), id(version[0].tensor)) for version in role.hands]
        self.fields = [(path, id(tensor)) for path, tensor in leaves(observation.fields)]
        self._stand_ins: dict[int, Tensor] = {}
        # The observed tensors must live as long as their ids are used.
        self._alive = [value.tensor for value in observation.values]
        self._hollow = _hollow(observation, role)
        self._prepare(observation, assignment, role)

    def _prepare(self, observation: Observation, assignment: Assignment, role: Role) -> None:
        given = {id(value.tensor) for value in role.given}
        wanted = {key for place, key in self.hands if place is None}
        events = zip(observation.events, assignment.stage_of, strict=True)
        runs = [not event.hollow if at is None else event.index in role.own for event, at in events]
        for event in observation.events:
            if not runs[event.index]:
                wanted |= {id(tensor) for output in event.outputs for _, tensor in leaves(output.tree)}
        real = {key for _, key in self.fields} | given
        real |= {id(value.tensor) for value in observation.values if runs[value.made]}
        self.cues = [
            self._cue(event, runs[event.index], role, given, wanted, real) for event in observation.events[:-1]
        ]

    def _cue(self, event: Event, runs: bool, role: Role, given: set[int], wanted: set[int], real: set[int]) -> Cue:
        cue = Cue(
            func=event.module if event.is_block else event.func,
            position=event.position,
            is_block=event.is_block,
            runs=runs,
            last=event.index == role.last and not self.is_last and not self._to_the_end,
            number=event.random if not event.is_block else 0,
            answer=event.answer,
            promise=None if self.is_last else event.promise,
            said=event.said,
        )
        for number, output in enumerate(event.outputs):
            found = [(number, path, id(tensor)) for path, tensor in leaves(output.tree)]
            if not runs:
                cue.outputs.append(self._stand_in(output))
                cue.swapped += [place for place in found if place[2] in real]
            else:
                if not event.is_block and event.index not in role.own:
                    cue.swapped += [place for place in found if place[2] in given]
                made = {id(value.tensor) for value in event.made}
                cue.noted += [place for place in found if place[2] in (made & wanted) - given]
                form = form_of(output.tree) if output.name and not self.is_last else None
                cue.outputs.append(Output(form, output.module, None, output.name, output.inside))
        return cue

    def _stand_in(self, output: Output) -> Output:
        """Return an output in which nothing has numbers or a history."""

        def plain(tree: Any) -> Any:
            return replaced(tree, {path: self._plain(tensor) for path, tensor in leaves(tree)})

        return Output(plain(output.tree), output.module, plain(output.arguments), output.name, output.inside)

    def _plain(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._stand_ins:
            self._alive.append(tensor)
            if id(tensor) in self._hollow:
                fake: Tensor = self._skeleton.shapes.like(tensor, kind=Hollow)
            else:
                fake = tensor.detach() if isinstance(tensor, Absent) else self._skeleton.shapes.like(tensor)
            self._stand_ins[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        return self._stand_ins[id(tensor)]

    def settle(self, before: Attributes) -> bool:
        """Tell whether the script's first forward, after `before`, has left the attributes that a whole one leaves.

        If not, forwards run to the model's end from now on: what a model sets for some blocks (`block.eval()`) it may
        put back behind others only, and what it counts for them it may write behind the last.
        """
        self.is_settled = True
        own = {module for cue in self.cues if cue.is_block and cue.runs for module in cue.func.modules()}
        changed = before.changed_places()
        if changed <= self._changed and {place for place in self._changed if place[0] in own} <= changed:
            return True
        self._to_the_end = True
        for cue in self.cues:
            cue.last = False
        return False

    def suits(self, payload: Sequence[Tensor]) -> bool:
        """Whether what arrives is what it takes; on other ways through the forward other tensors may cross."""
        return [shape for _, shape, _ in self.takes] == [tensor.shape for tensor in payload]

    def check(self, payload: Sequence[Tensor]) -> None:
        """Raise ConfigError if the stage before has gone another way."""
        if len(payload) != len(self.takes):
            raise ConfigError(
                f"model: stage {self.stage - 1} handed on {len(payload)} tensors where stage {self.stage} takes "
                f"{len(self.takes)}: the forward goes another way there on the same inputs; it must depend on its "
                f"inputs alone"
            )

    def check_handed(self, handed: str) -> None:
        """Raise ConfigError if what the stage before says it hands on is not what this one takes."""
        if handed != self.taken:
            raise ConfigError(
                f"model: stage {self.stage - 1} hands on what was made at {handed}, and stage {self.stage} takes it "
                f"for what was made at {self.taken}: the forward goes another way there; it must depend on its inputs "
                f"alone"
            )

    def refuse_untold(self, event: int, answer: Any) -> None:
        """Raise ConfigError if other stages go by another answer, which they were told when it was observed."""
        if event in self._told:
            found, observed = (
                tuple(each) if isinstance(each, torch.Size) else each for each in (answer, self.cues[event].answer)
            )
            raise ConfigError(
                f"model: something behind stage {self.stage} asks for the form of a tensor that a block made there and "
                f"that does not travel: {found}, and {observed} when it was observed, which other stages go by; let "
                f"the block return a tensor that says it, or cut elsewhere"
            )

    def admits(self, departed: Departed) -> bool:
        """Whether this script goes the way on which another was left."""
        if departed.event >= len(self.cues):
            return False
        cue = self.cues[departed.event]
        return bool(cue.func == departed.func) and (departed.answer is None or agrees(cue.answer, departed.answer))


def agrees(expected: Any, found: Any) -> bool:
    """Whether what a question was answered, or the shape of a result, is as it was observed."""
    if isinstance(found, Tensor):
        found = found.shape
    return bool(type(expected) is type(found) and expected == found)


def _hollow(observation: Observation, role: Role) -> set[int]:
    """Return the tensors (their ids) that have no numbers here because fields are not read.

    Raises:
        NeedsField: the stage takes one of them.
    """
    events = observation.events
    for event in events:
        taken = (event.hollow and event.checkpoint) or event.index in role.own
        if taken and any(is_hollow(value, events) for value, _ in event.reads):
            raise NeedsField(f"{event.where} takes a field")
    return {id(value.tensor) for value in observation.values if is_hollow(value, events)} | {
        id(tensor) for _, tensor in leaves(observation.fields) if isinstance(tensor, Absent)
    }
