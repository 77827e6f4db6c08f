"""Any model as it is, cut where its own forward calls its blocks.

observed = observe(model, (), {"input_ids": ids, "labels": ids})
cut = [range(0, 6), range(6, 12)]
stages = [observed.build(i, cut) for i in range(2)]
payload = stages[0].forward((), (), batch)
loss = stages[1].forward([t.detach().requires_grad_(t.requires_grad) for t in payload], (), batch).loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..dependency import ConfigError
from ..dependency.garbage import uncollected
from .absent import Absent
from .assignment import Assignment, Owners
from .attached import attach, is_moved, moved_to, refuse_hooks
from .blocks import find_blocks, named_blocks, num_bytes
from .deferred import Deferred
from .observation import Observation
from .observing import observe_forward
from .skeleton import Skeleton
from .stage import ObservedStage
from .trees import Path, mapped, tensors
from .used import unused_fields


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block, the unit of cutting.

    Args:
        name: what to call it in a sentence.
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


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one stage of a cut would be."""

    blocks: list[BlockCall]
    #: by the unsplit model's names
    parameters: list[str]
    hands_on: list[Crossing]


@uncollected()
def observe(
    model: nn.Module | Deferred | Callable[[], nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    at_least: int = 1,
    seed: int = 0,
) -> Observed:
    """Find the blocks of a model and what passes between them, by one forward on shapes.

    Args:
        model: any module, which is left as it is; or a function that makes one, whose parameters are then computed
            only where they are needed.
        args, kwargs: one microbatch, as the model's forward takes it. Later ones may have other shapes.
        blocks: names of lists of blocks, or of blocks, where they are not the outermost lists.
        at_least: how many calls of blocks are wanted; with fewer, the parts of blocks are looked at.
        seed: of the initial weights of a model made by a function.

    Raises:
        ConfigError: the model cannot be cut; the text names the tensor or the module.
    """
    source = model if isinstance(model, (nn.Module, Deferred)) else Deferred(model, seed)
    skeleton = Skeleton(source if isinstance(source, nn.Module) else source.model, torch.device("cpu"))
    notes = _without_caches(skeleton.module)
    args, kwargs = tuple(args), dict(kwargs or {})
    if not all(tensor.is_cpu for tensor in tensors((args, kwargs))):  # where the placeholders of weights are not
        args, kwargs = mapped((args, kwargs), torch.Tensor.cpu)
    if blocks is not None:
        skeleton.choose(named_blocks(skeleton.module, [blocks] if isinstance(blocks, str) else blocks))
        observation = observe_forward(skeleton, args, kwargs)
    else:
        observation = find_blocks(skeleton, args, kwargs, at_least)
    if not observation.calls:
        raise ConfigError(
            f"model {type(skeleton.module).__name__}: calls none of its blocks; name their list with blocks="
        )
    return Observed(source, skeleton, observation, notes)


class Observed:
    """A model, its blocks and what passes between them."""

    def __init__(
        self, source: nn.Module | Deferred, skeleton: Skeleton, observation: Observation, notes: list[str]
    ) -> None:
        self._source = source
        self._skeleton = skeleton
        self._observation = observation
        self._assignment: tuple[list[range], Assignment] | None = None
        self._block_paths = [skeleton.path_of(block) for block in skeleton.blocks]
        #: what was changed in the copies of the model, in words for the user
        self.notes = notes
        #: what the model returned, of tensors without numbers
        self.output = observation.end.outputs[0].tree
        self.blocks = [_block(skeleton, event.module) for event in observation.calls if event.module is not None]

    @property
    def _model(self) -> nn.Module:
        return self._source if isinstance(self._source, nn.Module) else self._source.model

    @property
    def num_blocks(self) -> int:
        """How many calls of blocks there are to cut between."""
        return len(self.blocks)

    def check(self, cut: Sequence[range]) -> None:
        """Check that the model can be cut so.

        Raises:
            ConfigError: something would have to cross the cut that cannot, or a hook would see a part of a gradient.
        """
        assignment = self._assigned(cut)
        for stage in range(len(cut)):
            assignment.role(stage)
        parameters = dict(self._model.named_parameters())
        for name, stages in self.shared(cut).items():
            refuse_hooks(parameters[name], name, stages)

    def stages(self, cut: Sequence[range]) -> list[StageSpec]:
        """Return what the stages of a cut would be."""
        assignment = self._assigned(cut)
        owners = self._owners(assignment, len(cut))
        crossing = [*assignment.crossing, []]
        return [
            StageSpec(
                self.blocks[calls.start : calls.stop],
                [name for name in self._skeleton.parameters if stage in owners[name]],
                [
                    Crossing(
                        self._observation.events[value.made].where, tuple(value.tensor.shape), value.tensor.dtype,
                        value.tensor.nbytes,
                    )
                    for value, _ in crossing[stage]
                ],
            )
            for stage, calls in enumerate(cut)
        ]  # fmt: skip

    def shared(self, cut: Sequence[range]) -> dict[str, list[int]]:
        """Return the parameters that several stages hold, whose gradients are to be summed, with those stages."""
        owners = self._owners(self._assigned(cut), len(cut))
        return {name: sorted(owners[name]) for name in self._skeleton.parameters if len(owners[name]) > 1}

    def unused(self, cut: Sequence[range]) -> list[frozenset[Path]]:
        """Return, by stage, the places in (args, kwargs) of fields that it was not seen to use."""
        assignment = self._assigned(cut)
        return [unused_fields(self._observation, assignment, stage) for stage in range(len(cut))]

    def build(
        self,
        stage: int,
        cut: Sequence[range],
        device: str | torch.device = "cpu",
        *,
        initialise: bool = True,
        copied: bool = False,
    ) -> ObservedStage:
        """Return a stage with its own parameters.

        Of a model given as a module they are the module's own, so that training the stage trains the module; of a
        parameter that several stages hold, the later ones hold copies. Buffers are copies, and so is what hooks
        that are methods of modules belong to.

        Args:
            initialise: False leaves the parameters of a model made by a function as they come, to be loaded.
            copied: hold copies of all parameters, as a second replica of the stage must.

        Raises:
            ConfigError: the model's parameters have no numbers.
        """
        device = torch.device(device)
        owners = self._owners(self._assigned(cut), len(cut))
        with uncollected():
            skeleton = Skeleton(self._model, device)
        _without_caches(skeleton.module)
        skeleton.choose([skeleton.module.get_submodule(path) for path in self._block_paths])
        skeleton.marked = self._skeleton.marked
        own = {}
        change = moved_to(dict(zip(self._model.modules(), skeleton.module.modules(), strict=True)))
        for name, parameter in self._model.named_parameters():
            if stage in owners[name]:
                copy = copied or stage > min(owners[name])
                made = self._real(name, parameter, device, copied=copy, initialise=initialise)
                if is_moved(parameter, change):  # hooks that would write modules that are not trained
                    made = nn.Parameter(made.data, parameter.requires_grad)
                    attach(made, parameter, change)
                own[name] = made
        skeleton.put(own)
        # Where a buffer was seen to be used other forwards use it too: one may write it, as in training.
        places = {name: {s for s in stages if s is not None} for name, stages in self._assigned(cut).users.items()}
        owners = {name: stages for name, stages in places.items() if len(stages) == 1} | owners
        calls = self._observation.calls[cut[stage].start : cut[stage].stop]
        running = {self._skeleton.path_of(call.module) for call in calls if call.module is not None}
        foreign = [block for block, path in zip(skeleton.blocks, self._block_paths, strict=True) if path not in running]
        return ObservedStage(skeleton, stage, cut, owners, foreign)

    def _assigned(self, cut: Sequence[range]) -> Assignment:
        """Return what a cut means; that of the last one asked about is kept."""
        if self._assignment is None or self._assignment[0] != list(cut):
            self._assignment = list(cut), Assignment(self._observation, cut)
        return self._assignment[1]

    def own_buffers(self, stage: int, cut: Sequence[range]) -> set[str]:
        """Return the buffers of modules that `stage` alone writes; the last, which runs to the end, has all others."""
        owners = self._assigned(cut).buffers
        names = [name for name, _ in self._skeleton.module.named_buffers(remove_duplicate=False)]
        # A module may write some in its forward, and make others of them later.
        of_module = {name.rpartition(".")[0]: owner for name, owner in owners.items()}
        last = len(cut) - 1
        return {name for name in names if owners.get(name, of_module.get(name.rpartition(".")[0], last)) == stage}

    def _real(
        self, name: str, parameter: nn.Parameter, device: torch.device, *, copied: bool, initialise: bool
    ) -> nn.Parameter:
        if not initialise:
            like = torch.empty_like(parameter.detach(), device="meta")
            return nn.Parameter(torch.empty_like(like, device=device), parameter.requires_grad)
        if parameter.device.type == "meta":
            raise ConfigError(
                f"model: {name} is on the meta device, so its numbers exist nowhere; pass a function that makes the "
                f"model as usual: large parameters are then computed only where they are needed"
            )
        tensor = parameter.detach()
        if isinstance(self._source, Deferred):
            tensor, copied = self._source.filled(tensor), copied or not isinstance(parameter, Absent)
        elif device == parameter.device and not copied:
            return parameter
        moved = tensor.to(device)
        made = nn.Parameter(moved.clone() if copied and moved is tensor else moved, parameter.requires_grad)
        attach(made, parameter)
        return made

    def _owners(self, assignment: Assignment, num_stages: int) -> Owners:
        """Return the stages that hold each parameter; those that no forward uses are with the last."""
        return {name: assignment.owners.get(name, {num_stages - 1}) for name in self._skeleton.parameters}


def _block(skeleton: Skeleton, module: nn.Module) -> BlockCall:
    count = sum(p.numel() for p in module.parameters())
    return BlockCall(skeleton.name_of(module), skeleton.path_of(module), count, num_bytes(module))


def _without_caches(module: nn.Module) -> list[str]:
    """Switch off what a configuration calls `use_cache`: what it collects is of no use in training."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    found = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    return ["use_cache of the model's configuration is set to False"] if found else []
