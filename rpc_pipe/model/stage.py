"""A stage of a model that was cut by observation: the model's own forward, in which the rest only stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..dependency import ConfigError
from ..workers.compute.randomness import Seed, python_too
from .absent import Absent
from .assignment import Owners
from .hollow import Hollow, NeedsField, StandIns, Unread, copy_of, said
from .observation import Part
from .observer import name_of
from .observing import observe_forward
from .script import Departed, Script, Step, agrees
from .skeleton import Skeleton, is_mark
from .trees import Path, at, leaves, mapped, replaced, tensors
from .undoing import Writes
from .users import Users

#: ways through the forward that are remembered for inputs of one form
_MOST_SCRIPTS = 8
#: forms of inputs whose ways are remembered: those that were used last
_MOST_FORMS = 512
#: observations of one forward before it counts as one that goes another way each time
_MOST_TRIES = 3


class Stage:
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
            seed: called before numbers are drawn; the place in the model that it is told is the same for any cut.
                The caller keeps the global generators.

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
                    raise _wayward(observed[-1], departures[-1])
                if observed:
                    departures.clear()  # a first forward may have changed the model for good
                script = self._observed(args, kwargs)
                script.check(payload)
                observed.append(script)
                scripts[:] = [script, *scripts][:_MOST_SCRIPTS]
            before = self.writes.before(modes, [p for _, p in self.named_parameters()], self._skeleton.counting)
            try:
                output = _Forward(self._skeleton, script, payload, seed or _no_seed).run(args, kwargs)
            except (Departed, NeedsField) as departed:
                before.put_back()
                if isinstance(departed, NeedsField):
                    raise
                if isinstance(departed.__context__, NeedsField):  # whose way out went through contexts of the model
                    raise departed.__context__ from None
                departures.append(departed)
                continue
            self.writes.note(modes, before)
            return output

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
        return Script(observation, self._skeleton, self.index, self._cut, self._owners, self._users)

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


def _wayward(script: Script, departed: Departed) -> ConfigError:
    """Say where a forward left the way that it had just been observed to go."""
    step = script.steps[departed.event] if departed.event < len(script.steps) else None
    observed = "its end" if step is None else f"{name_of(step.func)} {step.answer or ''}"
    return ConfigError(
        f"model: its forward goes another way each time on the same inputs ({observed} was observed, then came "
        f"{name_of(departed.func)} {departed.answer or ''}); it must depend on its inputs alone"
    )


def _no_seed(position: int, number: int) -> None:
    pass


class _Forward(TorchFunctionMode):
    """One forward that follows a script; the skeleton's `run` while it does."""

    def __init__(self, skeleton: Skeleton, script: Script, payload: Sequence[Tensor], seed: Seed) -> None:
        super().__init__()
        self._skeleton = skeleton
        self._script = script
        self._payload = payload
        self._nodes = [tensor.grad_fn for tensor in payload]
        self._seed = python_too(seed) if script.draws_in_python else seed
        self._next = 0
        #: the forward has ended here, by an exception that is on its way
        self._over = False
        #: observed tensor (its id) -> what it is now
        self._now: dict[int, Tensor] = {}
        #: hooks that other stages hang on what arrived, for blocks that ask for its gradient in their forward
        self._hooks: list[RemovableHandle] = []
        arrived = zip(script.takes, payload, strict=True)
        #: what arrived in another shape than was observed, with where it comes from
        self._odd = {key: (where, shape, t) for (key, shape, where), t in arrived if t.shape != shape}
        for key, place, copied in script.given:
            if copied and sum([tensor is payload[place] for tensor in payload]) > 1:
                raise _written_twice(script.takes[place][2])
            self._now[key] = payload[place].clone() if copied else payload[place]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward as far as this stage has a part in it."""
        script = self._script
        # Dicts and lists of its own: a model may take something out of its batch, which other stages and backward need.
        change = copy_of if script.fields_written else lambda tensor: tensor
        args, kwargs = fields = mapped((tuple(args), kwargs), change)
        self._now |= (given := {key: at(fields, path) for path, key in script.fields})
        versions = _versions(given.values())
        self._skeleton.run = self
        buffers = [(module._buffers, name, module._buffers.get(name)) for module, name in self._skeleton.exchanged]
        output = None
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # what the model's own contexts did not put back
            try:
                self._seed(0, 0)
                with self:
                    output = self._skeleton.module(*args, **kwargs)
                if self._next < len(script.steps):
                    raise Departed(self._next, "output")
            except _Finished:
                pass
            finally:
                self._skeleton.run = None
                for hook in self._hooks:
                    hook.remove()
                for held, name, before in buffers:
                    if isinstance(held.get(name), Absent):  # another stage has its numbers
                        held[name] = before
        if not script.fields_written and not script.is_alone and _versions(given.values()) != versions:
            raise _wrote_fields()
        self._refuse_odd(self._odd)
        if not script.is_last:
            output = tuple([self._now[key] if place is None else self._payload[place] for place, key in script.hands])
        if any(isinstance(tensor, Absent) for tensor in tensors(output)):
            if any(isinstance(tensor, Hollow) for tensor in tensors(output)):
                raise NeedsField("the stage would hand on a field")
            raise ConfigError(
                f"model: stage {script.stage} would hand on a tensor that it does not have: a block computes by a "
                f"weight that it holds neither as an attribute nor in a list or dict, but in a tuple, or a function"
            )
        if any(tensor.grad_fn is not node for tensor, node in zip(self._payload, self._nodes, strict=True)):
            raise ConfigError(
                "model: an autograd function around the blocks took over what came from the stage before; "
                "with checkpoint(), use_reentrant=False"
            )
        return output

    def _refuse_odd(self, keys: Iterable[int]) -> None:
        for where, shape, tensor in (self._odd[key] for key in keys if key in self._odd):
            raise ConfigError(
                f"model: {where} gave a tensor of shape {tuple(tensor.shape)}, and {tuple(shape)} when it was "
                f"observed: its shape depends on numbers and cannot cross a cut; cut elsewhere"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._over:  # contexts are being left
            return func(*args, **(kwargs or {}))
        is_block = self._skeleton.marked and is_mark(func)
        step = self._step(self._skeleton.mark if is_block else func)
        if is_block:
            self._seed(step.position + 1, 0)
        elif not step.runs:
            if step.said is not None and said((args, kwargs or {})) != step.said:
                self._over = True
                raise NeedsField(f"{name_of(func)} is called with other numbers, and takes a field")
            if step.func is Tensor.register_hook and not isinstance(args[0], Absent) and args[0].requires_grad:
                self._hooks.append(args[0].register_hook(*args[1:], **(kwargs or {})))
            return self._stand_in(step)[0].tree
        if step.number:
            self._seed(step.position, step.number)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if step.number:
            self._seed(step.position, 0)
        if step.answer is not None and not agrees(step.answer, result):
            self._over = True
            raise Departed(self._next - 1, func, result.shape if isinstance(result, Tensor) else result)
        if step.swapped:
            result = replaced(result, {path: self._now[key] for _, path, key in step.swapped})
        for _, path, key in step.noted:
            self._now[key] = at(result, path)
        if step.last:
            self._over = True
            raise _Finished
        return result

    def _step(self, called: Any) -> Step:
        steps = self._script.steps
        if self._next >= len(steps) or steps[self._next].func != called:
            self._over = True
            raise Departed(self._next, called)
        self._next += 1
        return steps[self._next - 1]

    def _stand_in(self, step: Step) -> list[Part]:
        """Return what an event that other stages run left, with what this stage has of it."""
        real: list[dict[Path, Tensor]] = [{} for _ in step.parts]
        if self._odd:
            self._refuse_odd(key for _, _, key in step.swapped)
        for number, path, key in step.swapped:
            real[number][path] = self._now[key]
        # Rebuilt, so that a list that the model adds to is a new one for each microbatch.
        return [
            Part(
                replaced(part.tree, {path: now.get(path, tensor) for path, tensor in leaves(part.tree)}),
                part.module, part.arguments, part.name,
            )
            for part, now in zip(step.parts, real, strict=True)
        ]  # fmt: skip

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block if it is this stage's own; else return what stands for its output."""
        with self._skeleton.inside_block(self):
            step = self._step(module)
            if step.runs:
                result = self._run_block(step, forward, args, kwargs)
            else:
                parts = self._stand_in(step)
                result = parts[0].tree
                needed = {number for number, _, _ in step.swapped}
                for number, part in enumerate(parts[1:], 1):
                    _leave(part, number in needed)
            self._seed(step.position + 1, 0)
        if step.last:
            self._over = True
            raise _Finished
        return result

    def _run_block(self, step: Step, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        returned: list[Any] = []
        handles = [
            part.module.register_forward_hook(lambda _, args, output: returned.append(output), prepend=True)
            for part in {id(part.module): part for part in step.parts[1:] if not part.name}.values()
            if part.module is not None and step.noted
        ]
        try:
            result = forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if step.promise is not None:
            step.promise.check(result, (args, kwargs), self._skeleton.owned)
        for number, path, key in step.noted:
            part = step.parts[number]
            tree = result if not number else getattr(part.module, part.name) if part.name else returned[number - 1]
            self._now[key] = at(tree, path)
        return result


def _versions(given: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in given]


def _wrote_fields() -> ConfigError:
    return ConfigError(
        "model: the batch was written in place while a stage ran, which was not so when it was observed, and the other "
        "stages do not see it; if a block did it, let the model begin with x = x.clone()"
    )


def _written_twice(where: str) -> ConfigError:
    return ConfigError(
        f"model: {where} handed on the very tensor that it got, which is written in place by a later block and used by "
        f"others too: the stages cannot write both; hand on a copy by .clone(), or leave out the change in place"
    )


class _Finished(BaseException):
    """The stage has all that it hands on; not an Exception, so that no model swallows it."""


def _leave(part: Part, needed: bool) -> None:
    """Do what a block that is not run would have left: let hooks see its modules' outputs, set its attributes."""
    module = part.module
    assert module is not None
    if part.name:
        if needed:
            setattr(module, part.name, part.tree)
        return
    assert part.arguments is not None
    own = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: part.tree
    try:
        module(*part.arguments[0], **part.arguments[1])
    finally:
        del module.forward
        if own is not None:
            module.forward = own


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
