"""The state of a stage: what its forwards write, kept for each microbatch until its backward.

In one process a microbatch's backward comes before the next one's forward, so backward reads what its own forward has
left: averages that it moved, weights that it bounded, also by `.data`, which autograd does not see. In a pipeline other
forwards come between. So behind a forward the stage goes on with copies of what was written; the graph keeps the
memory, and backward gets it back, also for layers that it runs again (`torch.utils.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_pre_hook

from ...dependency import ConfigError
from .autocast import forget_casts
from .autograd_graph import children_first, packed
from .digest import few, imprint, sample
from .module_state import Attributes, equal
from .randomness import computing
from .slices import Slice
from .torch_internals import NormBase, set_version

#: so many forwards, and backwards that run layers again, are looked at
_LOOKS = 2


class _Value(NamedTuple):
    """A tensor with the memory that it had at a time."""

    tensor: Tensor
    data: Tensor
    version: int
    #: where a module has it, if it is a buffer
    module: nn.Module | None = None
    name: str = ""

    def put(self) -> None:
        self.tensor.data = self.data
        set_version(self.tensor, self.version)
        if self.module is not None:
            self.module._buffers[self.name] = self.tensor


class State(NamedTuple):
    """What a forward has left."""

    values: list[_Value]
    #: what modules have besides, if backward may run layers again
    attributes: Attributes | None

    def put(self) -> None:
        """Let the modules have this."""
        for value in self.values:
            value.put()
        if self.attributes is not None:
            self.attributes.put_back()


class StageState:
    """Finds out, by the first two forwards in training and when modes change, what forwards of a stage write.

    Args:
        slice: what computes. Of torch's own norms backward reads no running statistics.
        num_under_way: returns of how many microbatches the forward has run, but not all of the backward.
    """

    def __init__(self, slice: Slice, num_under_way: Callable[[], int]) -> None:
        self._slice = slice
        self._num_under_way = num_under_way
        self._modules = [module for module in slice.own if module._buffers and not isinstance(module, NormBase)]
        self._modes: list[bool] = []
        #: buffers that forwards write, as far as it is known
        self.buffers: list[tuple[nn.Module, str]] = []
        #: parameters that forwards write, as far as it is known
        self.weights: list[nn.Parameter] = []
        self._buffers_before: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
        self._weights_before: list[tuple[nn.Parameter, Tensor, int, Tensor]] = []
        self._in_full = True
        #: forwards still to be looked at
        self._looks = _LOOKS
        #: whether backward may run layers again; None: no graph has been seen yet
        self._reruns: bool | None = None
        #: where forwards change attributes of layers that may run again, and what these had behind the last one
        self._places: set[tuple[nn.Module, str]] = set()
        self._attributes: Attributes | None = None
        #: type of a layer that writes such state when it runs again, "" if there is none; None: not observed yet
        self._rewrites: str | None = None
        self._ran_again = False
        self._backwards = _LOOKS
        #: whether anything has to be done around a forward: nothing, once it is known that forwards write nothing
        self.watches = True

    def look_at_modes(self) -> None:
        """Look at the next forward if modules have other modes now, in which it may write something else."""
        if self._modes and self._modes != [module.training for module in self._modules]:
            self._looks, self.watches = _LOOKS, True

    def begin(self) -> None:
        """Look at what a forward that begins may write."""
        if self.weights:
            forget_casts()  # of what they were
        if not self._looks:
            return
        parameters = [p for _, p in self._slice.named_parameters() if p.layout is torch.strided]
        self._in_full = few(parameters)
        self._weights_before = [(p, p.data, p._version, self._seen(p)) for p in parameters]
        self._modes = [module.training for module in self._modules]
        held = [(m, name, b) for m in self._modules for name, b in m._buffers.items() if b is not None]
        self._buffers_before = [(m, n, b, b.clone(), b._version) for m, n, b in held if b.layout is torch.strided]

    def end(self, again: bool) -> list[_Value]:
        """Take note of what the forward has written, and go on with copies of it; return it.

        Args:
            again: whether the forward will be run again, or has been.

        Raises:
            ConfigError: it will be, and a parameter is not what it was computed from.
            ConfigError: it has written a parameter of which other stages hold copies.
        """
        if self._looks:
            self._looks -= 1
            self._note_written(again)
        left: list[_Value] = [_Value(weight, weight.data, weight._version) for weight in self.weights]
        for module, name in self.buffers:
            if (buffer := module._buffers.get(name)) is not None and buffer.grad_fn is None:
                left.append(_Value(buffer, buffer.data, buffer._version, module, name))
        for value in left:
            value.tensor.data = value.data.clone()
        return left

    def left(self, values: list[_Value], roots: Sequence[Tensor]) -> State | None:
        """Return what backward from `roots` needs of the forward that has ended; None: nothing."""
        if self._reruns is None and roots:
            self._reruns = _may_run_again(roots)
        attributes = None
        if self._reruns and (self._looks or self._places or self._attributes is not None):
            attributes = Attributes(self._slice.own, (), own=True)
            if self._attributes is not None:
                self._places |= self._attributes.changed_places(equal)
            self._attributes = attributes if self._looks else None
            attributes = attributes if self._looks or self._places else None
        self.watches = bool(self._looks or self.buffers or self.weights or (self._reruns and self._places))
        return State(values, attributes) if values or attributes is not None else None

    @contextmanager
    def shown(self, state: State | None, *, again: bool = False) -> Iterator[None]:
        """Return a context, on this thread alone, in which the stage holds what a forward has left.

        Args:
            again: whether a first part of the same backward has run so.

        Raises:
            ConfigError: on leaving it: backward wrote what other forwards should have read before.
        """
        if state is None or (again and self._rewrites):
            yield
            return
        with computing:
            now = self._now(state)
            state.put()
            looks = bool(self._reruns) and self._rewrites is None
            before = [value.data.clone() for value in state.values] if looks else []
            called: set[nn.Module] = set()
            handle = register_module_forward_pre_hook(lambda module, _: called.add(module)) if looks else None
            try:
                yield
            finally:
                if handle is not None:
                    handle.remove()
                    self._look_at_rewrites(state, before, called)
                if not self._rewrites:
                    now.put()
        if self._rewrites and self._num_under_way():
            raise ConfigError(
                f"a {self._rewrites} that a checkpoint computes again in backward changes what it holds: in one "
                "process it is computed again before the next microbatch's forward, in a pipeline behind it; take it "
                "out of the checkpoint, or leave the checkpoint out and let the schedule recompute "
                "(--set recompute=all)"
            )

    def _now(self, state: State) -> State:
        """Return what the stage holds now in the places of `state`."""
        held = [v.tensor if v.module is None else v.module._buffers[v.name] for v in state.values]
        values = [
            _Value(tensor, tensor.data, tensor._version, value.module, value.name)
            for tensor, value in zip(held, state.values, strict=True)
            if tensor is not None
        ]
        return State(values, None if state.attributes is None else state.attributes.now())

    def _look_at_rewrites(self, state: State, before: Sequence[Tensor], called: Collection[nn.Module]) -> None:
        now = self._now(state)
        pairs = zip(now.values, state.values, before, strict=True) if called else ()
        changed = [new.module for new, old, data in pairs if new.tensor is not old.tensor or not new.data.equal(data)]
        if state.attributes is not None and called:
            changed += [module for module, _ in state.attributes.changed_places(equal) if module in called]
        self._backwards -= 1
        self._ran_again |= bool(called)
        if not self._backwards:
            self._reruns = self._ran_again
        if changed or not self._backwards:
            self._rewrites = type(changed[0] or self._slice.own[0]).__name__ if changed else ""

    def _note_written(self, again: bool) -> None:
        # `.data` hides that what is there was written.
        buffers, weights = self._slice.expected_writes()
        written = [
            (module, name)
            for module, name, buffer, before, version in self._buffers_before
            if module._buffers.get(name) is buffer
            and (buffer._version != version or (module, name) in buffers or not torch.equal(buffer, before))
        ]
        self.buffers = list(dict.fromkeys((*self.buffers, *written)))
        # A limit that the first forward keeps may bind later. What an RNN moves for its device alone lies elsewhere.
        changed = [
            p
            for p, data, version, before in self._weights_before
            if (p._version != version and p.data_ptr() == data.data_ptr())
            or p in weights
            or not torch.equal(self._seen(p), before)
        ]
        self.weights = list(dict.fromkeys((*self.weights, *changed)))
        self._buffers_before, self._weights_before = [], []
        self._refuse_copied()
        if again and self.weights:
            shape = tuple(self.weights[0].shape)
            raise ConfigError(
                f"a layer writes its parameter of shape {shape} in its forward, which so cannot be recomputed; make it "
                "a buffer, or use a schedule that does not recompute"
            )

    def _refuse_copied(self) -> None:
        written, shared = set(self.weights), self._slice.shared
        for name in [name for name, p in self._slice.named_parameters() if p in written and name in shared]:
            raise ConfigError(
                f"model: a layer writes its parameter {name} in its forward, of which stages "
                f"{', '.join(map(str, shared[name]))} hold copies; choose a split that leaves it in one"
            )

    def _seen(self, parameter: nn.Parameter) -> Tensor:
        return imprint(parameter) if self._in_full else sample(parameter).clone()


def _may_run_again(roots: Sequence[Tensor]) -> bool:
    """Return whether backward calls Python functions, or unpacks what saved-tensor hooks of the user have packed."""
    nodes = children_first(root.grad_fn for root in roots if root.grad_fn is not None)
    return any(isinstance(node, BackwardCFunction) or any(map(_is_foreign, packed(node))) for node in nodes)


def _is_foreign(saved: Any) -> bool:
    return saved is not None and type(saved).__module__.startswith("torch.utils")
