"""The partition of an arbitrary model, which is cut where its forward calls its blocks."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.modules.randomness import Randomness
from ..workers.compute.result import NUM_ITEMS
from ..workers.compute.sequences.slices import Divide, Slice, plain_name
from ..workers.compute.shard import LossFn
from ..workers.transport.payload import Tree
from .assign.assignment import BlocksNeeded
from .call_form import CallForm, adds_terms, loss_of_output
from .common_objects import Holder, look, mentioned, read_by, shared_generators
from .deferred import DeferredModel
from .module_copies import ModuleCopies, Pairs, paired
from .observe.model_kinds import refuse_lazy
from .observed_model import ObservedModel, observe
from .replay.observed_stage import ObservedStage
from .sharding import cut

logger = logging.getLogger(__name__)

#: a model, or a function that makes one
ModuleOrFactory = nn.Module | Callable[[], nn.Module]


class ObservedPartition:
    """A module, or a function that makes one, and its cut, which is made with the first batch.

    Args:
        split: number of calls of blocks of each stage; None: as evenly as possible.
        loss_fn: None: the model computes its loss itself.
        blocks: names of blocks, or of lists of blocks; None: they are found.
        seed: seed of the initial weights of a model made by a function.
    """

    def __init__(
        self,
        model: ModuleOrFactory,
        num_stages: int,
        split: Sequence[int] | None = None,
        loss_fn: LossFn | None = None,
        *,
        blocks: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        self._source: nn.Module | DeferredModel | None
        self._source = model if isinstance(model, nn.Module) else DeferredModel(model, seed)
        self._num_stages = num_stages
        self._split = split
        self._blocks = blocks
        self._observed: ObservedModel | None = None
        whole = self.whole
        refuse_lazy(whole, "the model")
        self._call = CallForm(whole, loss_fn)
        self.pair, self.pair_for_metric = self._call.pair, self._call.pair_for_metric
        self.could_be_one, self.could_be_input = self._call.could_be_one, self._call.could_be_input
        #: whether the model computes its loss itself
        self.loss_is_inside = loss_fn is None
        self.loss_fn: LossFn = loss_of_output if loss_fn is None else loss_fn
        self.module_copies = ModuleCopies()
        self._names = {name: place for place, name in enumerate(whole.state_dict())}
        #: the model's configuration, if it can be saved
        self.config = Configuration(whole) if hasattr(getattr(whole, "config", None), "save_pretrained") else None
        #: of tensors with several names, the names that are not written
        self.other_names = other_names(whole) if self.config else frozenset()
        self._adapters = _adapter_tensors(whole)
        self._output_type: type = dict
        #: whether a loss may have terms beside its mean, or beside a sum divided by `NUM_ITEMS`
        self.adds_means = True
        #: the objects that the loss function can reach, by id, and the names in its code
        self._read: tuple[dict[int, Any], Collection[str]] = {}, ()
        #: calls of blocks of each stage; empty until the model has been cut
        self.ranges: list[range] = []
        #: parameters that several stages hold -> their stages
        self.shared: dict[str, list[int]] = {}
        #: (calls of blocks before, number of the function since then) -> stage, of functions that take parameters
        self.uses: dict[tuple[int, int], int] = {}
        #: path of each call's block; "" for the model itself
        self.block_names: list[str] = []
        self._stage_of: dict[str, int] = {}
        #: by stage and route: slices that have been begun
        self._begun: dict[tuple[int, int], tuple[Pairs, Callable[[Divide | None], ObservedStage]]] = {}

    def observe(self, inputs: tuple[Sequence[Any], Mapping[str, Any]], *, trained: bool) -> None:
        """Find the blocks and cut between them.

        Args:
            inputs: (args, kwargs) of one microbatch.
            trained: whether there must be a loss.

        Raises:
            ModelError: the model cannot be cut like this.
        """
        try:
            observed = self._cut(inputs, self._blocks)
        except BlocksNeeded as needed:
            if not needed.blocks or self._blocks is not None or self._split is not None:
                raise
            logger.info("blocks: %s, as %s", ", ".join(needed.blocks), needed)
            observed = self._cut(inputs, needed.blocks)
        self._output_type = type(observed.output)
        with suppress(*() if trained else (ModelError,)):
            if self.loss_is_inside:
                self.adds_means = adds_terms(loss_of_output(observed.output), inputs[1].get(NUM_ITEMS))
        self._settle(observed)

    def anew(self, num_stages: int) -> ObservedPartition:
        """Return the same model with another cut, before it is released.

        Raises:
            ModelError: the model cannot be cut like this.
        """
        assert self._observed is not None, "not observed, or released"
        made = copy.copy(self)
        made.module_copies, made.ranges = ModuleCopies(), cut(self._observed.num_blocks, num_stages, None)
        self._observed.check(made.ranges)
        made._settle(self._observed)
        return made

    def _settle(self, observed: ObservedModel) -> None:
        """Have the cut of an observed model."""
        self._observed = observed
        self._refuse_loss_of_attributes(observed)
        self.shared = {plain_name(name): stages for name, stages in observed.shared(self.ranges).items()}
        self.uses = observed.uses(self.ranges)
        self.block_names = [block.path for block in observed.blocks]
        self._stage_of = {plain_name(name): stages[0] for name, stages in observed.holders(self.ranges).items()}

    def _cut(
        self, inputs: tuple[Sequence[Any], Mapping[str, Any]], blocks: str | Sequence[str] | None
    ) -> ObservedModel:
        """Observe the model and cut it between its blocks, or the named ones."""
        assert self._source is not None, "released"
        how: Any = {"blocks": blocks, "at_least": self._num_stages, "watched": self._boxes_of_loss()}
        observed = observe(self._source, *inputs, **how)
        self.ranges = cut(observed.num_blocks, self._num_stages, self._split)
        observed.check(self.ranges)
        return observed

    def _refuse_loss_of_attributes(self, observed: ObservedModel) -> None:
        """Raise if a loss function refers to tensors that blocks leave on stages before the last."""
        self._read = read_by(self.loss_fn, set(self.whole.modules()))
        if found := observed.left_before_last(self.ranges, self._boxes_of_loss(), self._read[0]):
            why = f"loss_fn: refers to {found[0]}, which a block of a stage before the last fills"
            raise ModelError(f"{why}: let the model return it, or refer to blocks of the last stage alone (split=)")

    def _boxes_of_loss(self) -> dict[str, Any]:
        """Return the containers that a loss function refers to, which hooks may fill."""
        return {name: box for name, box in mentioned(self.loss_fn).items() if isinstance(box, (list, dict))}

    def first_stage_of(self, parameter: str) -> int:
        """Return the first stage that holds a parameter."""
        return self._stage_of[plain_name(parameter)]

    @property
    def whole(self) -> nn.Module:
        """The model, until it is released."""
        assert self._source is not None, "released"
        return self._source if isinstance(self._source, nn.Module) else self._source.model

    def slice(self, stage: int, randomness: Randomness, route: int = 0, divide: Divide | None = None) -> Slice:
        """Return a stage's slice of the model, on the device of `randomness`.

        Args:
            route: 0 for the first replica in this process; other routes get copies.
        """
        assert self._observed is not None, "not observed, or released"
        if (stage, route) not in self._begun:
            self.begin(stage, randomness, route)
        pairs, finish = self._begun.pop((stage, route))
        made = finish(divide)
        read, names = self._read if stage < len(self.ranges) - 1 else ({}, ())
        read_here = [(path, part) for path, module, part in pairs if id(module) in read]
        held = [Holder(f"block {p}", f"an attribute of {type(part).__name__}", part, names) for p, part in read_here]
        if holders := [*held, *shared_generators(pairs, set(made.own))]:
            made.look = partial(look, holders)
        if isinstance(self._source, nn.Module):
            mirrored = made.buffers if route == 0 else ()
            used, hooked = set(made.own), self._observed.hooked
            self.module_copies.add(pairs, runs=False, used=used, mirrored=mirrored, hooked=hooked)
        return made

    def begin(self, stage: int, randomness: Randomness, route: int = 0) -> None:
        """Copy the modules of a stage, before `slice` divides some of the user's among members."""
        assert self._observed is not None, "not observed, or released"
        module, finish = self._observed.begin(stage, self.ranges, randomness.device, copied=route > 0)
        pairs = paired(self._source, module) if isinstance(self._source, nn.Module) else []
        self._begun[stage, route] = pairs, finish

    def only_inputs(self, inputs: Tree) -> tuple[Tree, Tree]:
        """Return a batch without targets."""
        return self._call.inputs(inputs), None

    @property
    def given(self) -> Any:
        """The user's model, until it is released."""
        return self._source

    @property
    def name(self) -> str:
        """The name of the model, until it is released."""
        return type(self.whole).__name__

    def release(self) -> None:
        """Drop the reference to the model, so that parameters of other processes can be freed."""
        self._source = self._observed = None
        self._read = {}, ()

    @property
    def adapters(self) -> frozenset[str]:
        """The names of the tensors that peft writes of the model's adapters.

        Raises:
            ModelError: it writes other tensors, which it makes of them.
        """
        if isinstance(self._adapters, ModelError):
            raise self._adapters
        return self._adapters

    def place_of(self, name: str) -> Any:
        """Return a sort key that orders tensors as the model does."""
        return self._names.get(name, len(self._names)), name

    def output(self, tree: Tree) -> Tree:
        """Return an output in the type that the model returns."""
        own = issubclass(self._output_type, dict) or is_dataclass(self._output_type)
        if type(tree) is not self._output_type and isinstance(tree, dict) and own:
            try:
                return self._output_type(**tree)
            except TypeError:  # its constructor takes something else
                return tree
        return tree


def _adapter_tensors(whole: nn.Module) -> frozenset[str] | ModelError:
    """Return the names of the tensors that peft writes of a model's adapters; none of one that it has not adapted.

    An error in their place is raised where they are written: peft makes other tensors of prompts that were trained.
    """
    configs = getattr(whole, "peft_config", None)
    peft: Any = sys.modules.get("peft")  # an adapted model implies that it is loaded
    if not isinstance(configs, dict) or peft is None:
        return frozenset()
    how = {"save_embedding_layers": False} if isinstance(whole, peft.PeftModel) else {}
    state, found = whole.state_dict(), set()
    name_of = {id(tensor): name for name, tensor in state.items()}
    for adapter, config in configs.items():
        for tensor in peft.get_peft_model_state_dict(whole, state_dict=state, adapter_name=adapter, **how).values():
            if id(tensor) not in name_of:
                why = f"adapter {adapter}: peft writes {type(config).__name__} as other tensors than the model holds"
                fix = "on worker 0 call model.save_pretrained(folder, state_dict=pipe.weights.state_dict())"
                return ModelError(f"{why}; {fix}")
            found.add(name_of[id(tensor)])
    return frozenset(found)


class Configuration:
    """The configuration of a model, and of its generation of text, as they are when they are written."""

    def __init__(self, model: nn.Module) -> None:
        given: Any = model
        self._config, self._name, self._dtype = given.config, type(model).__name__, getattr(given, "dtype", None)
        generates = hasattr(model, "can_generate") and given.can_generate()
        self.generation = getattr(model, "generation_config", None) if generates else None
        #: whether the model gives tokens behind its inputs
        self.generates = generates and not getattr(given.config, "is_encoder_decoder", False)

    def write(self, folder: Path) -> None:
        """Write both; warn of a file that cannot be written: the weights do not depend on it."""
        config = copy.deepcopy(self._config)
        config.architectures = [self._name]
        if self._dtype is not None:
            config.dtype = str(self._dtype).removeprefix("torch.")
        for each in (config, self.generation):
            try:
                if each is not None:
                    each.save_pretrained(folder)
            except OSError:
                raise
            except Exception as error:  # such as a value that is refused only when it is written
                logger.warning("%s: %s is not written: %s", folder.parent, type(each).__name__, error)


def other_names(model: Any) -> frozenset[str]:
    """Return the duplicate names of tensors that the model's class declares as tied."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    found: set[str] = set()
    for several in names.values():
        made = [name for name in several if any(re.search(each, name) for each in tied)]
        found.update(map(plain_name, made if len(made) < len(several) else made[1:]))
    return frozenset(found)
