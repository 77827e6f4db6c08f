"""Layers that backward runs again (`torch.utils.checkpoint`) and that have state, which a pipeline must refuse.

In one process the backward of a microbatch comes before the next forward; in a pipeline other forwards come between.
A layer that counts or moves an average when it is run again does so too late for those forwards, and one that reads an
average then reads what those forwards have made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...dependency import ConfigError
from ..transport.payload import tensors_of
from .autocast import Casts
from .autograd_graph import children_first, packed
from .borders import version_of
from .inner_state import OF_TORCH, Place
from .module_state import ModuleState, equal
from .randomness import computing
from .sharing import address
from .torch_internals import OperatorMode
from .written import Written


class Reruns:
    """Observes in the first backwards whether there are such layers, and refuses them.

    Args:
        modules: the modules of the stage.
        others: containers of the microbatches whose forward has run, but not all of their backward.
        written: what forwards write in place.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Sized], written: Written) -> None:
        self._modules, self._others, self._written = modules, others, written
        #: whether backward may run layers again; None: no graph has been seen yet
        self._may_be: bool | None = None
        #: modules that write state in backward, or read there what forwards write; None: not observed yet
        self._writers: list[nn.Module] | None = None
        #: until observed: values of attributes after the last forward, and the attributes that it changed
        self._held: Mapping[Place, tuple[Tensor | None, float]] = {}
        self._moved: list[Place] = []
        self._num_forwards = 0

    @property
    def watches(self) -> bool:
        """Whether forwards are to be looked at: until the first backwards have been."""
        return self._may_be is not False and self._writers is None and torch.is_grad_enabled()

    def forwarded(self) -> None:
        """Record the numbers and tensors in attributes after a forward."""
        now = {
            (module, name): (value, version_of(value)) if isinstance(value, Tensor) else (None, value)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, (int, float, Tensor)) and name not in OF_TORCH
        }
        pairs = [(place, state, self._held.get(place, state)) for place, state in now.items()]
        self._moved = [place for place, new, old in pairs if new[0] is not old[0] or new[1] != old[1]]
        self._held, self._num_forwards = now, self._num_forwards + 1

    def backward(
        self, casts: Casts, roots: Sequence[Tensor], *, of_inputs: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which a backward runs, on this thread alone.

        Args:
            roots: what it starts from, unless it is that of the weights alone.
            of_inputs: whether that of the weights comes later.

        Raises:
            ConfigError: on leaving it: this backward wrote state that other forwards should have read before.
        """
        if self._may_be is None:
            self._may_be = _may_run_again(roots)
            if not self._may_be:
                self._held = {}
        if self._may_be:
            return self._watched(casts, of_inputs)
        return casts.backward()

    @contextmanager
    def _watched(self, casts: Casts, of_inputs: bool) -> Iterator[None]:
        with computing, casts.backward() if self._writers is not None else self._looking(casts, of_inputs):
            yield
        if self._writers and any(map(len, self._others)):
            raise ConfigError(
                f"a {type(self._writers[0]).__name__} that a checkpoint computes again in backward changes what it "
                "holds, then or in its forward: in one process it is computed again before the next microbatch's "
                "forward, in a pipeline behind it; take it out of the checkpoint, or leave the checkpoint out and let "
                "the schedule recompute (--set recompute=all)"
            )

    @contextmanager
    def _looking(self, casts: Casts, of_inputs: bool) -> Iterator[None]:
        own = set(self._modules)
        called: set[nn.Module] = set()

        def note(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and module in own:  # hooks of gradients run without
                called.add(module)

        module_state = ModuleState(self._modules)
        reads, takes = _Reads(self._modules, self._written), _Takes(self._moved)
        handle = register_module_forward_pre_hook(note)
        try:
            with casts.backward(), reads if reads.moved else nullcontext(), takes if takes.moved else nullcontext():
                yield
        finally:
            handle.remove()
        # State that only gradient hooks write is allowed. Modules that ran again are those called, the modules that
        # contain them, and their submodules.
        again = {part for module in called for part in module.modules()}
        again |= {module for module in self._modules if not called.isdisjoint(module.modules())}
        changed = [module for module in module_state.changed(equal) if module in again]
        # A checkpoint stops as soon as everything that backward needs is saved: what the layer moves after that is read
        # but not moved again, and the tensor that is saved last is read by no operator.
        moved = set(self._written.weights or ())
        changed += [module for module in again if not moved.isdisjoint(module._parameters.values())]
        changed += [module for module, _ in self._written.buffers if module in called]
        changed += [module for module, name in self._moved if module in called and self._held[module, name][0] is None]
        changed += reads.found + takes.found
        self._writers = changed or (None if of_inputs or self._num_forwards < 2 else [])
        self._may_be = self._writers != []
        if self._writers is not None:
            self._held = {}


class _Reads(OperatorMode):
    """Finds modules whose state, written by forwards, is read by operators that backward runs again.

    Attributes:
        moved: address of a tensor that forwards write -> the module that holds it.
    """

    def __init__(self, modules: Sequence[nn.Module], written: Written) -> None:
        super().__init__()
        weights, held = set(written.weights or ()), [(m, m._buffers.get(name)) for m, name in written.buffers]
        held += [(module, weight) for module in modules for weight in module._parameters.values() if weight in weights]
        self.moved = {address(tensor): module for module, tensor in held if tensor is not None}
        self.found: list[nn.Module] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():  # backward's own operators run without
            given = map(address, tensors_of((tuple(args), kwargs or {})))
            self.found += [self.moved[at] for at in given if at in self.moved]
        return func(*args, **(kwargs or {}))


class _Takes(TorchFunctionMode):
    """The same for tensors in plain attributes, seen before autograd saves them, which may end the checkpoint.

    Tensors are known by identity: others with equal values may be inputs of the checkpoint.

    Args:
        places: attributes that forwards replace.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        held = [(module, vars(module).get(name)) for module, name in places]
        self.moved = {tensor: module for module, tensor in held if isinstance(tensor, Tensor)}
        self.found: list[nn.Module] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():
            self.found += [self.moved[t] for t in tensors_of((tuple(args), kwargs or {})) if t in self.moved]
        return func(*args, **(kwargs or {}))


def _may_run_again(roots: Sequence[Tensor]) -> bool:
    """Return whether backward calls Python functions, or unpacks what saved-tensor hooks of the user have packed."""
    nodes = children_first(root.grad_fn for root in roots if root.grad_fn is not None)
    return any(isinstance(node, BackwardCFunction) or any(map(_is_foreign, packed(node))) for node in nodes)


def _is_foreign(saved: Any) -> bool:
    return saved is not None and type(saved).__module__.startswith("torch.utils")
