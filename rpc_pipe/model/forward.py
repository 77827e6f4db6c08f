"""A forward of one stage: the model's own, in which a script says what runs here and what only stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..dependency import ConfigError
from ..workers.compute.borders import version_of
from ..workers.compute.randomness import Seed, python_too
from ..workers.compute.slices import note
from .absent import Absent
from .hollow import Hollow, NeedsField, copy_of, said
from .objects import is_object
from .observation import Output
from .observer import name_of
from .promise import check_left
from .script import Cue, Departed, Script, agrees
from .skeleton import Skeleton, is_mark
from .trees import Path, at, leaves, mapped, replaced, tensors


class ScriptedForward(TorchFunctionMode):
    """One forward that follows a script; the skeleton's `run` while it does."""

    def __init__(self, skeleton: Skeleton, script: Script, payload: Sequence[Tensor], seed: Seed | None) -> None:
        super().__init__()
        self._skeleton = skeleton
        self._script = script
        self._payload = payload
        self._nodes = [tensor.grad_fn for tensor in payload]
        seed = seed or _no_seed
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
        versions = list(map(version_of, given.values()))
        self._skeleton.run = self
        buffers = [(module._buffers, name, module._buffers.get(name)) for module, name in self._skeleton.exchanged]
        output = None
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # what the model's own contexts did not put back
            try:
                self._seed(0, 0)
                with self:
                    output = self._skeleton.module(*args, **kwargs)
                if self._next < len(script.cues):
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
        if not script.fields_written and not script.is_alone and list(map(version_of, given.values())) != versions:
            raise _wrote_fields()
        self._refuse_odd(self._odd)
        if not script.is_last:
            output = tuple(
                [
                    _with_history(self._now[key]) if place is None else self._payload[place]
                    for place, key in script.hands
                ]
            )
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
        cue = self._cue(self._skeleton.mark if is_block else func)
        if is_block:
            self._seed(cue.position + 1, 0)
        elif not cue.runs:
            if cue.said is not None and said((args, kwargs or {})) != cue.said:
                self._over = True
                raise NeedsField(f"{name_of(func)} is called with other numbers, and takes a field")
            if cue.func is Tensor.register_hook and not isinstance(args[0], Absent) and args[0].requires_grad:
                self._hooks.append(args[0].register_hook(*args[1:], **(kwargs or {})))
            return self._stand_in(cue)[0].tree
        if cue.number:
            self._seed(cue.position, cue.number)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if cue.number:
            self._seed(cue.position, 0)
        if cue.answer is not None and not agrees(cue.answer, result):
            self._over = True
            self._script.refuse_untold(self._next - 1, result)
            raise Departed(self._next - 1, func, result.shape if isinstance(result, Tensor) else result)
        if cue.swapped:
            result = replaced(result, {path: self._now[key] for _, path, key in cue.swapped})
        for _, path, key in cue.noted:
            self._now[key] = at(result, path)
        if cue.last:
            self._over = True
            raise _Finished
        return result

    def _cue(self, called: Any) -> Cue:
        cues = self._script.cues
        if self._next >= len(cues) or cues[self._next].func != called:
            self._over = True
            raise Departed(self._next, called)
        self._next += 1
        return cues[self._next - 1]

    def _stand_in(self, cue: Cue) -> list[Output]:
        """Return what an event that other stages run left, with what this stage has of it."""
        real: list[dict[Path, Tensor]] = [{} for _ in cue.outputs]
        if self._odd:
            self._refuse_odd(key for _, _, key in cue.swapped)
        for number, path, key in cue.swapped:
            real[number][path] = self._now[key]
        # Rebuilt, so that a list that the model adds to is a new one for each microbatch.
        return [
            Output(
                replaced(output.tree, {path: now.get(path, tensor) for path, tensor in leaves(output.tree)}),
                output.module, output.arguments, output.name, output.inside,
            )
            for output, now in zip(cue.outputs, real, strict=True)
        ]  # fmt: skip

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block if it is this stage's own; else return what stands for its output."""
        with self._skeleton.inside_block(self):
            cue = self._cue(module)
            if cue.runs:
                result = self._run_block(cue, forward, args, kwargs)
            else:
                outputs = self._stand_in(cue)
                result = outputs[0].tree
                needed = {number for number, _, _ in cue.swapped}
                for number, output in enumerate(outputs[1:], 1):
                    _leave(output, number in needed)
            self._seed(cue.position + 1, 0)
        if cue.last:
            self._over = True
            raise _Finished
        return result

    def _run_block(self, cue: Cue, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        returned: list[Any] = []
        handles = [
            output.module.register_forward_hook(lambda _, args, found: returned.append(found), prepend=True)
            for output in {id(output.module): output for output in cue.outputs[1:] if not output.name}.values()
            if output.module is not None and cue.noted
        ]
        try:
            result = forward(*args, **kwargs)
        except Exception as error:
            for given in (*args, *kwargs.values()):
                if is_object(given) and self._script.stage:
                    kind = type(given).__name__
                    note(error, f"in a block that takes a {kind}: what blocks of other stages put into it is not here")
            raise
        finally:
            for handle in handles:
                handle.remove()
        if cue.promise is not None:
            cue.promise.check(result, (args, kwargs), self._skeleton.owned)
        for number, path, key in cue.noted:
            output = cue.outputs[number]
            if output.name:
                tree = getattr(output.module, output.name)
                if output.tree is not None:
                    check_left(self._skeleton.name_of(cue.func), output.name, tree, output.tree)
            else:
                tree = returned[number - 1] if number else result
            self._now[key] = at(tree, path)
        return result


def _with_history(tensor: Tensor) -> Tensor:
    """Return a tensor that backward can begin at, if it requires a gradient.

    A view that was made without gradients requires one as its base does, and passes none on.
    """
    return tensor.detach() if tensor.requires_grad and tensor.grad_fn is None and tensor._is_view() else tensor


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


def _leave(output: Output, needed: bool) -> None:
    """Do what a block that is not run would have left: let hooks see its modules' outputs, set its attributes."""
    module = output.module
    assert module is not None
    if output.name:
        held: Any = getattr(module, output.name, None)
        if output.inside and type(held) is type(output.tree):
            held.clear()
            held.update(output.tree) if isinstance(held, dict) else held.extend(output.tree)
        elif needed:
            setattr(module, output.name, output.tree)
        return
    assert output.arguments is not None
    own = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: output.tree
    try:
        module(*output.arguments[0], **output.arguments[1])
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _no_seed(position: int, number: int) -> None:
    pass
