"""The forward of one stage: the model's forward, with a script that replaces the events of other stages.

Calls of torch functions and blocks are compared with the script in order. This stage's calls run; all other calls
return placeholders, or the tensors that have arrived from the stage before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...dependency import ModelError
from ...workers.compute.modules.randomness import Seed
from ..observe.frames import in_transform
from ..observe.output_contract import check_form
from ..observe.placeholder import LOOKS_AT_MASK, Placeholder
from ..observe.side_effects import contents, reproduce, watching
from ..observe.skeleton import Skeleton, is_mark
from ..observe.trees import at, leaves, mapped, replaced, tensors
from .stage_script import Diverged, Script, ScriptLine, agrees


class ScriptedForward(TorchFunctionMode):
    """One forward that follows a script. While it runs it is the skeleton's `run`."""

    def __init__(self, skeleton: Skeleton, script: Script, payload: Sequence[Tensor], seed: Seed | None) -> None:
        super().__init__()
        self._skeleton = skeleton
        self._script = script
        self._payload = payload
        self._nodes = [tensor.grad_fn for tensor in payload]
        self._seed = seed or (lambda position, number: None)
        self._next = 0
        #: whether the forward is being left by an exception
        self._leaving = False
        #: id of an observed tensor -> the tensor in this forward
        self._tensors: dict[int, Tensor] = {}
        #: gradient hooks that the model registers on received tensors in events of other stages
        self._hooks: list[RemovableHandle] = []
        for key, place, copied in script.used:
            self._tensors[key] = payload[place].clone() if copied else payload[place]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward as far as this stage takes part in it."""
        script = self._script
        # New dicts and lists: a model may remove items from its batch, which other stages and the backward need.
        change = torch.clone if script.fields_written else lambda tensor: tensor
        args, kwargs = fields = mapped((tuple(args), kwargs), change)
        self._tensors |= {key: at(fields, path) for path, key in script.fields}
        buffers = [(module._buffers, name, module._buffers.get(name)) for module, name in self._skeleton.exchanged]
        output = None
        # It restores the mode that contexts of the model leave changed.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                self._seed(0, 0)
                with self._skeleton.reporting(self), self:
                    output = self._skeleton.module(*args, **kwargs)
                if self._next < len(script.lines):
                    raise Diverged(self._next, "output")
            except _Finished:
                pass
            finally:
                for hook in self._hooks:
                    hook.remove()
                for held, name, before in buffers:
                    if isinstance(held.get(name), Placeholder):  # only another stage has its data
                        held[name] = before
        if not script.is_last:
            made = {key: _with_history(self._tensors[key]) for place, key in script.sends if place is None}
            output = tuple(made[key] if place is None else self._payload[place] for place, key in script.sends)
        if any(isinstance(tensor, Placeholder) for tensor in tensors(output)):
            why = "would hand on a tensor that it lacks: a block computes by a weight in a tuple or a function"
            raise ModelError(f"model: stage {script.stage} {why}; hold it as an attribute, or in a list or dict")
        if any(tensor.grad_fn is not node for tensor, node in zip(self._payload, self._nodes, strict=True)):
            raise ModelError("model: what is around blocks took inputs of a stage; use checkpoint(use_reentrant=False)")
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Exits of contexts may call torch.
        if self._leaving or (self._next in self._script.transforms and in_transform()):
            return func(*args, **(kwargs or {}))
        if func is LOOKS_AT_MASK:
            return False
        is_block = self._skeleton.marked and is_mark(func)
        line = self._line(self._skeleton.mark if is_block else func)
        event = line.event
        if is_block:
            self._seed(event.position + 1, 0)
        elif not line.runs:
            if event.is_hook and not isinstance(args[0], Placeholder) and args[0].requires_grad:
                self._hooks.append(args[0].register_hook(*args[1:], **(kwargs or {})))
            return self._stand_in(line)[0]
        if event.random:
            self._seed(event.position, event.random)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if event.random:
            self._seed(event.position, 0)
        if event.answer is not None and not agrees(event.answer, result):
            self._leaving = True
            raise Diverged(self._next - 1, func, result.shape if isinstance(result, Tensor) else result)
        if line.substituted:
            result = replaced([result], {path: self._tensors[key] for path, key in line.substituted})[0]
        for path, key in line.recorded:
            self._tensors[key] = at([result], path)
        if line.last and event.presumed in (None, result):  # else the model shall see it, and raise
            self._leaving = True
            raise _Finished
        return result

    def _line(self, called: Any) -> ScriptLine:
        lines = self._script.lines
        if self._next >= len(lines) or lines[self._next].event.called != called:
            self._leaving = True
            raise Diverged(self._next, called)
        self._next += 1
        return lines[self._next - 1]

    def _stand_in(self, line: ScriptLine) -> list[Any]:
        """Return the trees of an event that other stages run: placeholders, and the tensors that this stage has."""
        trees = line.event.trees
        here = {path: self._tensors[key] for path, key in line.substituted}
        # Built anew for each microbatch, since the model may append to a list.
        return replaced(trees, {path: here.get(path, tensor) for path, tensor in leaves(trees)})  # type: ignore[no-any-return]

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of this stage; return the output of any other block with placeholders."""
        with self._skeleton.inside_block(self):
            line = self._line(module)
            if line.runs:
                result = self._run_block(line, forward, args, kwargs)
            else:
                result, *left = self._stand_in(line)
                needed = {path[0][1] for path, _ in line.substituted}
                for number, (effect, tree) in enumerate(zip(line.event.effects, left, strict=True), 1):
                    reproduce(effect, tree, (args, kwargs), number in needed)
            self._seed(line.event.position + 1, 0)
        if line.last:
            self._leaving = True
            raise _Finished
        return result

    def _run_block(self, line: ScriptLine, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        effects = line.event.effects
        hooked = [each.module for each in effects if each.module and not each.name and line.recorded]
        with watching(hooked) as calls:
            result = forward(*args, **kwargs)
        where, forms = line.event.where, line.event.trees
        if not self._script.is_last:
            check_form(where, result, forms[0])
        for path, key in line.recorded:
            number = path[0][1]
            effect = effects[number - 1] if number else None
            if effect is None:
                tree = result
            elif effect.module is None:
                tree = contents(at((args, kwargs), effect.path))
            else:
                tree = getattr(effect.module, effect.name) if effect.name else calls[number - 1][1]
            if effect is not None and (effect.name or effect.module is None) and not self._script.is_last:
                check_form(where, tree, forms[number], effect.name)
            self._tensors[key] = at(tree, path[1:])
        return result


def _with_history(tensor: Tensor) -> Tensor:
    """Return a tensor that backward can begin at if it requires a gradient.

    A view that was made under no_grad requires one if its base does, but has no graph: it is detached.
    """
    return tensor.detach() if tensor.requires_grad and tensor.grad_fn is None and tensor._is_view() else tensor


class _Finished(BaseException):
    """The stage has computed all that it sends. A BaseException, so that no model catches it."""
