"""A stage of a model that is cut by observation: it runs the model's forward by scripts of its paths, or decodes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...dependency import ConfigError, ModelError
from ...workers.compute.modules.module_state import Place, Probe
from ...workers.compute.modules.randomness import Seed
from ...workers.compute.sequences.slices import Slice, note, plain_name, versions_of
from ...workers.transport.payload import Tree, map_tensors
from ..assign.assignment import Owners
from ..observe.frames import name_of
from ..observe.observe_forward import observe_forward
from ..observe.placeholder import Placeholder
from ..observe.skeleton import COMPILED, Skeleton, wrap
from ..observe.trees import tensors
from .script_family import ScriptFamily, sized_form
from .scripted_forward import ScriptedForward
from .stage_script import Departed, Diverged, Script


class _LayerList(nn.ModuleList):
    """A list whose slices are lists: transformers takes one in each forward, and a module takes a while to make."""

    @classmethod
    def of(cls, module: nn.ModuleList) -> _LayerList:
        """Return a list with all that a list has."""
        made = cls()
        vars(made).update(vars(module))
        return made

    def __getitem__(self, at: Any) -> Any:
        return list(self._modules.values())[at]


class DecodingForward:
    """The forwards over a stage's blocks in one generation. While one runs, it is the skeleton's `run`.

    Args:
        calls: numbers of the stage's calls of blocks.
        is_last: whether the stage is the last.
    """

    def __init__(self, skeleton: Skeleton, calls: range, is_last: bool) -> None:
        self._skeleton, self._calls, self._is_last = skeleton, calls, is_last
        self._arrived: Tree = None
        self._next = 0
        #: the result of the head, and its version; whether the next one is the model's logits
        self._made: tuple[Any, int] = None, 0
        self._ends_by_head = False
        #: there are few forms: fake tensors take 0.15 ms to make, and a millisecond to compute with
        self._of = cache(self._placeholder)

    @contextmanager
    def ready(self) -> Iterator[DecodingForward]:
        """Return a context for `run`: blocks report, and embeddings of other stages return placeholders at once."""
        whole: Any = self._skeleton.module
        with self._skeleton.reporting(None), ExitStack() as undo:
            for module in [*whole.modules()]:
                for name, held in module._modules.items():
                    if type(held) is nn.ModuleList:
                        module._modules[name] = _LayerList.of(held)
                        undo.callback(module._modules.__setitem__, name, held)
                if (
                    isinstance(module, nn.Embedding)
                    and isinstance(module.weight, Placeholder)
                    and "forward" not in vars(module)
                    and len(signature(type(module).forward).parameters)
                    == 2  # OPT's positions are no function of tokens
                ):
                    undo.callback(wrap(module, partial(self._embedded, module.weight)))
            if self._is_last and (head := whole.get_output_embeddings()) is not None:
                undo.callback(wrap(head, self._headed))
            yield self

    def run(self, arrived: Tree, inputs: Mapping[str, Any]) -> Any:
        """Return the result of the stage's last block, or on the last stage the model's output.

        Args:
            arrived: the result of the last block of the stage before; None on the first stage.

        Raises:
            ModelError: the stage needs more of other stages than that result.
        """
        self._arrived, self._next, self._skeleton.run = arrived, 0, self
        try:
            found = self._skeleton.module(**inputs).logits
            self._ends_by_head = found is self._made[0] and found._version == self._made[1]
        except _StageEnds as ended:
            found = ended.args[0]
        finally:
            self._skeleton.run, self._made = None, (None, 0)
        if self._next < self._calls.stop or any(isinstance(tensor, Placeholder) for tensor in tensors(found)):
            why = "a stage needs more of the stage before than the result of one block"
            raise ModelError(f"generate: {why}; cut between whole layers, by blocks= or fewer stages")
        return found

    def _headed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the head, and leave a model at once whose logits in the round before were the very result of its head."""
        ends, self._ends_by_head = self._ends_by_head, False  # its forward, within its hooks, comes here, too
        found = forward(*args, **kwargs)
        if ends:
            self._ends_by_head = True
            raise _StageEnds(found)
        may_end = isinstance(found, Tensor) and not (found.is_inference() or self._skeleton.module._forward_hooks)
        self._made = (found, found._version) if may_end else (None, 0)
        return found

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of this stage; return at once from any other."""
        number, self._next = self._next, self._next + 1
        if number == self._calls.start - 1:
            return self._arrived
        if number < self._calls.start:
            return map_tensors(self._arrived, self._like)
        self._skeleton.run = None  # blocks inside of this one run by themselves
        try:
            result = forward(*args, **kwargs)
        finally:
            self._skeleton.run = self
        if number == self._calls.stop - 1 and not self._is_last:
            raise _StageEnds(result)
        return result

    def _like(self, tensor: Tensor) -> Tensor:
        return self._of(tuple(tensor.shape), tensor.dtype, tensor.device)

    def _embedded(self, weight: Tensor, forward: Callable[..., Any], tokens: Tensor) -> Tensor:
        return self._of((*tokens.shape, weight.shape[1]), weight.dtype, weight.device)

    def _placeholder(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a placeholder of a contiguous tensor."""
        return self._skeleton.placeholders.like(torch.empty(shape, dtype=dtype, device="meta"), device)


class _StageEnds(BaseException):
    """The stage has its result. A BaseException, so that no model catches it."""


#: most scripts for inputs of one form
_MOST_SCRIPTS = 8
#: most forms of inputs with scripts; the least recently used are dropped
_MOST_FORMS = 512
_Held = TypeVar("_Held")
#: most observations of one forward; then it counts as one that takes another path each time
_MOST_TRIES = 3


class ObservedStage(Slice):
    """The `Slice` of a stage, which runs the model's forward by scripts.

    Args:
        skeleton: a copy of the model with the stage's parameters.
        cut: the calls of blocks of every stage.
        owners: the stages that hold each parameter.
        foreign: blocks that only other stages run.
        buffers: names of the buffers with valid values on this stage.

    Attributes:
        module: the whole model's modules. Parameters of other stages are placeholders.
        own: modules except the ones that are inside blocks of other stages only.
    """

    takes_fields = True

    def __init__(
        self,
        skeleton: Skeleton,
        index: int,
        cut: Sequence[range],
        owners: Owners,
        foreign: Sequence[nn.Module],
        buffers: set[str],
    ) -> None:
        self.module = skeleton.module
        self.index, self.first, self.buffers = index, cut[index].start, buffers
        self._names = [name for name, tensor in skeleton.parameters.items() if not isinstance(tensor, Placeholder)]
        held = ((name, owners.get(name, ())) for name in self._names)
        self.shared: Mapping[str, Sequence[int]] = {
            plain_name(n): sorted(stages) for n, stages in held if len(stages) > 1
        }
        self._skeleton = skeleton
        self._cut = list(cut)
        self._owners = owners
        #: (form of the inputs, modes) -> family; the most recently used is the last
        self._families: dict[Any, ScriptFamily] = {}
        #: ((form of the inputs, modes), sizes) -> scripts; the most recently used is the last
        self._scripts: dict[Any, list[Script]] = {}
        self.modules = list(self.module.modules())
        inside_others = {module for block in foreign for module in block.modules()}
        self.own = [module for module in self.modules if module not in inside_others]
        self._probe = Probe(self.own)
        #: buffers and weights that observed forwards have written: a real one may write equal values, unnoticed
        self._writes: tuple[dict[Place, None], dict[nn.Parameter, None]] = {}, {}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(plain_name(name), self._skeleton.parameters[name]) for name in self._names]

    def compile(self, options: Mapping[str, Any]) -> None:
        for block in dict.fromkeys(self._skeleton.blocks):
            if block in self.own:
                block.compile(**options)
                COMPILED.add(block)

    def expected_writes(self) -> tuple[Collection[tuple[nn.Module, str]], Collection[Tensor]]:
        return self._writes

    def ranks(self) -> Mapping[str, int]:
        return {plain_name(name): place for place, name in enumerate(self._skeleton.parameters)}

    def state_dict(self) -> dict[str, Tensor]:
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        others = {id(buffer) for name, buffer in buffers.items() if name not in self.buffers}
        return {
            name: tensor.detach() if isinstance(tensor, Tensor) else tensor
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if not isinstance(tensor, Placeholder) and id(tensor) not in others
        }

    def versions(self) -> dict[str, dict[str, Any]]:
        return versions_of(self.module)

    def forward(self, tree: Tree, fields: Tree, seed: Seed) -> Tree:
        try:
            args, kwargs = fields
            return self.run(tree, args, kwargs, seed)
        except ConfigError:
            raise
        except Exception as error:
            note(error, f"in stage {self.index} of {type(self.module).__name__}")
            raise

    def run(
        self, payload: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any], seed: Seed | None = None
    ) -> Any:
        """Run the stage for one microbatch.

        Args:
            payload: the tensors from the stage before, leaves of this stage's graph; empty on the first stage.
            args: the model's positional arguments, which every stage has.
            kwargs: the model's keyword arguments.
            seed: seeds the generators for a place in the model before numbers are drawn; the caller restores them.

        Returns:
            The tensors for the next stage, as a tuple; on the last stage the model's output.

        Raises:
            ModelError: the model cannot run in stages on these inputs.
        """
        modes = self._modes()
        form, sizes = sized_form((args, kwargs))
        family = _recent(self._families, (form, modes), ScriptFamily)
        scripts = _recent(self._scripts, (form, modes, sizes), lambda: family.scripts_for(sizes))
        divergences: list[Diverged] = []
        observed: list[Script] = []
        while True:
            accepting = [each for each in scripts if each in observed or not each.refusal(payload)]
            script = next((each for each in accepting if all(map(each.allows, divergences))), None)
            if script is None:
                if len(observed) == _MOST_TRIES and _is_compiled(divergences[-1]):
                    why = "calls code of torch.compile around its blocks, where several stages run"
                    raise ModelError(f"model: {why}; compile blocks alone, as compile=True does")
                if len(observed) == _MOST_TRIES:
                    why = f"its forward goes another way each time (now to {name_of(divergences[-1].func)})"
                    raise ModelError(f"model: {why}; set layer drop to 0, or let each block decide for itself")
                if observed:
                    divergences.clear()  # the first forward may have changed the model permanently
                script = self._observed(args, kwargs)
                family.add(script, sizes)
                if refusal := script.refusal(payload):
                    raise ModelError(refusal)
                observed.append(script)
                scripts[:] = [script, *scripts][:_MOST_SCRIPTS]
            try:
                return self._followed(script, payload, (args, kwargs), seed, is_first=script in observed)
            except Diverged as diverged:
                divergences.append(diverged)
            except Departed:
                if script.is_new:  # a number of it may be wrong
                    scripts.remove(script)

    def decoding(self) -> DecodingForward:
        """Return the stage's forwards of a generation."""
        return DecodingForward(self._skeleton, self._cut[self.index], self.index == len(self._cut) - 1)

    def _followed(
        self, script: Script, payload: Sequence[Tensor], fields: Any, seed: Seed | None, *, is_first: bool
    ) -> Any:
        """Run the forward by a script.

        Args:
            is_first: whether it is the first one after its observation.

        Raises:
            Departed: it cannot; the modules are as before.
        """
        buffers, weights = self._writes
        # A first forward may change modules of other stages too, by registering hooks there.
        # A script for new sizes has had that of its pattern, and the modules that change are known.
        is_first = is_first or not script.is_settled
        known = self.modules if is_first else self._skeleton.counting | {module for module, _ in buffers}
        before = self._probe.before(weights, known)
        try:
            try:
                output = ScriptedForward(self._skeleton, script, payload, seed).run(*fields)
            except Exception as error:
                if script.is_new:
                    raise Departed from error
                raise
            script.is_new = False
            if is_first and not script.is_settled and not script.settle(before):
                raise Departed
        except Departed:
            before.put_back()
            raise
        self._probe.note(before)
        return output

    def _observed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Script:
        begin = time.perf_counter_ns()
        observation = observe_forward(self._skeleton, args, kwargs)
        script = Script(observation, self._skeleton, self.index, self._cut, self._owners)
        parameters, (buffers, weights) = self._skeleton.parameters, self._writes
        for name in script.writes:
            if (weight := parameters.get(name)) is None:
                buffers[self._skeleton.place_of(name)] = None
            elif not isinstance(weight, Placeholder):
                weights[weight] = None
        count, ns = self.observed
        self.observed = count + 1, ns + time.perf_counter_ns() - begin
        return script

    def _modes(self) -> Any:
        device = self._skeleton.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return grad, tuple([module.training for module in self.modules]), autocast


def _is_compiled(diverged: Diverged) -> bool:
    """Return whether a forward has gone another way inside of compiled code."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(diverged.__traceback__)]
    return any("_dynamo" in Path(file).parts for file in files)


def _recent(held: dict[Any, _Held], form: Any, make: Callable[[], _Held]) -> _Held:
    """Return the value for a form of inputs, now the most recently used; drop the least recently used."""
    found = held[form] = held.pop(form) if form in held else make()
    while len(held) > _MOST_FORMS:
        del held[next(iter(held))]
    return found
