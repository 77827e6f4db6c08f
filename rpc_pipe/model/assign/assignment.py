"""The assignment of an observed forward's events to stages, and the tensors that cross each cut.

An event that depends on parameters or blocks runs on exactly one stage; an event of fields alone runs on every
stage. The order of the program is the order of the stages: backward then meets every tensor's uses in the same order
as in the uncut model, and sums of gradients have the same bits. Only events of parameters and no block (such as
the embedding before a decoder) move to the first stage that takes them, with all that they depend on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...dependency import ConfigError, ModelError
from ..observe.observation import Depends, Event, Observation, Value, Version
from ..observe.placeholder import storage_of

_IN_PLACE = "leave out the change in place"
_FUNCTION = "call it inside a block"
#: parameter -> the stages that need it
Owners = dict[str, set[int]]


@dataclass(eq=False, slots=True)
class Role:
    """The part of one stage in an observed forward."""

    #: the tensors that it gets from the stage before, and sends to the next, in order
    receives: list[Version]
    sends: list[Version]
    #: events that run on this stage and not on all
    own: set[int]
    #: value -> place in `receives` of the values that this stage itself reads
    used: dict[Value, int] = field(default_factory=dict)
    #: inputs that it writes in place, so that it needs a copy
    copied: set[Value] = field(default_factory=set)
    #: the event after which the stage's forward may end
    last: int = -1


def fewest_bytes(choice: Sequence[Sequence[tuple[torch.Size, int]]]) -> int:
    """Return the first of the places where the fewest bytes cross."""
    sums = [sum(math.prod(shape) * size for shape, size in crossing) for crossing in choice]
    return sums.index(min(sums))


class BlocksNeeded(ConfigError):
    """A module between the blocks writes state that several stages use; with it as a block the model can be cut.

    Attributes:
        blocks: names of the blocks and of that module.
    """

    def __init__(self, text: str, blocks: Sequence[str]) -> None:
        super().__init__(text)
        self.blocks = blocks


class Assignment:
    """The stage of each event of an observed forward.

    Args:
        cut: the calls of blocks of each stage.
        owners: the stages that hold each parameter, if that has been decided already.
        blocks: names of the blocks, for an error.

    Raises:
        ModelError: something that cannot cross a cut would have to.
    """

    def __init__(
        self, observation: Observation, cut: Sequence[range], owners: Owners | None = None, blocks: Sequence[str] = ()
    ) -> None:
        self._observation, self._blocks = observation, blocks
        self._owners = owners
        self.num_stages = len(cut)
        self._stage_of_call = [stage for stage, calls in enumerate(cut) for _ in calls]
        if len(self._stage_of_call) != len(observation.calls):
            counts = f"called {len(observation.calls)} blocks, and {len(self._stage_of_call)} before"
            raise ModelError(f"model: the forward {counts}; call the same for every microbatch, also in evaluation")
        self._readers: dict[Value, list[tuple[Event, int]]] = {}
        for event in observation.events:
            for value, version in event.reads:
                self._readers.setdefault(value, []).append((event, version))
        #: parameters and buffers that are written by events that not every stage runs
        written = {at for event in observation.events if event.depends for at in event.writes}
        self.written = {name for at, name in observation.stored.items() if at in written}
        #: (first, last) user of each state that is written, which should be in one stage
        self._kept_together = self._state_spans()
        #: with `owners`: by event, the parameters and buffers that its stage uses for it
        self._used_at = [] if owners is None else self._find_uses()
        #: of each cut that was a choice: by place, (shape, bytes of an element) of the tensors that would cross there
        self.choices: list[list[list[tuple[torch.Size, int]]]] = []
        #: stage by event; None: every stage runs it
        self.stage_of: list[int | None] = self._place()
        #: parameter or buffer -> the stages that use it; None: all
        self.users = self._find_users()
        self.owners = self._find_owners()
        if self.num_stages > 1:
            self._refuse_state()
            self._refuse_decisions()
        #: buffer -> the last stage that uses it in an event that not every stage runs
        self.buffers = {name: stage for event, stage in self._placed() if stage is not None for name in event.buffers}

    def _placed(self) -> Iterator[tuple[Event, int | None]]:
        """Return the events with their stages."""
        return zip(self._observation.events, self.stage_of, strict=True)

    # --- placing

    def _place(self) -> list[int | None]:
        last = self.num_stages - 1
        next_stage_begins = [self._first_of_next_stage(k) for k in range(len(self._stage_of_call) - 1)]
        stage_of: list[int | None] = []
        for event in self._observation.events:
            after = event.position  # calls before it
            if event.depends is Depends.FIELDS:
                stage_of.append(None)
            elif event.is_block:
                stage_of.append(self._stage_of_call[after])
            elif after == 0 or after == len(self._stage_of_call):
                stage_of.append(0 if after == 0 < len(self._stage_of_call) else last)
            else:
                stage_of.append(self._stage_of_call[after - 1 if event.index < next_stage_begins[after - 1] else after])
        written = {storage for event in self._observation.events if event.depends for storage in event.writes}
        natural = list(stage_of)
        for event in reversed(self._observation.events):
            if event.depends is Depends.WEIGHTS and not any(
                storage_of(value.tensor) in written for value in (*event.made, *(read for read, _ in event.reads))
            ):
                stages_using = [
                    stage_of[reader.index]
                    for value in event.made
                    for reader, _ in self._readers.get(value, ())
                    if reader.made or reader.depends is not Depends.WEIGHTS  # `to` may return its input
                ]
                wanted = [stage for stage in stages_using if stage is not None]
                stage_of[event.index] = min(wanted) if wanted else stage_of[event.index]
        for event in self._observation.events:
            made_on = [stage_of[value.made] for value, _ in event.reads if value.depends is Depends.WEIGHTS]
            if event.depends is Depends.WEIGHTS and (found := [stage for stage in made_on if stage is not None]):
                # A value that stays with a block has its other users there too, or their gradients would come first.
                stage_of[event.index] = max(natural[event.index] or 0, *found)
        for event in self._observation.events:
            makers = [value.made for value, _ in event.reads if event.is_hook and value.made >= 0]
            if makers:  # the whole gradient of a tensor is on the stage that makes it
                stage_of[event.index] = stage_of[makers[0]]
        return stage_of

    def _first_of_next_stage(self, call: int) -> int:
        """Return the first event after `call` that the next stage runs, so that the fewest bytes cross."""
        calls, stages = self._observation.calls, self._stage_of_call
        first, end = calls[call].index + 1, calls[call + 1].index
        if stages[call] == stages[call + 1]:
            return end
        for event in self._observation.events[first:end]:
            if event.in_function and event.depends:  # its inputs may cross the cut, not its outputs
                end = min(end, event.index)
            # events that use a parameter or buffer stay on the side of the stage that holds it
            if self._owners is not None and event.depends is Depends.BLOCKS:
                settled = [self._owners[name] for name in self._used_at[event.index] if name in self._owners]
                if any(stages[call] in stages_of and stages[call + 1] not in stages_of for stages_of in settled):
                    first = event.index + 1
                elif any(stages[call] not in stages_of for stages_of in settled):
                    end = min(end, event.index)
        places = [i for i in range(max(first, end), first - 1, -1) if not self._is_inside_checkpoint(i)]
        if not places:
            between = f"{calls[call].where} and {calls[call + 1].where}"
            fix = "call it for each block, or cut elsewhere"
            raise ModelError(f"model: a cut between {between} would divide a torch.utils.checkpoint; {fix}")
        whole = [i for i in places if not any(begin < i <= end for begin, end in self._kept_together)]
        possible = whole or places
        choice = [self._crossing_at(place) for place in possible]
        self.choices.append(choice)
        return possible[fewest_bytes(choice)]

    def _find_uses(self) -> list[set[str]]:
        """Return the parameters and buffers that each event reads, also through values made of weights alone."""
        events = self._observation.events
        found = [event.params | event.buffers for event in events]
        placed: set[int] = set()
        for event in events:
            makers = [value.made for value, _ in event.reads if event.depends is Depends.BLOCKS]
            while makers:
                made = makers.pop()
                if made >= 0 and made not in placed and events[made].depends is Depends.WEIGHTS:
                    placed.add(made)
                    found[event.index] |= found[made]
                    makers += [value.made for value, _ in events[made].reads]
        return found

    def _state_spans(self) -> list[tuple[int, int]]:
        using = [event for event in self._observation.events if event.depends]  # the rest runs on every stage
        users = ([event.index for event in using if name in event.buffers | event.params] for name in self.written)
        spans = [(places[0], places[-1]) for places in users if places]
        carried = [[e.index for e in each.events if self._is_own(e)] for each in self._observation.carried]
        return spans + [(min(places), max(places)) for places in carried if places]

    def _is_own(self, event: Event) -> bool:
        """Return whether an event belongs to this forward and not to the second one."""
        events = self._observation.events
        return event.index < len(events) and events[event.index] is event

    def _is_inside_checkpoint(self, before: int) -> bool:
        """Return whether an event and the one before it are inside one call of `checkpoint`."""
        events = self._observation.events
        return 0 < events[before].checkpoint == events[before - 1].checkpoint

    def _crossing_at(self, before: int) -> list[tuple[torch.Size, int]]:
        """Return (shape, bytes of an element) of the tensors that would cross a cut before this event."""
        found = [(value, readers) for value, readers in self._readers.items() if value.depends is Depends.BLOCKS]
        crosses = (v for v, readers in found if v.made < before and any(event.index >= before for event, _ in readers))
        return [(value.tensor.shape, value.tensor.element_size()) for value in crosses]

    def _find_owners(self) -> Owners:
        trained = {name for event in self._observation.events for name in event.params}  # on one stage each
        owners = {name: {s for s in stages if s is not None} for name, stages in self.users.items() if name in trained}
        for name, stages in owners.items():
            missing = stages - self._owners.get(name, set()) if self._owners is not None else set()
            if missing:
                raise ModelError(f"model: stage {min(missing)} needs {name} here, not for the example; pass one so")
        return owners

    def _find_users(self) -> dict[str, set[int | None]]:
        users: dict[str, set[int | None]] = {}
        for event, stage in self._placed():
            for name in event.buffers | event.params:
                users.setdefault(name, set()).update([stage] if event.depends else self._stages_using(event))
        return users

    def _refuse_state(self) -> None:
        """Refuse state that one stage would write and another use in the next forward."""
        for each in self._observation.carried:
            stages = {stage for event in each.events for stage in self._possible_stages(event)}
            if len(stages) > 1:
                why = f"{each.what} is left by one forward and used by the next on stages {sorted(stages)}"
                raise ModelError(f"model: {why}, each with a copy of the model; keep it in one block")
        for event, stage in self._placed():
            for storage in event.writes if event.depends else ():
                name = self._observation.stored.get(storage, "")
                if len(self.users.get(name, ())) > 1:
                    why = f"{name} is written at {event.where}, on stage {stage}, and used by others, each with a copy"
                    fix = "write and use it in one block of one stage (split= or blocks=)"
                    raise BlocksNeeded(f"model: {why}; {fix}", self._with_block(name))

    def _with_block(self, name: str) -> list[str]:
        """Return the blocks with the module beside them that has this buffer; nothing if it contains blocks."""
        owners = [name[:end] for end, letter in enumerate(name) if letter == "."]
        apart = [each for each in owners if not any(f"{block}.".startswith(f"{each}.") for block in self._blocks)]
        parts = [block.rpartition(".") for block in self._blocks]
        lists = [parent if last.isdigit() else f"{parent}.{last}" for parent, _, last in parts]
        return [*dict.fromkeys(each.strip(".") for each in lists), apart[0]] if apart and lists else []

    def _refuse_decisions(self) -> None:
        """Refuse decisions of the model, which every stage makes, by data of a field that one stage has written."""
        events = self._observation.events
        for event in events:
            if any(value.depends or (version >= 0 and events[version].depends) for value, version in event.asked):
                why = f"{event.where} needs numbers that a block wrote in place, which other stages lack"
                raise ModelError(f"model: {why}; decide inside a block, or let the block write a copy")

    def _stages_using(self, event: Event) -> set[int | None]:
        """Return the stages that use the results of an event that all stages run; None: all."""
        if event.decides or event.writes:
            return {None}
        readers = {reader for value in event.made for reader, _ in self._readers.get(value, ())}
        found = ([self.stage_of[reader.index]] if reader.depends else self._stages_using(reader) for reader in readers)
        return {stage for stages in found for stage in stages}

    def _possible_stages(self, event: Event) -> set[int]:
        """Return the stages that may run an event, by its position if it is of another forward."""
        stage = self.stage_of[event.index] if self._is_own(event) else None
        if stage is not None:
            return {stage}
        places = [event.position] if event.is_block else [event.position - 1, event.position]
        return {self._stage_of_call[place] for place in places if 0 <= place < len(self._stage_of_call)}

    # --- values that cross a cut

    @cached_property
    def crossing(self) -> list[list[Version]]:
        """By stage except the last, the values that it sends to the next."""
        crossing: list[list[Version]] = [[] for _ in range(self.num_stages - 1)]
        found: dict[Version, tuple[int, int]] = {}
        for value, readers in self._readers.items():
            for reader, version in readers:
                made_on = self.stage_of[version] if version >= 0 else None
                taken_on = self.stage_of[reader.index]
                if made_on is None or taken_on is None or taken_on <= made_on:
                    if made_on is not None and taken_on is None:
                        raise self._refuse(value, "is taken by something that every stage does")
                    continue
                if value.made < 0:
                    raise self._refuse(value, "was there before and is written by a stage that others follow")
                if value.made >= 0 and self._observation.events[value.made].in_function:
                    raise self._refuse(value, "is made by an autograd.Function, whose backward runs here", _FUNCTION)
                _, furthest = found.get((value, version), (made_on, made_on))
                found[value, version] = made_on, max(furthest, taken_on)
        order = {value: i for i, value in enumerate(self._observation.values)}
        for each in sorted(found, key=lambda version: (version[1], order[version[0]])):
            for stage in range(*found[each]):
                crossing[stage].append(each)
        return crossing

    def role(self, stage: int) -> Role:
        """Return the part of `stage`."""
        crossing = self.crossing
        last = stage == self.num_stages - 1
        own = {i for i, at in enumerate(self.stage_of) if at == stage}
        role = Role(crossing[stage - 1] if stage else [], [] if last else crossing[stage], own)
        self._find_used(stage, role)
        made_here = [value.made for value, version in role.sends if (value, version) not in role.receives]
        # Behind a decision the forward may diverge, and then other tensors cross, even before the decision.
        decisions = [e.index for e in self._observation.events if e.decides and e.depends is Depends.FIELDS]
        role.last = max([*role.own, *made_here, *decisions], default=-1)
        return role

    def _find_used(self, stage: int, role: Role) -> None:
        writes = [event for event in self._observation.events if event.index in role.own and event.writes]
        for place, (value, version) in enumerate(role.receives):
            seen = {version for reader, version in self._readers[value] if self.stage_of[reader.index] in (stage, None)}
            if version not in seen:
                continue
            if value in role.used or min(seen) < version:
                raise self._refuse(value, f"is written between two of its uses on stage {stage}")
            role.used[value] = place
            storage = storage_of(value.tensor)
            if any(storage in event.writes for event in writes):
                if any(storage == storage_of(other.tensor) for other in role.used if other is not value):
                    raise self._refuse(value, f"is written on stage {stage} while another view of it is used there")
                role.copied.add(value)

    def _refuse(self, value: Value, why: str, rather: str = _IN_PLACE) -> ModelError:
        maker = self._observation.events[value.made].where if value.made >= 0 else "an input or a buffer of the model"
        what = f"the tensor of shape {tuple(value.tensor.shape)} from {maker} {why}"
        return ModelError(f"model: {what}, and cannot cross the cut; {rather}, or cut elsewhere")
