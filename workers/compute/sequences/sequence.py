"""A stage that trains on slices of sequences: state from earlier slices for later ones, and the gradients that return.

Slice j of microbatch m has the index m*k + j. Its forward finds the state of slice j-1, such as keys and values.
The state enters as a leaf would, cut off from the graph of slice j-1. Backward runs from the last slice to the first; a
gradient that reaches the entered state is kept until the earlier slice's backward, and added there: the last slice's
first, the slice's last.

    forward   slice 0 ── leave ┄┄ enter ── slice 1 ── leave ┄┄ enter ── slice 2
    backward  slice 0 ──────── ┄┄ ──────── slice 1 ──────── ┄┄ ──────── slice 2

Both ends are nodes of the graph of their slice, so every kind of backward (in two parts, or after recomputation) runs
through them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....dependency import ConfigError
from ....dependency.action import split_slice
from ...transport.payload import Payload, Tree, distinct_tensors, map_tensors, tensors_of
from ..modules.borders import ForwardArgs
from ..modules.torch_internals import BatchNorm, no_view, without_torch_function
from .slice_check import NotedDraws, compare, refused
from .slices import Slice, has_own_state, note, output_alone, place_of_state


class SliceInput(NamedTuple):
    """The slice that a forward computes: the state of the slices before, its number, and the number of slices."""

    left: SliceState
    number: int
    total: int

    @property
    def is_last(self) -> bool:
        """Whether no slice follows it."""
        return self.number == self.total - 1


#: the slice that computes now; forwards of all threads take turns
_now: SliceInput | None = None


def current() -> SliceInput | None:
    """Return the slice that computes now; None: whole sequences do."""
    return _now


class SliceState:
    """State that slices of a microbatch pass to later ones on a stage."""

    def __init__(self) -> None:
        #: (module, number of the slice) -> its state
        self._states: dict[tuple[Hashable, int], _PassedState] = {}
        self._histories: dict[Hashable, _SliceHistory] = {}
        #: number of a slice -> where it begins and ends in its sequence, and the sequence's length
        self.places: dict[int, tuple[int, int, int]] = {}
        if "torch._dynamo" in sys.modules:  # it would take the gradients of states to be those at the time of tracing
            for name in ("enter", "leave", "join"):
                setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def enter(self, who: Hashable, number: int, near: Tree) -> Tree:
        """Return the state that slice `number` - 1 has left, for this one.

        Args:
            near: tensors that the state is used with: backward that reaches them must reach the state, too.
        """
        state, tensors = self._states[who, number - 1], list(tensors_of(near))
        if any(type(tensor) is not Tensor for tensor in tensors):  # a forward on shapes
            return map_tensors(state.tree, lambda t: tensors[0].new_zeros(t.shape, dtype=t.dtype))
        owing = [tensor for tensor in tensors if tensor.requires_grad]
        anchor = owing[0].flatten(0, 0).narrow(0, 0, 0) if owing else torch.zeros((), requires_grad=True)
        entered: Any = _Enter.apply(anchor, state, *state.trained) if state.trained else ()  # type: ignore[no-untyped-call]
        now = {id(tensor): new for tensor, new in zip(state.trained, entered, strict=True)}
        return map_tensors(state.tree, lambda tensor: now.get(id(tensor), tensor))

    @property
    def num_bytes(self) -> int:
        """Bytes that are stored for later slices."""
        states = (tensor for state in self._states.values() for tensor in tensors_of(state.tree))
        stored = (t.untyped_storage() for t in (*states, *(each.memory for each in self._histories.values())))
        return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())

    def leave(self, who: Hashable, number: int, output: Tree, tree: Tree) -> Tree:
        """Keep the state of slice `number` for the next; return the output, with a backward that reaches the state."""
        root = next((tensor for tensor in distinct_tensors(output) if tensor.requires_grad), None)
        trained = [] if root is None else [tensor for tensor in distinct_tensors(tree) if tensor.requires_grad]
        if (who, number) not in self._states:  # else it is computed again, and the next slice has taken it
            cut = {id(tensor): tensor.detach() for tensor in distinct_tensors(tree)}
            kept = map_tensors(tree, lambda tensor: cut[id(tensor)])
            self._states[who, number] = _PassedState(kept, [cut[id(tensor)] for tensor in trained])
        if not trained:
            return output
        tied = _Leave.apply(root, self._states[who, number], *trained)  # type: ignore[no-untyped-call]
        return map_tensors(output, lambda tensor: tied if tensor is root else tensor)

    def join(self, who: Hashable, new: Tensor, begin: int) -> Tensor:
        """Return the tensors of all slices so far, joined along the last dimension but one, `new` at the end.

        They are stored once: a later slice writes behind the part that earlier ones have saved for backward.

        Args:
            begin: where `new` begins.
        """
        history = self._histories.setdefault(who, _SliceHistory(new))
        joined: Tensor = _Join.apply(new, history, begin)  # type: ignore[no-untyped-call]
        return joined


class _PassedState:
    """The state of a slice: a tree of tensors without graph, the trained ones among them, and their gradients."""

    def __init__(self, tree: Tree, trained: list[Tensor]) -> None:
        self.tree, self.trained = tree, trained
        self.grads: Sequence[Tensor | None] = [None] * len(trained)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, state: _PassedState, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.state = state
        return tuple([no_view(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.state.grads = grads
        return None, None, *[None] * len(grads)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, state: _PassedState, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.state = state
        return no_view(root)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return grad, None, *ctx.state.grads


class _SliceHistory:
    """Memory that slices fill one behind the other, and the gradients of the earlier slices' parts."""

    def __init__(self, like: Tensor) -> None:
        self.memory = like.new_empty(0)
        self.grad: Tensor | None = None

    def put(self, new: Tensor, begin: int) -> Tensor:
        """Put `new` behind the first `begin` tokens; return all, to autograd neither a view nor written later."""
        new = new.movedim(-2, 0)  # tokens outermost, so that memory grows at its end only
        shape = begin + len(new), *new.shape[1:]
        storage = self.memory.untyped_storage()
        storage.resize_(max(storage.nbytes(), math.prod(shape) * new.element_size()))
        whole = torch.empty(shape, device="meta")  # for its strides
        seen = whole.movedim(0, -2)
        joined = self.memory.new_empty(0).set_(storage, 0, seen.shape, seen.stride())
        joined.movedim(-2, 0)[begin:].copy_(new)
        return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, history: _SliceHistory, begin: int) -> Any:
        ctx.history, ctx.begin = history, begin
        return history.put(new, begin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        history, begin = ctx.history, ctx.begin
        before, own = grad.narrow(-2, 0, begin), grad.narrow(-2, begin, grad.shape[-2] - begin)
        if history.grad is None:
            history.grad = before.clone()
        else:
            own = history.grad.narrow(-2, begin, own.shape[-2]) + own
            history.grad = history.grad.narrow(-2, 0, begin) + before
        return own, None, None


class StateCarrier:
    """Lets modules that have a state carry it from slice to slice: torch's recurrent ones, and the user's.

    A user's module has a parameter `state` of its forward, None at the first slice, and returns
    (output, state). A caller without a state need not know of slices.

    Args:
        modules: of the stage.
        layers: modules that are called with the output of the one before, and hand on their output alone.
        whole: the module that calls all modules; it may be called several times for a slice, on shapes first.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[nn.Module], whole: nn.Module | None) -> None:
        self._places = {module: place for module in modules if (place := place_of_state(module)) is not None}
        self._layers = {layer for layer in layers if not has_own_state(layer)}
        self._whole = whole if self._places else None
        self._num_calls: dict[nn.Module, int] = {}

    @contextmanager
    def carrying(self, piece: SliceInput | None) -> Iterator[None]:
        """Return a context that lets the modules compute a slice, or whole sequences."""
        global _now
        before, _now = _now, piece
        self._num_calls = {}
        calls = {module: partial(self._call, module, module.forward, *place) for module, place in self._places.items()}
        if self._whole is not None:
            calls[self._whole] = partial(self._begin, calls.get(self._whole, self._whole.forward))
        own = {module: vars(module).get("forward") for module in calls}
        for module, call in calls.items():
            vars(module)["forward"] = call
        try:
            yield
        finally:
            _now = before
            for module, forward in own.items():
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward

    def _begin(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._num_calls = {}
        return forward(*args, **kwargs)

    def _call(
        self, module: nn.Module, forward: Callable[..., Any], name: str, place: int, *args: Any, **kwargs: Any
    ) -> Any:
        piece, number = _now, self._num_calls.get(module, 0)
        self._num_calls[module] = number + 1
        if piece is not None and piece.number:
            with without_torch_function():
                kwargs[name] = piece.left.enter((module, number), piece.number, [args[:1], [*kwargs.values()][:1]])
            args = args[:place] + args[place + 1 :]
            if args[place:]:  # arguments behind a state that was passed by position
                args, kwargs = (*args[:place], kwargs.pop(name), *args[place:]), kwargs
        elif len(args) <= place:
            kwargs.setdefault(name, None)  # which a forward may have without a default
        output, state = forward(*args, **kwargs)
        on_shapes = any(type(tensor) is not Tensor for tensor in tensors_of(output))
        if piece is not None and not piece.is_last and not on_shapes:
            with without_torch_function():
                output = piece.left.leave((module, number), piece.number, output, state)
        return output if module in self._layers else (output, state)


def state_dropped(layer: nn.Module) -> nn.Module:
    """Let a layer with a state return its output alone, as in a list of layers that is trained by slices; return it."""
    if (place := place_of_state(layer)) is not None:
        forward = layer.forward

        layer.forward = lambda *args: output_alone(forward(*args, **{place[0]: None}))
    return layer


class SliceStore:
    """The state that slices leave on a shard; evaluations are of whole sequences.

    Args:
        count: of slices of a sequence.
    """

    def __init__(self, slice: Slice, count: int) -> None:
        self._count = count
        layers = [layer for _, layer in getattr(slice, "layers", [])]
        self._carrier = StateCarrier(slice.own, layers, None if layers else slice.modules[0])
        #: microbatch -> the state of its slices
        self._left: dict[int, SliceState] = {}
        #: arguments of the first microbatch's slices; None: it has been checked
        self._looked: list[ForwardArgs] | None = []
        #: sees whether these draw
        self._noting = NotedDraws()

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of all microbatches' slices here."""
        return sum(left.num_bytes for left in self._left.values())

    @contextmanager
    def checked(self, shard: Any, given: ForwardArgs) -> Iterator[None]:
        """Return a context for a forward; of the first microbatch's, the last one ends with the check.

        Args:
            shard: the `Shard` that holds this.
        """
        microbatch, number = split_slice(given.microbatch, self._count)
        if given.place is not None:
            self._left.setdefault(microbatch, SliceState()).places[number] = given.place
        if self._looked is not None and torch.is_grad_enabled() and given.microbatch == len(self._looked):
            copies = Payload([tensor.clone() for tensor in given.inputs.tensors], given.inputs.skeleton)
            self._looked.append(given._replace(inputs=copies))
        try:
            with self._noting if self._looked and torch.is_grad_enabled() else nullcontext():
                yield
        except Exception as error:
            if torch.is_grad_enabled():
                where = f"on a slice, one of {self._count}: slices cut dimension 1 of the batch's tensors as a sequence"
                note(error, f"{where}; leave slices out where it is none")
            raise
        if self._looked is not None and len(self._looked) == self._count:
            self._compare(shard, self._looked, given.step)
            self._looked = None

    def _compare(self, shard: Any, noted: Sequence[ForwardArgs], step: int) -> None:
        """Refuse layers that cannot be combined with slices, by a look at the first microbatch."""
        left, again = SliceState(), NotedDraws()
        left.places.update(self._left[0].places)

        def run(number: int | None, inputs: Tree, fields: Tree) -> Tree:
            if isinstance(inputs, tuple) and inputs and isinstance(inputs[-1], str):  # where it was made, once
                inputs = inputs[:-1]
            piece = None if number is None else SliceInput(left, number, self._count)
            with self._carrier.carrying(piece), again if drew else nullcontext():
                seed = partial(shard.randomness.seed_forward, step, number or 0)
                return shard.slice.forward(map_tensors(inputs, torch.clone), fields, seed)

        if any(isinstance(module, BatchNorm) and module.training for module in shard.slice.own):
            raise refused("takes means over whole sequences")
        drew = self._noting.found or shard.draws.found
        # Without draws, keep the modes of training, as a whole model was observed in them; its graph keeps no tensor.
        unsaved = saved_tensors_hooks(lambda tensor: tensor.new_empty(0), lambda tensor: tensor)
        how = torch.no_grad() if drew else unsaved
        if drew:
            shard.train(False)  # without dropout
        with shard.randomness.lock, shard.state.probe.before(whole_step=True).restored(), how:
            try:
                compare(noted, run, shard.loss_fn)
            except ConfigError as error:
                if again.found:
                    cause = "draws random numbers in evaluation, too, so its slices cannot be compared with the whole"
                    raise ConfigError(f"slices: a layer {cause}; let it draw in training alone") from error
                raise
        if drew:
            shard.train(True)

    def carrying(self, microbatch: int) -> AbstractContextManager[object]:
        """Return a context that lets modules compute a slice, or whole sequences to evaluate."""
        piece = None
        if torch.is_grad_enabled():
            of_sequences, number = split_slice(microbatch, self._count)
            piece = SliceInput(self._left.setdefault(of_sequences, SliceState()), number, self._count)
        return self._carrier.carrying(piece)

    def end(self, microbatch: int) -> None:
        """Drop the state of a microbatch's slices when the first one's backward is over."""
        of_sequences, number = split_slice(microbatch, self._count)
        if number == 0:
            del self._left[of_sequences]

    def forget(self) -> None:
        """Drop the state of all slices."""
        self._left.clear()
        self._looked = self._looked and []
