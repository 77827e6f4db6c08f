"""The observer of one forward: it records which operation reads which tensor.

Parameters are placeholders, so a value that depends on a parameter or a block has a shape and no data, and nothing
large is computed. Values of the microbatch's fields alone (masks, positions) are computed, so that the model may decide
by them. The record is a list of events in program order: calls of blocks, and of torch functions around them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...dependency import ConfigError, ModelError
from ...dependency.errors import first_sentence
from ...workers.compute.modules.torch_internals import OperatorMode
from .autograd_functions import is_of_function, taken_by_functions
from .frames import caller, checkpoint_frame, in_function, in_transform, lost, name_of, stale_view
from .observation import Depends, Event, Observation, SideEffect, Value
from .output_contract import alias_given

from .placeholder import (  # isort: skip
    ALIKE, LOOKS_AT_MASK, NEEDS_NUMBERS, Placeholder, PlaceholderFactory, draws_at_random, on_ones, on_shapes,
    random_like, storage_of, without_masks, written,
)  # fmt: skip
from .side_effects import LeftAttributes, boxes, contents, differ, fill, hooked, left_in, watching
from .skeleton import Skeleton, is_mark
from .trees import at, leaves, mapped, replaced, tensors

#: functions that read the data of a tensor without an operator
_DATA_ACCESS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
#: tests for numbers that are not finite, and functions that combine their results
_TESTS: dict[Any, bool] = {torch.isfinite: True, torch.isnan: False, torch.isinf: False}
_TESTS |= {Tensor.isfinite: True, Tensor.isnan: False, Tensor.isinf: False}
_COMBINING = {torch.all, torch.any, Tensor.all, Tensor.any}
#: larger tensors made from nothing in a block, such as masks, are placeholders
_LARGE_NUMEL = 2**20


logger = logging.getLogger(__name__)


class Observer(TorchFunctionMode):
    """Records a forward. While that runs it is the skeleton's `run`.

    Args:
        given: its (args, kwargs).
        left: id of each tensor that an earlier forward has left -> its name and the event that made it.

    Attributes:
        used: values of an earlier forward that were read, each with the reading event.
    """

    def __init__(self, skeleton: Skeleton, given: Any, left: Mapping[int, tuple[str, Event]] | None = None) -> None:
        super().__init__()
        self._left = left or {}
        self.used: list[tuple[tuple[str, Event], Event]] = []
        self._skeleton = skeleton
        self.events: list[Event] = []
        self.calls: list[Event] = []
        self.values: dict[int, Value] = {id(t): Value(t, Depends.FIELDS) for t in tensors(given)}
        self._fields = given
        self._given = list(self.values.values())
        self._params = {id(p): name for name, p in skeleton.parameters.items()}
        self._standing = [(buffer, name) for name, buffer in skeleton.module.named_buffers()]
        self._buffers = {id(buffer): name for buffer, name in self._standing}
        self._standing += [(parameter, name) for name, parameter in skeleton.parameters.items()]
        self._stored = {storage_of(tensor) for tensor, _ in self._standing}
        #: the event that runs now
        self.current: Event | None = None
        #: id of a tensor -> the event that made it; the tensors are kept alive, so that no id is reused
        self._made_by: dict[int, Event | None] = {}
        self._alive: list[Tensor] = []
        self._born = self._stored | {storage_of(value.tensor) for value in self._given}
        #: storage -> the last event that wrote it and depends on more than fields
        self._writer: dict[int, Event] = {}
        self._randoms = 0
        self._transforms: set[int] = set()
        #: id of a result of a test for finite numbers -> its value if all are finite
        self._healthy: dict[int, bool] = {}
        #: id of a frame of `checkpoint` -> number of the call, and the frame, kept so that no id is reused
        self._checkpoints: dict[int, tuple[int, FrameType]] = {}
        #: nodes of the graph behind the tensors so far
        self._nodes: set[Any] = set()
        #: id of a tensor with data that a block has used or made -> its placeholder
        self._meant: dict[int, Tensor] = {}
        inside = {inner for block in skeleton.blocks for inner in block.modules()}
        self._around = [module for module in skeleton.module.modules() if module not in inside]
        self._ops = _OperatorObserver(self, skeleton.placeholders)

    # --- around the blocks

    def __enter__(self) -> Observer:
        self._ops.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._ops.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is LOOKS_AT_MASK:
            return False
        kwargs = kwargs or {}
        if self._skeleton.marked and is_mark(func):
            return self._block(self._skeleton.mark, lambda: None, (), {})
        if in_transform():  # tensors are wrapped there; every stage runs it, on tensors that depend on fields alone
            self._transforms.add(len(self.events))
            return func(*args, **kwargs)
        event = self._begin(func=func, where=caller(), in_function=in_function(self._skeleton.codes))
        for tensor in tensors((args, kwargs)):
            self.read(event, tensor)
        self.current = event
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, NEEDS_NUMBERS):
                raise
            if func is Tensor.__bool__ and id(args[0]) in self._healthy:
                return self._presumed(event, self._healthy[id(args[0])])
            why = f"needs numbers that depend on parameters ({name_of(func)}: {first_sentence(error)})"
            fix = "keep such a decision inside a block, or name a module with it by blocks="
            raise ModelError(f"model: {event.where} {why}; {fix}") from None
        finally:
            self.current = None
        self._end(event, result)
        if func in _TESTS:
            self._healthy[id(result)] = _TESTS[func]
        elif func in _COMBINING and id(args[0]) in self._healthy:
            self._healthy[id(result)] = self._healthy[id(args[0])]
        return result

    def _presumed(self, event: Event, answer: bool) -> bool:
        """Return the result of a test of finite numbers, for stages without the numbers; the stage with them tests."""
        event.depends = max(self._depends(event))
        event.trees = [answer]
        event.presumed = answer
        return answer

    def _begin(self, **what: Any) -> Event:
        self._skeleton.followed.look()
        frame = checkpoint_frame()
        group = 0 if frame is None else self._checkpoints.setdefault(id(frame), (len(self._checkpoints) + 1, frame))[0]
        event = Event(len(self.events), len(self.calls), checkpoint=group, **what)
        self.events.append(event)
        return event

    def _end(self, event: Event, result: Any) -> None:
        event.trees = [result]
        if not tensors(result) and not event.writes and not event.is_hook:
            # A query of a tensor, such as its shape: every stage can ask its placeholder.
            # Answers that are bools may differ for the tensors that cross a cut (is_leaf).
            is_flag = isinstance(result, bool) and any(self._depends(event))
            if isinstance(result, (int, torch.Size, list)) and not is_flag:
                event.answer = result
            if event.computes or event.func in _DATA_ACCESS:
                event.asked, event.decides = set(event.reads), True
            event.reads.clear()
            event.params.clear()
        if event.params:
            event.depends = Depends.WEIGHTS
        event.depends = max([event.depends, *self._depends(event)])
        if event.depends is Depends.FIELDS:
            if isinstance(result, Tensor):
                event.answer = result.shape
        self._note_made(event)
        if event.random:
            event.random = self._randoms = self._randoms + 1

    def _read_by_functions(self, event: Event) -> None:
        for tensor in taken_by_functions(event.trees, self.values.values(), self._nodes):
            if any(id(tensor) in known for known in (self.values, self._params, self._buffers)):
                self.read(event, tensor)

    def _depends(self, event: Event) -> Iterator[Depends]:
        for value, version in event.reads:
            yield max(value.depends, self.events[version].depends if version >= 0 else Depends.FIELDS)

    def _note_made(self, event: Event) -> None:
        for tensor in tensors(event.trees):
            if any(id(tensor) in known for known in (self.values, self._params, self._buffers)):
                continue  # an input that is returned
            value = Value(tensor, event.depends, event.index)
            self.values[id(tensor)] = value
            self._born.add(storage_of(tensor))
            event.made.append(value)
        if event.depends:
            self._writer |= dict.fromkeys(event.writes, event)
        self._read_by_functions(event)

    # --- blocks

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward and record it as one event."""
        with self._skeleton.inside_block(self):
            return self._block(module, forward, args, kwargs)

    def _block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        event = self._begin(module=module, where=self._skeleton.name_of(module))
        event.depends = Depends.BLOCKS
        # torch.func.functional_call may have replaced parameters
        event.params = {self._params[id(p)] for p in module.parameters() if id(p) in self._params}
        # even if the forward does not use them, hooks may write them
        event.buffers = {self._buffers[id(b)] for b in module.buffers() if id(b) in self._buffers}
        held, attributes = boxes((args, kwargs)), LeftAttributes(module.modules(), self._around)
        watched = [(name, box, contents(box)) for name, box in self._skeleton.watched.items()]
        self.current = event
        try:
            with watching(hooked(module)) as calls:
                try:
                    result = forward(*args, **kwargs)
                except ConfigError:
                    raise
                except Exception as error:
                    # A block may decide by data of its tensors; with random data it shows its outputs' shapes.
                    logger.debug("block %s runs on random numbers, as it raised on shapes: %r", event.where, error)
                    calls.clear()
                    result = self._on_numbers(event, forward, args, kwargs)
            result = alias_given(result, lambda tensor: id(tensor) in self.values)
        finally:
            self.current = None
        seen = [(tree, SideEffect(inner)) for inner, tree in calls] + list(left_in(held))
        event.fills = [name for name, box, before in watched if differ(contents(box), before)]
        seen += attributes.left(partial(self._is_of, event), [result, *(tree for tree, _ in seen)])
        trees = self._on_shapes(event, [result, *(tree for tree, _ in seen)])
        # copies, since the model and later calls may change the lists and dicts
        event.trees, event.effects = mapped(trees, lambda tensor: tensor), [effect for _, effect in seen]
        self._note_made(event)
        self.calls.append(event)
        self._randoms = 0
        return trees[0]

    def _on_numbers(self, event: Event, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward again with random data, and record all of its inputs as read."""
        given = {id(tensor): tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, Placeholder)}
        for tensor in given.values():
            self.read(event, tensor)
        standing = {key: random_like(tensor) for key, tensor in given.items()}
        fakes = {name: self._skeleton.parameters[name] for name in event.params}
        self._skeleton.put({name: nn.Parameter(random_like(p), p.requires_grad) for name, p in fakes.items()})
        numbers = mapped((args, kwargs), lambda tensor: standing.get(id(tensor), tensor))
        try:
            result = forward(*numbers[0], **numbers[1])
        finally:
            self._skeleton.put(fakes)
        for path, box, _ in boxes((args, kwargs)):  # tensors that the block has put into the copies of containers
            fill(box, contents(at(numbers, path)))
        self._meant |= {id(number): given[key] for key, number in standing.items()}
        self._alive += standing.values()
        return self._with_meant(result)

    def _with_meant(self, tree: Any) -> Any:
        return replaced(tree, {path: self._meant[id(t)] for path, t in leaves(tree) if id(t) in self._meant})

    def _on_shapes(self, event: Event, trees: list[Any]) -> Any:
        """Return trees that a block leaves with placeholders for its tensors with data."""
        for tensor in tensors(trees):
            if not isinstance(tensor, Placeholder) and self._is_of(event, tensor) and id(tensor) not in self._meant:
                self._meant[id(tensor)] = self._skeleton.placeholders.like(tensor)
        return self._with_meant(trees)

    def made_by(self, tensor: Tensor) -> Event | None:
        return self._made_by.get(id(tensor))

    def _is_of(self, event: Event, tensor: Tensor) -> bool:
        return self._made_by.get(id(tensor)) is event and id(tensor) not in self.values

    # --- tensors

    def read(self, event: Event | None, tensor: Tensor) -> None:
        """Record that `event` reads `tensor`."""
        tensor = self._meant.get(id(tensor), tensor)
        key = id(tensor)
        if key in self._left:
            if event is not None:
                self.used.append((self._left[key], event))
            return
        if event is not None and self._made_by.get(key) is event and key not in self.values:
            return
        if event is not None and key in self._params:
            event.params.add(self._params[key])
        elif event is not None and key in self._buffers:
            event.buffers.add(self._buffers[key])
        if key in self._params or (key in self._buffers and storage_of(tensor) not in self._writer):
            return
        value = self.values.get(key)
        if value is None and (maker := self._made_by.get(key)) is not None and maker.is_block and event is not None:
            # A view of an output that the block made, returned by an operation in place.
            value = next((each for each in maker.made if storage_of(each.tensor) == storage_of(tensor)), None)
        if value is None:
            if (maker := self._made_by.get(key)) is not None or isinstance(tensor, Placeholder):
                raise lost(tensor, maker, self.current)
            if key in self._skeleton.views:
                raise stale_view(tensor)
            value = self.values[key] = Value(tensor, Depends.FIELDS)
            self._born.add(storage_of(tensor))
        if event is not None:
            writer = self._writer.get(storage_of(tensor))
            event.reads.add((value, max(value.made, writer.index if writer else -1)))

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator in the event that runs now."""
        event = self.current
        if event is not None:
            event.computes = True
            event.random |= draws_at_random(operator, kwargs)
            event.decides |= torch.Tag.dynamic_output_shape in getattr(operator, "tags", ())
            event.writes |= self._born & {storage_of(tensor) for tensor in written(operator, args, kwargs)}
        for tensor in tensors(result):
            # not the result of an operation in place
            if not any(id(tensor) in known for known in (self.values, self._params, self._buffers)):
                self._made_by.setdefault(id(tensor), event)
                self._alive.append(tensor)
                # writes to tensors that the event itself makes need not be recorded
                if event is None:
                    self._born.add(storage_of(tensor))

    def run(self, args: Any, kwargs: Any) -> Observation:
        """Run the model's forward; return the record."""
        with self._skeleton.reporting(self), self:
            output = self._skeleton.module(*args, **kwargs)
        return self._finish(output)

    def _finish(self, output: Any) -> Observation:
        event = self._begin(func="output", where="the output")
        event.depends = Depends.BLOCKS
        event.trees = [output]
        for tensor in tensors(output):
            self.read(event, tensor)
        self._read_by_functions(event)
        for value in self.values.values():  # torch makes a view of an input that a function returns, behind its forward
            if is_of_function(value.tensor) and not self.events[value.made].is_block:
                self.events[value.made].in_function = True
        changed = {storage for past in self.events for storage in past.writes}
        values = [value for past in self.events for value in past.made]
        found = Observation(self.events, values, self.calls, self._fields, transforms=self._transforms)
        found.fields_written = any(storage_of(value.tensor) in changed for value in self._given)
        found.stored = {storage_of(tensor): name for tensor, name in self._standing}
        found.exchanged = {name for tensor, name in self._standing if storage_of(tensor) not in self._stored}
        return found


class _OperatorObserver(OperatorMode):
    """A dispatch mode that sees every operator, also inside blocks."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer, factory: PlaceholderFactory) -> None:
        super().__init__()
        self._observer, self._placeholders = observer, factory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "higher_order":
            if func.name() != "flex_attention":
                what = f"model: {func.name()} of torch calls functions, which are not followed through stages"
                raise ModelError(f"{what}: leave it out, or give a list of layers")
            dense = next(made for key, made in func.py_kernels.items() if key.name == "CompositeExplicitAutograd")
            with self:  # its functions may read weights, so their operators are seen, too
                return dense(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        observer, given = self._observer, tensors((args, kwargs))
        # `torch.tensor` has just made the argument of lift_fresh from Python numbers: it is no input of an event.
        is_new = func is torch.ops.aten.lift_fresh.default and observer.current is not None
        for tensor in given if not is_new else ():
            observer.read(observer.current, tensor)
        in_block = observer.current is not None and observer.current.is_block
        try:
            if func is torch.ops.aten.index.Tensor and isinstance(args[0], Placeholder):
                args = (args[0], without_masks(args[1]))
            made = self._placeholders.construct(func, args, kwargs) if in_block and not given else None
            is_large = sum(tensor.numel() for tensor in tensors(made)) > _LARGE_NUMEL
            result = made if is_large else on_shapes(func, args, kwargs)
        except Exception as error:
            has_placeholder = any(isinstance(tensor, Placeholder) for tensor in given)
            if not has_placeholder or (isinstance(error, NEEDS_NUMBERS) and not in_block and func not in ALIKE):
                raise
            # Inside a block data may decide, and not every operator can run on shapes: ones show the output's shape.
            result = on_ones(func, args, kwargs, self._placeholders)
        observer.ran(func, args, kwargs, result)
        return result
