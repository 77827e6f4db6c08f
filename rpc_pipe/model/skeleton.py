"""A copy of a model in which parameters are placeholders until someone puts real ones there, and whose blocks tell
who runs the forward that they are called."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ..dependency import ConfigError
from ..dependency.errors import first_sentence
from ..workers.compute.attributes import Attributes
from ..workers.compute.inner_state import OF_TORCH
from .absent import Absent, Shapes
from .trees import at, leaves

#: what a mark is called among the blocks
MARK = "pipe_split()"


class Run(Protocol):
    """A forward that runs now, as seen by the blocks."""

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer the call of a block; `forward` is its own."""


class Skeleton:
    """A model's modules with fake parameters (shapes, no numbers) in place of the model's own, by the model's names.

    Args:
        model: left as it is; its buffers are copied.
        device: of the placeholders, and where the copied buffers go.

    Raises:
        ConfigError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.shapes = Shapes()
        self.device = device
        self.module = self._copied(model)
        modules = list(self.module.named_modules())
        #: name in the unsplit model (the first, where it has several) -> what stands there now
        self.parameters: dict[str, nn.Parameter] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        #: lists and dicts that hold one besides, and where
        self._held: dict[str, list[tuple[Any, Any]]] = {}
        self._names = {id(module): name for name, module in modules}
        self._note_places(modules)
        self._fakes = dict(self.parameters)
        self.blocks: list[nn.Module] = []
        #: what stood where the blocks' calls are told: attribute, and what it was
        self._forwards: list[tuple[str, Callable[..., Any] | None]] = []
        #: stands for a call of torch's `pipe_split()`, which counts as a block that does nothing if `marked`
        self.mark = nn.Identity()
        self.marked = False
        self._names[id(self.mark)] = MARK
        #: who runs a forward now; None: blocks run as they are
        self.run: Run | None = None
        #: copies of buffers that stand there for a while
        self._standing: list[tuple[nn.Module, str, Tensor]] = []
        #: modules that have been seen to change attributes of theirs in a forward
        self.counting: set[nn.Module] = set()
        #: buffers in whose place a forward has been seen to put others
        self.exchanged: dict[tuple[nn.Module, str], None] = {}

    def _copied(self, model: nn.Module) -> nn.Module:
        modules = list(model.named_modules())  # listed once: it takes long
        _refuse_modules(modules, type(model).__name__)
        memo: dict[int, Any] = {}
        for _, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in memo:
                    memo[id(parameter)] = self.shapes.parameter_like(parameter, self.device)
            for value in vars(module).values():
                if type(value) in (OrderedDict, set) and not value:  # of hooks: most of a deep copy's time
                    memo[id(value)] = type(value)()
                elif isinstance(value, Tensor) and not value.is_leaf:  # computed anew by every forward: weight_norm
                    memo[id(value)] = value.detach().clone()
        try:
            return copy.deepcopy(model, memo)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"model {type(model).__name__}: cannot be copied ({first_sentence(error)}); pass a function that makes "
                f"it instead"
            ) from None

    def _note_places(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Move buffers to the device; note where parameters are held, and by which names."""
        names: dict[int, str] = {}
        for prefix, module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)
            for name, own in module._parameters.items():
                if own is not None:
                    whole = names.setdefault(id(own), f"{prefix}.{name}" if prefix else name)
                    self.parameters.setdefault(whole, own)
                    self._places.setdefault(whole, []).append((module, name))
        for _, module in modules:
            for attribute, value in vars(module).items():
                if type(value) in (list, dict) and attribute not in OF_TORCH:
                    self._note_held(value, names)

    def all_tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that stand there now."""
        return [*self.parameters.values(), *self.module.buffers()]

    def path_of(self, module: nn.Module) -> str:
        """Return a module's name in the model, empty for the model itself."""
        path: str = self._names[id(module)]
        return path

    def name_of(self, module: nn.Module) -> str:
        """Return what to call a module in a sentence."""
        return self.path_of(module) or type(module).__name__

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that has a parameter or a buffer, and what it calls it."""
        module, _, attribute = name.rpartition(".")
        return self.module.get_submodule(module), attribute

    def owned(self, name: str) -> Tensor:
        """Return a parameter or a buffer, whatever stands there now."""
        found: Tensor = getattr(*self.place_of(name))
        return found

    def put(self, parameters: dict[str, nn.Parameter]) -> None:
        """Let real parameters stand where placeholders stood; by name."""
        for name, parameter in parameters.items():
            for module, attribute in self._places[name]:
                setattr(module, attribute, parameter)
            for held, key in self._held.get(name, ()):
                held[key] = parameter
            self.parameters[name] = parameter

    def _note_held(self, held: Any, names: dict[int, str]) -> None:
        for path, tensor in leaves(held):
            inside = at(held, path[:-1])
            if id(tensor) in names and type(inside) in (list, dict):
                self._held.setdefault(names[id(tensor)], []).append((inside, path[-1][1]))

    @contextmanager
    def without_numbers(self) -> Iterator[Attributes]:
        """Put placeholders back for a while, and copies of all buffers, which a forward may write.

        Attributes that change meanwhile, such as counters, are put back too; the context is what they were.
        """
        real = {name: p for name, p in self.parameters.items() if not isinstance(p, Absent)}
        for name, parameter in real.items():
            self._fakes[name].requires_grad_(parameter.requires_grad)
        buffers = [(m, n, b) for m in self.module.modules() for n, b in m._buffers.items() if b is not None]
        places = [(module._parameters, attribute) for name in real for module, attribute in self._places[name]]
        held = [(parameters, name, parameters[name]) for parameters, name in places if name in parameters]
        self.put({name: self._fakes[name] for name in real})
        before = Attributes(self.module.modules())
        copies = {id(buffer): buffer.clone() for _, _, buffer in buffers}
        for module, name, buffer in buffers:
            module._buffers[name] = copies[id(buffer)]
        self._standing = [(module, name, copies[id(buffer)]) for module, name, buffer in buffers]
        try:
            yield before
        finally:
            changed = before.changed()
            self.counting |= changed | before.put_back()
            self._standing = []
            self.put(real)
            for parameters, name, version in held:  # of the weights, where several are in use
                parameters[name] = version
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def replaced_buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers in whose place a forward without numbers has put others."""
        return [(module, name) for module, name, copy in self._standing if module._buffers.get(name) is not copy]

    def choose(self, blocks: Sequence[nn.Module]) -> None:
        """Let `blocks` be the modules that tell whoever runs the forward that they are called."""
        for block, (name, forward) in zip(self.blocks, self._forwards, strict=True):
            vars(block)[name] = forward
        self.blocks = list(blocks)
        self._forwards = [("_compiled_call_impl", None) if _sees_ends(b) else ("forward", b.forward) for b in blocks]
        for block in self.blocks:
            self._wrap(block)

    def refuse_hooks(self) -> None:
        """Refuse modules around the blocks whose backward hooks would have to see what passes through several stages.

        Raises:
            ConfigError: there is one.
        """
        for module in self.module.modules():
            if _sees_ends(module) and module not in self.blocks and any(m in self.blocks for m in module.modules()):
                raise ConfigError(
                    f"model: a backward hook of {self.name_of(module)} would have to see what goes into the first of "
                    f"its blocks and comes out of the last; register it on a block, or on a module inside one"
                )

    def _wrap(self, block: nn.Module) -> None:
        # Backward hooks see what goes into a call and what comes out: they are inside of what is told.
        name = "_compiled_call_impl" if _sees_ends(block) else "forward"
        forward: Callable[..., Any] = block._call_impl if _sees_ends(block) else block.forward

        @wraps(forward)
        def told(*args: Any, **kwargs: Any) -> Any:
            # Without a run: backward computes a forward again, or the block is called inside another one.
            return forward(*args, **kwargs) if self.run is None else self.run.block(block, forward, args, kwargs)

        vars(block)[name] = told  # a compiled module would hand an attribute on to the module inside

    @contextmanager
    def inside_block(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Return a context in which the running forward sees neither torch functions nor blocks."""
        run, self.run = self.run, None
        if _get_current_function_mode() is not mode:
            raise ConfigError("model: calls its blocks under a torch function mode of its own, which cannot be cut")
        TorchFunctionMode.__exit__(mode, None, None, None)
        try:
            yield
        finally:
            TorchFunctionMode.__enter__(mode)
            self.run = run


def is_mark(func: Any) -> bool:
    """Tell whether a torch function is `torch.distributed.pipelining.pipe_split`."""
    return getattr(func, "_qualified_op_name", "") == "pippy::_pipe_split"


def _sees_ends(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _refuse_modules(modules: Iterable[tuple[str, nn.Module]], whole: str) -> None:
    """Refuse modules, by name, of which no copy with other weights can be made."""
    for name, module in modules:
        if module._compiled_call_impl is not None:
            raise ConfigError(
                f"model: {name or whole} was compiled with .compile(), which copies do not keep; "
                f"replace the block by torch.compile(block) instead"
            )
        if not name and type(module).__name__ == "OptimizedModule":
            raise ConfigError(
                "model: it is torch.compile of the whole, of which no part can run alone: pass the module itself, with "
                "torch.compile(block) in the places of its blocks"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"model: {name or whole} was made by torch.jit.script or trace, whose "
                f"weights cannot be exchanged; use the module itself, not scripted, or torch.compile of it"
            )
        if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None):
            refuse_lazy(module, name or whole)


def refuse_lazy(module: nn.Module, said: str) -> None:
    """Refuse parameters that get their shapes from the first batch: an optimizer needs them before.

    Raises:
        ConfigError: there is one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"model: {name} of {said} ({type(module).__name__}) has no shape before a first forward; run one, or "
                "use a layer whose sizes are given"
            )
