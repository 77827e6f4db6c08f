"""A copy of a model with placeholders for parameters; its blocks report their calls to the running forward.

The observer and the scripted forward run on skeletons. A stage puts its parameters into one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ...dependency import ModelError
from ...dependency.errors import first_sentence
from ...workers.compute.modules.borders import address
from ...workers.compute.modules.module_state import OF_TORCH, ModuleState
from ...workers.compute.modules.torch_internals import is_current
from ...workers.compute.parts.dividing import refuse_untied
from ...workers.compute.sequences.slices import Divide
from .closures import rebind
from .containers import Followed, shared
from .model_kinds import refuse_lazy
from .placeholder import Placeholder, PlaceholderFactory
from .trees import at, leaves, tensors

#: blocks that pipelines have compiled in their places
COMPILED: WeakSet[nn.Module] = WeakSet()
#: attributes through which a module is called
_CALLS = ("forward", "_compiled_call_impl")
#: name of a mark among the blocks
MARK = "pipe_split()"


class RunningForward(Protocol):
    """A running forward, as the blocks use it."""

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a call of a block; `forward` is the block's original one."""


class Skeleton:
    """A copy of a model's modules with placeholders for parameters, by the model's names.

    Args:
        model: not changed; its buffers are copied.
        device: device of placeholders and copied buffers.
        own: modules of the model to be used themselves, with their contents, in place of copies.
        follows: whether the copies refer to the model's containers and configurations that forwards only read.

    Raises:
        ModelError: the model cannot be copied.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, own: Sequence[nn.Module] = (), *, follows: bool = False
    ) -> None:
        self.placeholders = PlaceholderFactory()
        self.device = device
        #: by id, copies of views of trained weights in attributes, which updates do not reach
        self.views: dict[int, Tensor] = {}
        theirs = {part for module in own for part in module.modules()}
        memo: dict[int, Any] = {id(module): module for module in own}
        kept = shared(module for module in model.modules() if module not in theirs) if follows else {}
        self.module = self._copied(model, memo, kept)
        modules = list(self.module.named_modules())
        self.followed = Followed([made for _, made in modules if made not in theirs], set(map(id, kept.values())))
        #: name in the unsplit model (the first, if it has several) -> the present parameter
        self.parameters: dict[str, nn.Parameter] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        #: name -> (list or dict that also holds the parameter, index or key)
        self._in_containers: dict[str, list[tuple[Any, Any]]] = {}
        self._names: dict[int, str] = {id(module): name for name, module in modules}
        self._note_places(modules)
        self._fakes = {name: memo.get(id(parameter), parameter) for name, parameter in self.parameters.items()}
        #: the modules that report their calls to the running forward
        self.blocks: list[nn.Module] = []
        #: the block of calls of torch's `pipe_split()`, which count as calls of an empty block if `marked`
        self.mark = nn.Identity()
        self.marked = False
        self._names[id(self.mark)] = MARK
        #: the codes that have run in observations, for `in_function`
        self.codes: dict[Any, bool] = {}
        #: containers that the loss function refers to, by name
        self.watched: dict[str, Any] = {}
        #: the running forward; None: blocks run by themselves
        self.run: RunningForward | None = None
        #: copies of buffers that are in use during `with_placeholders`
        self._buffer_copies: list[tuple[nn.Module, str, Tensor]] = []
        #: modules with attributes that a forward has changed
        self.counting: set[nn.Module] = set()
        #: buffers that a forward has replaced by other tensors
        self.exchanged: dict[tuple[nn.Module, str], None] = {}
        #: hooks that divide blocks over members of a worker, which do not run on shapes
        self.of_members = Hooks(())

    def _copied(self, model: nn.Module, memo: dict[int, Any], kept: dict[int, Any]) -> nn.Module:
        modules = list(model.named_modules())  # once, since it is slow
        _refuse_modules(modules, type(model).__name__)
        trained = {address(parameter) for parameter in model.parameters() if parameter.requires_grad}
        for _, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in memo:
                    memo[id(parameter)] = self.placeholders.parameter_like(parameter, self.device)
            for value in vars(module).values():
                # Empty containers of hooks take most of the time of a deepcopy; it refuses tensors that every forward
                # computes, as weight_norm does.
                if type(value) in (OrderedDict, set) and not value:
                    memo[id(value)] = type(value)()
                elif type(value) in (Tensor, list, dict, tuple):
                    for tensor in tensors(value):
                        is_view = address(tensor) in trained and not isinstance(tensor, nn.Parameter)
                        if is_view or not tensor.is_leaf:
                            memo[id(tensor)] = made = tensor.detach().clone()
                            self.views |= {id(made): made} if is_view else {}
        memo |= kept
        fill = rebind([module for _, module in modules if id(module) not in memo], memo)
        try:
            whole = copy.deepcopy(model, memo)
            fill()
            fill_padding(each for (_, old), each in zip(modules, whole.modules(), strict=True) if each is not old)
            return whole
        except (TypeError, RuntimeError) as error:
            why = f"cannot be copied ({first_sentence(error)}); pass what makes it"
            raise ModelError(f"model {type(model).__name__}: {why}") from None

    def _note_places(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Move buffers to the device; record the holders of parameters, and the names there."""
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
                    self._note_container(value, names)

    def path_of(self, module: nn.Module) -> str:
        """Return a module's name in the model; "" for the model itself."""
        return self._names[id(module)]

    def name_of(self, module: nn.Module) -> str:
        """Return a module's name for messages."""
        return self.path_of(module) or type(module).__name__

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that has a parameter or buffer, and its name there."""
        module, _, attribute = name.rpartition(".")
        return self.module.get_submodule(module), attribute

    def put(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replace parameters, by name."""
        for name, parameter in parameters.items():
            for module, attribute in self._places[name]:
                setattr(module, attribute, parameter)
            for held, key in self._in_containers.get(name, ()):
                held[key] = parameter
            self.parameters[name] = parameter

    def divide(
        self, blocks: Iterable[nn.Module], names: Collection[str], make: Callable[[Iterable[str]], None], divide: Divide
    ) -> None:
        """Make the parameters of a stage, and divide its blocks at once; modules around them stay whole.

        Args:
            names: of the stage's parameters.
            make: puts parameters into their places, by name.
        """
        hooks, left = Hooks(self.module.modules()), dict.fromkeys(names)
        # By number: a name must not keep a whole parameter.
        numbered = {name: id(p) for name, p in self.module.named_parameters(remove_duplicate=False)}
        for block in dict.fromkeys(blocks):
            inside = set(block.parameters())
            now = [name for name in left if self.parameters[name] in inside]
            del inside
            make(now)
            divide(block, self.path_of(block), self.module)
            for name in now:
                del left[name]
                self.parameters[name] = self.module.get_parameter(name)
        make(left)
        self.of_members = hooks.added()
        refuse_untied(numbered, dict(self.module.named_parameters(remove_duplicate=False)))

    def _note_container(self, held: Any, names: dict[int, str]) -> None:
        for path, tensor in leaves(held):
            inside = at(held, path[:-1])
            if id(tensor) in names and type(inside) in (list, dict):
                self._in_containers.setdefault(names[id(tensor)], []).append((inside, path[-1][1]))

    @contextmanager
    def with_placeholders(self) -> Iterator[ModuleState]:
        """Return a context with placeholders for all parameters, and copies of all buffers, which a forward may write.

        Attributes that change in it, such as counters, are restored; it yields their state before.
        """
        real = {name: p for name, p in self.parameters.items() if not isinstance(p, Placeholder)}
        for name, parameter in real.items():
            self._fakes[name].requires_grad_(parameter.requires_grad)
        buffers = [(m, n, b) for m in self.module.modules() for n, b in m._buffers.items() if b is not None]
        places = [(module._parameters, attribute) for name in real for module, attribute in self._places[name]]
        held = [(parameters, name, parameters[name]) for parameters, name in places if name in parameters]
        self.put({name: self._fakes[name] for name in real})
        self.of_members.swap()
        copies = {id(buffer): buffer.clone() for _, _, buffer in buffers}
        for module, name, buffer in buffers:
            module._buffers[name] = copies[id(buffer)]
        self._buffer_copies = [(module, name, copies[id(buffer)]) for module, name, buffer in buffers]
        before = ModuleState(self.module.modules(), numbers=False)
        try:
            yield before
        finally:
            self.counting |= {module for module, _ in before.changed_attributes()}
            self.followed.look()
            before.put_back()
            self._buffer_copies = []
            self.of_members.swap()
            self.put(real)
            for parameters, name, version in held:  # of the weights, where several are in use
                parameters[name] = version
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def replaced_buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that the forward in `with_placeholders` has replaced."""
        return [(module, name) for module, name, copy in self._buffer_copies if module._buffers.get(name) is not copy]

    @contextmanager
    def reporting(self, run: RunningForward | None) -> Iterator[None]:
        """Return a context that lets blocks report their calls to `run`, which may be set later; then undo it."""
        self.run = run
        undo = [wrap(block, partial(self._reported, block)) for block in self.blocks]
        try:
            yield
        finally:
            self.run = None
            for each in undo:
                each()

    def _reported(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Without a running forward the block is called inside another block.
        return forward(*args, **kwargs) if self.run is None else self.run.block(block, forward, args, kwargs)

    def refuse_hooks(self) -> None:
        """Refuse backward hooks of modules that contain blocks of several stages.

        Raises:
            ModelError: there is such a module.
        """
        for module in self.module.modules():
            is_around = module not in self.blocks and any(m in self.blocks for m in module.modules())
            if is_around and (module._backward_hooks or module._backward_pre_hooks):
                raise ModelError(f"model: a backward hook of {self.name_of(module)} sees several stages; hook a block")

    @contextmanager
    def inside_block(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Return a context without reports of torch functions and blocks."""
        run, self.run = self.run, None
        if not is_current(mode):
            raise ModelError("model: calls its blocks under a torch function mode of its own, which cannot be cut")
        TorchFunctionMode.__exit__(mode, None, None, None)
        try:
            yield
        finally:
            TorchFunctionMode.__enter__(mode)
            self.run = run


class Hooks:
    """Forward hooks of modules, to be swapped with the hooks that the modules have at another time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = [table for m in modules for table in (m._forward_hooks, m._forward_pre_hooks)]
        self._held: list[tuple[dict[int, Any], dict[int, Any]]] = [(table, dict(table)) for table in tables]

    def added(self) -> Hooks:
        """Return the held hooks of the modules that have other hooks now."""
        found = Hooks(())
        found._held = [(table, held) for table, held in self._held if table.keys() != held.keys()]
        return found

    def swap(self) -> None:
        """Put back the hooks that are held, and hold the replaced ones."""
        for number, (table, held) in enumerate(self._held):
            self._held[number] = table, dict(table)
            table.clear()
            table.update(held)


def is_mark(func: Any) -> bool:
    """Return whether a torch function is `torch.distributed.pipelining.pipe_split`."""
    return getattr(func, "_qualified_op_name", "") == "pippy::_pipe_split"


def wrap(block: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Let `around(call, *args, **kwargs)` run in place of each call of a block; return the function that undoes it.

    The call includes the hooks of the block, also the ones that the model registers in its first forward: they may need
    numbers, and a stage may end with the call. A model may also call the block's `forward`, past its hooks.
    """
    held = vars(block)  # setattr on a compiled module would set the attribute of the module inside
    before = {name: held[name] for name in _CALLS if name in held}
    if (compiled := block._compiled_call_impl) is None:
        calls = {"forward": block.forward, "_compiled_call_impl": block._call_impl}
    else:  # it runs the block's forward, and would be compiled again for another one
        calls = {"_compiled_call_impl": compiled}
    for name in calls:
        held[name] = partial(around, calls[name])
        held[name].__wrapped__ = calls[name]  # models ask for the signature of a forward

    def undo() -> None:
        for name in _CALLS:
            held.pop(name, None)
        held.update(before)

    return undo


def _refuse_modules(modules: Iterable[tuple[str, nn.Module]], whole: str) -> None:
    """Refuse modules that cannot be copied with other weights; `modules` are (name, module)."""
    for name, module in modules:
        if module in COMPILED:  # by an earlier pipeline of this model; this one decides anew
            module._compiled_call_impl = None
        if module._compiled_call_impl is not None:
            raise ModelError(f"model: {name or whole} was compiled in its place; pass compile=True, or compile blocks")
        if not name and type(module).__name__ == "OptimizedModule":
            raise ModelError("model: is torch.compile of the whole; pass the module, and torch.compile its blocks")
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ModelError(f"model: {name or whole} was made by torch.jit, whose weights stay; pass the module")
        if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None):
            refuse_lazy(module, name or whole)


def fill_padding(modules: Iterable[nn.Module]) -> None:
    """Let the encoders among modules put 0 in the place of padding where torch would, if they run in stages."""
    for module in modules:
        if isinstance(module, nn.TransformerEncoder) and "forward" not in vars(module):
            if type(module).forward is nn.TransformerEncoder.forward:
                vars(module)["forward"] = partial(_encode, module)


def _encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    first, padding = encoder.layers[0], src_key_padding_mask
    if (
        padding is None
        or mask is not None
        or not torch.overrides.has_torch_function((src,))  # as where blocks run by themselves
        or not (encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled())
        or first.training
        or src.dim() != 3
        or torch.is_autocast_enabled()
        or (torch.is_grad_enabled() and any(each.requires_grad for each in (src, *first.parameters())))
    ):
        return nn.TransformerEncoder.forward(encoder, src, mask, padding, is_causal)
    masked = padding if padding.dtype is torch.bool else padding != 0
    if encoder.mask_check:  # torch keeps padding that is not at the end
        masked = masked & (masked[:, 1:] | ~masked[:, :-1]).all()
    norm, encoder.norm = encoder.norm, None
    try:
        found = nn.TransformerEncoder.forward(encoder, src, mask, padding, is_causal)
    finally:
        encoder.norm = norm
    found = found.masked_fill(masked[:, :, None], 0.0)
    return found if norm is None else norm(found)
