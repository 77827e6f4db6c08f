"""A stage of a model that was cut by observation: its parameters, and the ways that it knows through the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..dependency import ConfigError
from ..workers.compute.attributes import Attributes
from ..workers.compute.randomness import Seed, drawn_since, python_place
from .absent import Absent
from .assignment import Owners
from .forward import ScriptedForward
from .hollow import Hollow, NeedsField, StandIns, Unread
from .observer import name_of
from .observing import observe_forward
from .script import Departed, Script
from .skeleton import Skeleton
from .trees import tensors
from .undoing import Writes
from .users import Users

#: ways through the forward that are remembered for inputs of one form
_MOST_SCRIPTS = 8
#: forms of inputs whose ways are remembered: those that were used last
_MOST_FORMS = 512
#: observations of one forward before it counts as one that goes another way each time
_MOST_TRIES = 3


class ObservedStage:
    """What a stage holds of the model, and how it runs.

    Args:
        skeleton: a copy of the model with the stage's own parameters in their places.
        cut: the calls of blocks of every stage.
        owners: which stages need a parameter.
        foreign: blocks that only other stages run.

    Attributes:
        module: the whole model's modules. Parameters of other stages have shapes, but no numbers.
        names: its own parameters, named as in the unsplit model.
        writes: what forwards write.
    """

    def __init__(
        self, skeleton: Skeleton, index: int, cut: Sequence[range], owners: Owners, foreign: Sequence[nn.Module]
    ) -> None:
        self.module = skeleton.module
        self.index = index
        self.names = [name for name, tensor in skeleton.parameters.items() if not isinstance(tensor, Absent)]
        self._skeleton = skeleton
        self._foreign = foreign
        self._cut = list(cut)
        self._owners = owners
        #: form of the inputs, and modes -> ways through the forward; the form that was used last is the last
        self._scripts: dict[Any, list[Script]] = {}
        self.filled = StandIns(skeleton).filled
        self._modules = list(self.module.modules())
        self._own = self.own_modules()
        self.writes = Writes(self._own)
        self._users = Users()
        #: what the last forward went by
        self.script: Script | None = None

    @property
    def ranks(self) -> dict[str, int]:
        """Return the places of all parameters in the unsplit model, by name."""
        return {name: place for place, name in enumerate(self._skeleton.parameters)}

    def own_modules(self) -> list[nn.Module]:
        """Return the modules that are not inside of blocks that only other stages run."""
        foreign = {module for block in self._foreign for module in block.modules()}
        return [module for module in self._modules if module not in foreign]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's own parameters by the unsplit model's names."""
        return ((name, self._skeleton.parameters[name]) for name in self.names)

    def forward(
        self, payload: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any], seed: Seed | None = None
    ) -> Any:
        """Run the stage for one microbatch.

        Args:
            payload: what the stage before returned, as leaves of this stage's graph; empty on the first stage.
            args: the model's own positional arguments, which every stage has.
            kwargs: its keyword arguments.
            seed: called before numbers are drawn, with a place in the model; the caller keeps the global generators.

        Returns:
            The tensors for the next stage, as a tuple; on the last stage what the model returns.

        Raises:
            ConfigError: the model cannot run in stages on these inputs.
            NeedsField: it wants numbers of a field for which something hollow stands; nothing has been changed.
        """
        modes = self._modes()
        scripts = self._scripts_of((_signature((args, kwargs)), modes))
        departures: list[Departed] = []
        observed: list[Script] = []
        while True:
            suited = [each for each in scripts if each in observed or each.suits(payload)]
            script = next((each for each in suited if all(map(each.admits, departures))), None)
            if script is None:
                if len(observed) == _MOST_TRIES:
                    if any(isinstance(tensor, Hollow) for tensor in tensors((args, kwargs))):
                        raise NeedsField("the forward goes another way each time")
                    raise self._wayward(observed[-1], departures[-1])
                if observed:
                    departures.clear()  # a first forward may have changed the model for good
                script = self._observed(args, kwargs)
                script.check(payload)
                observed.append(script)
                scripts[:] = [script, *scripts][:_MOST_SCRIPTS]
            before = self.writes.before(modes, [p for _, p in self.named_parameters()], self._skeleton.counting)
            first = None if script.is_settled else Attributes(self._modules)
            place = python_place()
            try:
                output = ScriptedForward(self._skeleton, script, payload, seed).run(args, kwargs)
            except (Departed, NeedsField) as departed:
                before.put_back()
                if isinstance(departed, NeedsField):
                    raise
                if isinstance(departed.__context__, NeedsField):  # whose way out went through contexts of the model
                    raise departed.__context__ from None
                departures.append(departed)
                continue
            if not script.draws_in_python and drawn_since(place, "the model"):
                script.draws_in_python = True  # which it did not when it was observed: once more, with its own numbers
                before.put_back()
                continue
            if first is not None and not script.settle(first):
                first.put_back()
                before.put_back()
                continue
            self.writes.note(modes, before)
            self.script = script
            return output

    def _wayward(self, script: Script, departed: Departed) -> ConfigError:
        """Say where a forward left the way that it had just been observed to go."""
        cue = script.cues[departed.event] if departed.event < len(script.cues) else None
        observed = "its end" if cue is None else self._called(cue.func, cue.answer)
        return ConfigError(
            f"model: its forward goes another way each time on the same inputs ({observed} was observed, then came "
            f"{self._called(departed.func, departed.answer)}); it must depend on its inputs alone: set layer drop to "
            f"0, or let each block decide for itself whether it does anything"
        )

    def _called(self, func: Any, answer: Any) -> str:
        name = self._skeleton.name_of(func) if isinstance(func, nn.Module) else name_of(func)
        return name if answer is None else f"{name} {answer}"

    def goes_without(self, tree: Any, unread: Unread) -> bool:
        """Tell by a forward on shapes whether the stage can run on (args, kwargs) of which some are not read."""
        args, kwargs = self.filled(tree, unread)
        try:
            script = self._observed(args, kwargs)
        except (ConfigError, NeedsField):
            return False
        self._scripts_of((_signature((args, kwargs)), self._modes())).insert(0, script)
        return True

    def _observed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Script:
        observation = observe_forward(self._skeleton, args, kwargs)
        script = Script(observation, self._skeleton, self.index, self._cut, self._owners, self._users)
        parameters = self._skeleton.parameters
        weights = [parameters[name] for name in script.writes & parameters.keys()]
        buffers = [self._skeleton.place_of(name) for name in script.writes - parameters.keys()]
        self.writes.expect(buffers, [weight for weight in weights if not isinstance(weight, Absent)])
        return script

    def _modes(self) -> Any:
        device = self._skeleton.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return grad, tuple([module.training for module in self._modules]), autocast

    def _scripts_of(self, form: Any) -> list[Script]:
        """Return the ways that are known for inputs of a form; forget what has not been used for long."""
        scripts = self._scripts[form] = self._scripts.pop(form, [])
        while len(self._scripts) > _MOST_FORMS:
            del self._scripts[next(iter(self._scripts))]
        return scripts


def _signature(tree: Any) -> Any:
    """Return what inputs of one form have in common, as a key."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.device, type(tree) is Hollow
    if isinstance(tree, dict):
        return tuple((key, _signature(child)) for key, child in tree.items())
    if isinstance(tree, (tuple, list)):
        return (type(tree), *map(_signature, tree))
    try:
        hash(tree)
    except TypeError:
        return type(tree)
    return tree
