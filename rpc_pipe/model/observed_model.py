"""An arbitrary model, cut where its forward calls its blocks.

observed = observe(model, (), {"input_ids": ids, "labels": ids})
cut = [range(0, 6), range(6, 12)]
stages = [observed.build(i, cut) for i in range(2)]
payload = stages[0].run((), (), batch)
loss = stages[1].run([t.detach().requires_grad_(t.requires_grad) for t in payload], (), batch).loss
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..dependency import ModelError
from ..system.garbage import uncollected
from ..workers.compute.sequences.slices import Divide
from .assign.assignment import Assignment, Owners
from .common_objects import separate
from .deferred import DeferredModel
from .observe.blocks import find_blocks, named_blocks, num_bytes, stateful_beside
from .observe.observation import Observation
from .observe.observe_forward import observe_forward
from .observe.placeholder import Placeholder
from .observe.skeleton import MARK, Skeleton
from .observe.trees import mapped, tensors
from .parameter_hooks import copy_attachments, needs_rebinding, rebinding, refuse_hooks
from .replay.observed_stage import ObservedStage
from .ties import refuse_parted


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block, the unit of cutting.

    Args:
        name: its name in messages.
        path: its name in the model, empty if it is the model itself.
    """

    name: str
    path: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that crosses a cut."""

    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@uncollected()
def observe(
    model: nn.Module | DeferredModel | Callable[[], nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    at_least: int = 1,
    seed: int = 0,
    watched: dict[str, Any] | None = None,
) -> ObservedModel:
    """Find the blocks of a model and the tensors that pass between them, by observing a forward on shapes.

    Args:
        model: any module, which is not changed; or a function that makes one, with parameters that are computed only
            where they are held.
        args, kwargs: one microbatch, as the model's forward takes it. Later ones may have other shapes.
        blocks: names of blocks, or of lists of blocks; by default they are found.
        at_least: number of calls of blocks wanted; with fewer, parts of blocks become blocks if possible.
        seed: seed of the initial weights of a model made by a function.
        watched: containers by name, for `left_before_last`.

    Raises:
        ModelError: the model cannot be cut; the text names the tensor or the module.
    """
    source = model if isinstance(model, (nn.Module, DeferredModel)) else DeferredModel(model, seed)
    skeleton = Skeleton(source if isinstance(source, nn.Module) else source.model, torch.device("cpu"))
    skeleton.watched, notes = watched or {}, without_caches(skeleton.module)
    args, kwargs = tuple(args), dict(kwargs or {})
    if not all(tensor.is_cpu for tensor in tensors((args, kwargs))):  # placeholders of weights are on the CPU
        args, kwargs = mapped((args, kwargs), torch.Tensor.cpu)
    if blocks is not None:
        skeleton.blocks = named_blocks(skeleton.module, [blocks] if isinstance(blocks, str) else blocks)
        observation = observe_forward(skeleton, args, kwargs)
    else:
        observation = find_blocks(skeleton, args, kwargs, at_least)
    if beside := stateful_beside(skeleton.module, skeleton.blocks):
        skeleton.blocks += beside
        observation = observe_forward(skeleton, args, kwargs)
    if not observation.calls:
        raise ModelError(f"model {type(skeleton.module).__name__}: calls none of its blocks; name others by blocks=")
    return ObservedModel(source, skeleton, observation, notes)


class ObservedModel:
    """A model with its blocks and the tensors that pass between them."""

    def __init__(
        self, source: nn.Module | DeferredModel, skeleton: Skeleton, observation: Observation, notes: list[str]
    ) -> None:
        self._source = source
        self._skeleton = skeleton
        self._observation = observation
        self._assignment: tuple[list[range], Assignment] | None = None
        self._block_paths = [skeleton.path_of(block) for block in skeleton.blocks]
        inside = {part for block in skeleton.blocks for part in block.modules()}
        for module in skeleton.module.modules():
            if type(module).__name__ == "OptimizedModule" and module not in inside:
                why = f"{skeleton.name_of(module)} is torch.compile around blocks, where several stages run"
                raise ModelError(f"model: {why}; pass it as it is, and compile blocks, as compile=True does")
        #: names of the modules that a forward registers hooks on
        self.hooked = {skeleton.path_of(module) for module in observation.hooked}
        #: changes in the copies of the model, as sentences for the user
        self.notes = notes
        #: the model's output, of placeholders
        self.output = observation.end.trees[0]
        self.blocks = [_block(skeleton, event.module) for event in observation.calls if event.module is not None]
        #: the number of calls of blocks
        self.num_blocks = len(self.blocks)

    @property
    def _model(self) -> nn.Module:
        return self._source if isinstance(self._source, nn.Module) else self._source.model

    def check(self, cut: Sequence[range]) -> None:
        """Check a cut.

        Raises:
            ModelError: something that cannot cross the cut would have to, or a hook would see a part of a gradient.
        """
        assignment = self._assigned(cut)
        for stage in range(len(cut)):
            assignment.role(stage)
        parameters = dict(self._model.named_parameters())
        kept = self.holders(cut) if isinstance(self._source, nn.Module) else {}
        refuse_parted({**parameters, **dict(self._model.named_buffers())}, kept, assignment.written)
        for name, stages in self.shared(cut).items():
            refuse_hooks(parameters[name], name, stages)

    def left_before_last(self, cut: Sequence[range], boxes: Mapping[str, Any], read: Collection[int]) -> list[str]:
        """Return the names of the watched containers and attributes that stages before the last fill.

        Args:
            boxes: the containers by name, as the observation has left them.
            read: ids of the modules with attributes that count.
        """
        calls, stages = self._observation.calls[: cut[-1].start], self._assigned(cut).stage_of
        made = {id(each.tensor) for each in self._observation.values if stages[each.made] not in (None, len(cut) - 1)}
        found = [name for event in calls for name in event.fills]
        found += [name for name, box in boxes.items() if any(id(tensor) in made for tensor in tensors(box))]
        left = [(effect.module, effect.name) for event in calls for effect in event.effects if effect.name]
        paths = [(self._skeleton.path_of(module), name) for module, name in left if module is not None]
        return found + [f"{path}.{name}" for path, name in paths if id(self._model.get_submodule(path)) in read]

    def crossing(self, cut: Sequence[range]) -> list[list[Crossing]]:
        """Return the payload of each cut."""
        events = self._observation.events
        return [
            [Crossing(events[v.made].where, tuple(v.tensor.shape), v.tensor.dtype, v.tensor.nbytes) for v, _ in sent]
            for sent in self._assigned(cut).crossing
        ]

    def holders(self, cut: Sequence[range]) -> dict[str, list[int]]:
        """Return the stages that hold each parameter, by the unsplit model's names."""
        # the last stage holds the parameters that no forward uses
        owners, unused = self._assigned(cut).owners, {len(cut) - 1}
        return {name: sorted(owners.get(name, unused)) for name in self._skeleton.parameters}

    def shared(self, cut: Sequence[range]) -> dict[str, list[int]]:
        """Return the parameters that several stages hold, with these stages. Their gradients must be summed."""
        return {name: stages for name, stages in self.holders(cut).items() if len(stages) > 1}

    def uses(self, cut: Sequence[range]) -> dict[tuple[int, int], int]:
        """Return the stage of each function around the blocks that takes parameters.

        By place: (calls of blocks before, number of the function since the last of them, from 1).
        """
        found, before = {}, 0
        for event, stage in zip(self._observation.events, self._assigned(cut).stage_of, strict=True):
            if event.is_block:
                before = event.index + 1
            elif stage is not None and event.params:
                found[event.position, event.index + 1 - before] = stage
        return found

    def build(self, stage: int, cut: Sequence[range], *where: Any, initialise: bool = True) -> ObservedStage:
        """Return a stage with its parameters; as `begin`."""
        return self.begin(stage, cut, *where, initialise=initialise)[1](None)

    def begin(
        self,
        stage: int,
        cut: Sequence[range],
        device: str | torch.device = "cpu",
        *,
        initialise: bool = True,
        copied: bool = False,
    ) -> tuple[nn.Module, Callable[[Divide | None], ObservedStage]]:
        """Return a stage's modules without parameters, and the function that makes these and returns the stage.

        If the model was given as a module, they are the module's, so training the stage trains the module; of a
        parameter that several stages hold, the later stages have copies. Buffers are copies. Hooks that are methods
        of modules are bound to the copies of these modules.

        Args:
            initialise: False leaves the memory of parameters uninitialised, to be loaded.
            copied: copy all parameters, for a second replica of the stage.

        The function takes the division of blocks among members. It may divide the blocks of the user, so all stages of
        a process are begun before one is made: copies are whole.

        Raises:
            ModelError: the model's parameters are on the meta device.
        """
        device = torch.device(device)
        owners = {name: set(stages) for name, stages in self.holders(cut).items()}
        theirs = [] if copied or not initialise else self._own_blocks(stage, cut, owners, device)
        with uncollected():
            skeleton = Skeleton(self._model, device, theirs, follows=True)
        without_caches(skeleton.module, theirs)
        skeleton.blocks = [skeleton.module.get_submodule(path) for path in self._block_paths]
        skeleton.marked = self._skeleton.marked
        refuse_parted(dict(self._model.named_parameters()) if copied else {}, {})
        change = rebinding(dict(zip(self._model.modules(), skeleton.module.modules(), strict=True)))
        held = {name: parameter for name, parameter in self._model.named_parameters() if stage in owners[name]}

        def make(names: Iterable[str]) -> None:
            own: dict[str, nn.Parameter] = {}
            for name in names:
                copy = copied or stage > min(owners[name])
                own[name] = made = self._real(name, held[name], device, copied=copy, initialise=initialise)
                if needs_rebinding(held[name], change):  # its hooks would change modules that are not trained
                    own[name] = nn.Parameter(made.data, made.requires_grad)
                    copy_attachments(own[name], held[name], change)
            skeleton.put(own)

        # Other forwards use a buffer on the same stage: one may write it, as in training.
        places = {name: {s for s in stages if s is not None} for name, stages in self._assigned(cut).users.items()}
        owners = {name: stages for name, stages in places.items() if len(stages) == 1} | owners
        foreign = self._foreign(skeleton, cut[stage])

        def finish(divide: Divide | None) -> ObservedStage:
            if divide is not None:
                skeleton.divide([block for block in skeleton.blocks if block not in foreign], list(held), make, divide)
            else:
                make(held)
            return ObservedStage(skeleton, stage, cut, owners, foreign, self.own_buffers(stage, cut))

        return skeleton.module, finish

    def _foreign(self, skeleton: Skeleton, here: range) -> list[nn.Module]:
        """Return the blocks that only other stages run."""
        calls = self._observation.calls[here.start : here.stop]
        running = {self._skeleton.path_of(call.module) for call in calls if call.module is not None}
        return [block for block, path in zip(skeleton.blocks, self._block_paths, strict=True) if path not in running]

    def _own_blocks(self, stage: int, cut: Sequence[range], owners: Owners, device: torch.device) -> list[nn.Module]:
        """Return the user's blocks that a stage can run themselves, so that all that is done to them holds.

        A block is copied if other stages run it too, if it is to run on another device, or if forwards register hooks
        on it. It is also copied if it shares an object with the modules around it, which are copies in each stage.
        """
        if not isinstance(self._source, nn.Module):
            return []
        calls = [event.module for event in self._observation.calls]
        elsewhere = {module for i, module in enumerate(calls) if i not in cut[stage]}
        paths = {self._skeleton.path_of(m): None for m in calls if m is not None and m not in elsewhere}
        blocks = [self._source.get_submodule(path) for path in paths if path not in ("", MARK)]
        hooked = set(map(self._source.get_submodule, self.hooked))
        owned = {p for name, p in self._source.named_parameters() if owners[name] == {stage}}
        found = [block for block in separate(self._source, blocks) if owned.issuperset(block.parameters())]
        free = [block for block in found if hooked.isdisjoint(block.modules())]
        return [b for b in free if all(tensor.device == device for tensor in (*b.parameters(), *b.buffers()))]

    def _assigned(self, cut: Sequence[range]) -> Assignment:
        """Return the assignment of a cut; the last one is cached."""
        if self._assignment is None or self._assignment[0] != list(cut):
            self._assignment = list(cut), Assignment(self._observation, cut, blocks=self._block_paths)
        return self._assignment[1]

    def own_buffers(self, stage: int, cut: Sequence[range]) -> set[str]:
        """Return the names of the buffers with valid values on `stage`; the last has also the unused ones."""
        owners, first = self._assigned(cut).buffers, dict[int, str]()
        named = self._skeleton.module.named_buffers(remove_duplicate=False)
        # An event knows a buffer with several names by the first of them.
        names = {name: first.setdefault(id(buffer), name) for name, buffer in named}
        # A module may write some of its buffers in its forward and compute further ones from them later.
        of_module = {name.rpartition(".")[0]: owner for name, owner in owners.items()}
        last = len(cut) - 1
        return {n for n, of in names.items() if owners.get(of, of_module.get(of.rpartition(".")[0], last)) == stage}

    def _real(
        self, name: str, parameter: nn.Parameter, device: torch.device, *, copied: bool, initialise: bool
    ) -> nn.Parameter:
        if not initialise:
            like = torch.empty_like(parameter.detach(), device="meta")
            return nn.Parameter(torch.empty_like(like, device=device), parameter.requires_grad)
        if parameter.device.type == "meta":
            raise ModelError(f"model: {name} is on the meta device and has no numbers; pass a function that makes it")
        tensor = parameter.detach()
        if isinstance(self._source, DeferredModel):
            tensor, copied = self._source.filled(tensor), copied or not isinstance(parameter, Placeholder)
        elif device == parameter.device and not copied:
            return parameter
        moved = tensor.to(device)
        made = nn.Parameter(moved.clone() if copied and moved is tensor else moved, parameter.requires_grad)
        copy_attachments(made, parameter)
        return made


def _block(skeleton: Skeleton, module: nn.Module) -> BlockCall:
    count = sum(p.numel() for p in module.parameters())
    return BlockCall(skeleton.name_of(module), skeleton.path_of(module), count, num_bytes(module))


def without_caches(module: nn.Module, own: Sequence[nn.Module] = ()) -> list[str]:
    """Set `use_cache` of configurations to False: key-value caches are of no use in training.

    Args:
        own: modules of the user inside, with configurations that stay as they are.
    """
    theirs = {part for each in own for part in each.modules()}
    parts = [part for part in module.modules() if part not in theirs]
    configs = {id(config): config for part in parts if (config := getattr(part, "config", None)) is not None}
    found = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    return ["use_cache of the model's configuration is set to False"] if found else []
