"""A model as it is, whole: how a batch goes into it and its loss function, and the slices that it is cut into."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from ..dependency import ConfigError
from ..workers.compute.by_hand import HOOKS
from ..workers.compute.randomness import Randomness, Seed
from ..workers.compute.shard import LossFn
from ..workers.compute.slices import Partly, Slice, Times, note
from ..workers.transport.payload import Tree
from .absent import Absent
from .cut import cut
from .deferred import Deferred
from .following import Following
from .hollow import NeedsField
from .observed import Observed, observe
from .skeleton import refuse_lazy
from .stage import ObservedStage
from .ties import groups
from .trees import Path

#: a model as it is, or what makes one
WholeLike = nn.Module | Callable[[], nn.Module]


class Whole:
    """Any module, or a function that makes one, and its cut; which blocks it calls is seen with the first batch.

    Args:
        split: number of calls of blocks of each stage; evenly by default.
        loss_fn: None: the model computes its loss itself.
        blocks: names of lists of blocks, or of blocks, where they are not the outermost lists.
        seed: of the initial weights of a model made by a function.
    """

    def __init__(
        self,
        model: WholeLike,
        num_stages: int,
        split: Sequence[int] | None = None,
        loss_fn: LossFn | None = None,
        *,
        blocks: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        self._source: nn.Module | Deferred | None = model if isinstance(model, nn.Module) else Deferred(model, seed)
        self._num_stages = num_stages
        self._split = split
        self._blocks = blocks
        self._observed: Observed | None = None
        whole = self._whole()
        refuse_lazy(whole, "the model")
        self._call = CallForm(whole, loss_fn)
        self.pair, self.measured = self._call.pair, self._call.measured
        self.loss_fn: LossFn = loss_of_output if loss_fn is None else loss_fn
        self.following = Following()
        self._names = {name: place for place, name in enumerate(whole.state_dict())}
        #: of the model, if it has one that can write itself
        self.config = config if hasattr(config := getattr(whole, "config", None), "save_pretrained") else None
        self._output_type: type = dict
        #: calls of blocks of each stage; none until a batch has been seen
        self.ranges: list[range] = []
        self.sharing: tuple[tuple[int, ...], ...] = ()
        #: parameters that several stages hold -> those stages
        self.shared: dict[str, list[int]] = {}
        #: of each call of a block; empty if the model itself is one
        self.block_names: list[str] = []
        self._stage_of: dict[str, int] = {}
        #: by stage, the places in (args, kwargs) of fields that it was not seen to use
        self.unused: list[frozenset[Path]] = []

    def observe(self, inputs: tuple[Sequence[Any], Mapping[str, Any]], *, trained: bool) -> None:
        """Find the blocks and cut between them.

        Args:
            inputs: of one microbatch.
            trained: whether there must be a loss.

        Raises:
            ConfigError: the model cannot be cut so.
        """
        assert self._source is not None, "released"
        observed = observe(self._source, *inputs, blocks=self._blocks, at_least=self._num_stages)
        self._observed, self._output_type = observed, type(observed.output)
        if trained and self._call.loss_is_inside:
            loss_of_output(observed.output)
        self.ranges = cut(observed.num_blocks, self._num_stages, self._split)
        observed.check(self.ranges)
        self.shared = observed.shared(self.ranges)
        self.unused = observed.unused(self.ranges)
        self.block_names = [block.path for block in observed.blocks]
        for stage, told in reversed(list(enumerate(observed.stages(self.ranges)))):
            self._stage_of |= dict.fromkeys(told.parameters, stage)
        self.sharing = groups(self.shared, len(self.ranges))

    def first_stage_of(self, parameter: str) -> int:
        """Return the first stage that holds a parameter."""
        return self._stage_of[parameter]

    def modules(self) -> list[nn.Module]:
        """Return all modules of the model, while it is whole."""
        return list(self._whole().modules())

    def _whole(self) -> nn.Module:
        assert self._source is not None, "released"
        return self._source if isinstance(self._source, nn.Module) else self._source.model

    def slice(self, stage: int, randomness: Randomness, route: int = 0) -> Slice:
        """Return a stage's slice of the model, on the device of `randomness`.

        Args:
            route: others than the first in this process, 0, get copies.
        """
        assert self._observed is not None, "not observed, or released"
        made = self._observed.build(stage, self.ranges, randomness.device, copied=route > 0)
        buffers = self._observed.own_buffers(stage, self.ranges)
        if isinstance(self._source, nn.Module):
            self.following.add(self._source, made.module, runs=False)
            if route == 0:
                self.following.mirror(self._source, made.module, buffers, made.writes)
        shared = {name: stages for name, stages in self.shared.items() if stage in stages}
        return ObservedSlice(made, self.ranges, shared, buffers)

    def only_inputs(self, inputs: Tree) -> tuple[Tree, Tree]:
        """Return a batch without targets."""
        return self._call.inputs(inputs), None

    @property
    def given(self) -> Any:
        """What the user has made, until it is released."""
        return self._source

    @property
    def name(self) -> str:
        """Of the model, while it is whole."""
        return type(self._whole()).__name__

    def release(self) -> None:
        """Let go of the model: what no stage here is made of may be freed."""
        self._source = self._observed = None

    def place_of(self, name: str) -> Any:
        """Return what sorts tensors as the model does."""
        return self._names.get(name, len(self._names)), name

    def output(self, tree: Tree) -> Tree:
        """Return an output that has travelled in the model's own type."""
        own = issubclass(self._output_type, dict) or is_dataclass(self._output_type)
        if type(tree) is not self._output_type and isinstance(tree, dict) and own:
            try:
                return self._output_type(**tree)
            except TypeError:  # its constructor takes something else
                return tree
        return tree


class CallForm:
    """How a batch goes into a model and its loss function.

    A dict is taken apart by the names of the forward's parameters; what is none of them is the loss function's. Where
    it names no parameter, a forward that needs one argument takes the dict. A tuple holds positional arguments. With a
    loss function, a pair for a model that takes one is (inputs, targets).
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._names = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}
        self._num_required = sum(p.default is p.empty for p in positional)
        self._takes_one = self._names is not None and self._num_required == 1
        self.loss_is_inside = loss_fn is None
        self._wants_batch = False if loss_fn is None else _second_name(loss_fn) == "batch"

    def pair(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return ((args, kwargs) of the model, second argument of the loss function)."""
        if batch is None:
            raise ConfigError("batch is None: every worker runs the model's own forward, so every worker needs it")
        batch = self._joined(batch)
        if self.loss_is_inside:
            return self.inputs(batch), None
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            inputs, targets = batch
            if self._num_required <= 1 or isinstance(inputs, (Mapping, tuple, list)):
                return self.inputs(inputs), batch if self._wants_batch else targets
        return self.inputs(batch), dict(batch) if isinstance(batch, Mapping) else batch

    def measured(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return the same for a metric in place of the loss function, which is given the batch, or the targets."""
        inputs, target = self.pair(batch)
        batch = self._joined(batch)
        return inputs, dict(batch) if isinstance(batch, Mapping) else batch if self.loss_is_inside else target

    def _joined(self, batch: Tree) -> Tree:
        """Return a pair of dicts as one dict, if the model computes its loss itself: a loader gives such pairs."""
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(x, Mapping) for x in batch)
        if is_pair and self.loss_is_inside and (self._names is None or {*batch[0], *batch[1]} & self._names):
            return {**batch[0], **batch[1]}
        return batch

    def inputs(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return what of a batch the model takes, as (args, kwargs)."""
        batch = self._joined(batch)
        if isinstance(batch, Mapping):
            if self._takes_one and not batch.keys() & (self._names or set()):
                return (batch if isinstance(batch, dict) else dict(batch),), {}
            others_are_of_the_loss = not self.loss_is_inside and self._names is not None
            names = self._names if others_are_of_the_loss else batch.keys()
            return (), {name: value for name, value in batch.items() if name in (names or ())}
        return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _second_name(loss_fn: LossFn) -> str:
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return ""
    return [*signature.parameters, "", ""][1]


def loss_of_output(output: Any, target: Any = None) -> Tensor:
    """Return the loss that a model has computed itself.

    Raises:
        ConfigError: there is none.
    """
    found = output
    if isinstance(output, (tuple, list)):
        numbers = [part for part in output if isinstance(part, Tensor) and part.dim() == 0]
        first = output[0] if output else None
        # (logits, loss), as nanoGPT returns it, or (loss, logits)
        found = numbers[0] if len(numbers) == 1 and not _is_number(first) else first
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, (Tensor, tuple, list)):
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and _is_number(found):
        return found
    what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ConfigError(
        f"model: returned {what} and no loss: pass a batch from which it computes one, such as a dict with labels, "
        f"or a loss_fn, called as loss_fn(output, batch)"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


class ObservedSlice:
    """A stage of a model cut by observation, as a shard sees it.

    Args:
        cut: the calls of blocks of every stage.
        shared: as in `Slice`.
        buffers: names of the buffers whose numbers are this stage's to tell.
    """

    takes_fields = True

    def __init__(
        self, stage: ObservedStage, cut: Sequence[range], shared: Mapping[str, Sequence[int]], buffers: set[str]
    ) -> None:
        self.stage = stage
        self.first = cut[stage.index].start
        self.shared = shared
        self.modules = list(stage.module.modules())
        self.own = stage.own_modules()
        self._buffers = buffers

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.stage.named_parameters())

    def expected_writes(self) -> tuple[Collection[tuple[nn.Module, str]], Collection[Tensor]]:
        return self.stage.writes.observed

    def ranks(self) -> Mapping[str, int]:
        return self.stage.ranks

    def state_dict(self) -> dict[str, Tensor]:
        module = self.stage.module
        buffers = dict(module.named_buffers(remove_duplicate=False))
        others = {id(buffer) for name, buffer in buffers.items() if name not in self._buffers}
        return {
            name: tensor.detach() if isinstance(tensor, Tensor) else tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if not isinstance(tensor, Absent) and id(tensor) not in others
        }

    def forward(self, tree: Tree, fields: Tree, seed: Seed, times: Times | None) -> Tree:
        try:
            if not isinstance(fields, Partly):
                return self._run(tree, fields, seed)
            try:
                return self._run(tree, self.stage.filled(fields.tree, fields.unread), seed)
            except NeedsField as needed:
                if fields.whole is None:
                    raise self._refused(fields, needed) from None
                return self._run(tree, fields.whole(), seed)
        except ConfigError:
            raise
        except Exception as error:
            note(error, f"in stage {self.stage.index} of {type(self.stage.module).__name__}")
            raise

    def _run(self, tree: Tree, fields: Tree, seed: Seed) -> Tree:
        args, kwargs = fields
        handed = None
        if tree and type(tree[-1]) is str:
            *tree, handed = tree
        output = self.stage.forward(tree, args, kwargs, seed)
        script = self.stage.script
        assert script is not None
        if handed is not None:
            script.check_handed(handed)
        if script.is_told:
            return output
        script.is_told = True
        return *output, script.handed  # once: each stage has observed the forward for itself

    def _refused(self, fields: Partly, needed: NeedsField) -> ConfigError:
        names = ", ".join("".join(f"[{key!r}]" for _, key in path[1:]) for path in fields.unread)
        return ConfigError(
            f"model: stage {self.stage.index} uses one of {names} of this batch ({needed}), and was not seen to when "
            f"the model was cut; with readers='first' it cannot read more: cut the model with an example= in which it "
            f"does, or let readers be users"
        )


def takes_stage(model: object) -> bool:
    """Tell whether `model` is a builder, called with the stage, and not a function that makes the whole model."""
    if hasattr(model, "num_layers"):
        return True
    try:
        inspect.signature(model).bind()  # type: ignore[arg-type]
    except TypeError:
        return True
    except ValueError:  # built in: no signature is known
        return False
    return False


def is_whole(model: object) -> bool:
    """Tell whether `model` is to be cut by observation: it is neither a list of layers nor a builder of stages."""
    if isinstance(model, nn.Module):
        return not isinstance(model, nn.Sequential) or _does_more(model)
    return callable(model) and not takes_stage(model)


def _does_more(model: nn.Sequential) -> bool:
    """Tell whether to call it is more than to call its members in turn."""
    held = vars(model)
    more = "forward" in held or type(model).forward is not nn.Sequential.forward
    return more or any(held[hooks] for hooks in HOOKS)
