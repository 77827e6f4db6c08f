"""The form of calls: which parts of a batch a model and its loss function take, and where the loss is found."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..dependency import BatchError, ModelError
from ..workers.compute.modules.torch_internals import divisor_of
from ..workers.compute.result import NUM_ITEMS
from ..workers.compute.shard import LossFn
from ..workers.transport.payload import Tree


class CallForm:
    """Splits a batch into the arguments of a model's forward and of its loss function.

    Items of a dict are passed by the names of the forward's parameters, and the other items are the loss function's. If
    no item is named like a parameter, a forward with one required argument gets the whole dict. A tuple holds
    positional arguments. With a loss function, a pair for a model of one argument is (inputs, targets).
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._names = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}
        self._num_required = sum(p.default is p.empty for p in positional)
        self._most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
        self._second = positional[1].name if len(positional) > 1 else ""
        self._model = type(model).__name__
        self._takes_one = self._names is not None and self._num_required == 1
        self._has_labels = any(p.name == "labels" for p in parameters)
        self.loss_is_inside = loss_fn is None
        #: arguments that the model does not take: some of Hugging Face's models average, without `NUM_ITEMS`
        self._left_out = (NUM_ITEMS,) if getattr(model, "accepts_loss_kwargs", True) is False else ()
        self._wants_batch = False if loss_fn is None else _second_name(loss_fn) == "batch"

    def pair(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return ((args, kwargs) of the model, second argument of the loss function)."""
        batch = self._joined(batch)
        if self.loss_is_inside:
            self._refuse_pair(batch)
            return self.inputs(batch), None
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            inputs, targets = batch
            if isinstance(targets, Mapping) and isinstance(inputs, Mapping) and inputs.keys() == targets.keys():
                _refuse_two(min(inputs, default=""), not self.could_be_one(batch))
            if self._num_required <= 1 or isinstance(inputs, (Mapping, tuple, list)):
                return self.inputs(inputs), batch if self._wants_batch else targets
        return self.inputs(batch), dict(batch) if isinstance(batch, Mapping) else batch

    def could_be_one(self, given: Sequence[Any]) -> bool:
        """Return whether a list of containers of one form could be one batch, not several."""
        if self.loss_is_inside or len(given) != 2:
            return self.could_be_input(given)
        keys = given[0].keys() if isinstance(given[0], Mapping) else set()  # of inputs alone, or of whole batches
        return self._names is None or keys <= self._names or not keys & self._names

    def could_be_input(self, given: Sequence[Any]) -> bool:
        """Return whether a list of containers of one form could be the inputs of one batch."""
        is_named = isinstance(given[0], Mapping) and (self._names is None or bool(given[0].keys() & self._names))
        return self._num_required <= len(given) <= self._most and not is_named

    def _refuse_pair(self, batch: Tree) -> None:
        """Refuse (inputs, targets) for a model that takes its targets by the name `labels`, as Hugging Face's do."""
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)
        if is_pair and self._has_labels and self._second != "labels":
            why = f"is a pair, and {self._model} computes its loss itself: its second argument is {self._second}"
            fix = "pass a dict, such as {'input_ids': ids, 'labels': ids}, or a loss_fn of (output, targets)"
            raise ModelError(f"batch: {why}; {fix}")

    def pair_for_metric(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return the same for a metric; its second argument is the batch, or the targets that a loss function gets."""
        inputs, target = self.pair(batch)
        batch = self._joined(batch)
        return inputs, dict(batch) if isinstance(batch, Mapping) else batch if self.loss_is_inside else target

    def _joined(self, batch: Tree) -> Tree:
        """Merge a pair of dicts, as loaders return it, if the model computes its loss itself."""
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(x, Mapping) for x in batch)
        if is_pair and self.loss_is_inside and (self._names is None or {*batch[0], *batch[1]} & self._names):
            for name in batch[0].keys() & batch[1].keys():
                _refuse_two(name, batch[0][name] is not batch[1][name])
            return {**batch[0], **batch[1]}
        return batch

    def inputs(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return (args, kwargs) of the model."""
        if batch is None:
            raise ModelError("batch is None: every worker runs the forward of a whole model, so all need its inputs")
        batch = self._joined(batch)
        if isinstance(batch, Mapping):
            if self._takes_one and not batch.keys() & (self._names or set()):
                return (batch if isinstance(batch, dict) else dict(batch),), {}
            others_are_of_the_loss = not self.loss_is_inside and self._names is not None
            names = (self._names or set()) if others_are_of_the_loss else batch.keys()
            return (), {name: value for name, value in batch.items() if name in names and name not in self._left_out}
        return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _refuse_two(name: str, are_two: bool) -> None:
    if are_two:
        raise BatchError(f"batch: both dicts of a pair have {name!r}, so they are two batches; pass one at a time")


def _second_name(loss_fn: LossFn) -> str:
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return ""
    return [*signature.parameters, "", ""][1]


def loss_of_output(output: Any, target: Any = None) -> Tensor:
    """Return the loss in a model's output.

    Raises:
        ModelError: there is none.
    """
    found = output
    if isinstance(output, (tuple, list)):
        numbers = [part for part in output if isinstance(part, Tensor) and part.dim() == 0]
        first = output[0] if output else None
        # (logits, loss), as nanoGPT returns it, or (loss, logits)
        found = numbers[0] if len(numbers) == 1 and not _is_number(first) else first
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, (Tensor, tuple, list)):
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and _is_number(found):
        return found
    what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ModelError(f"model: returned {what} and no loss; pass a batch with labels, or a loss_fn of (output, batch)")


def adds_terms(loss: Tensor, items: Any) -> bool:
    """Return whether a loss may have terms beside a mean, or a sum that is divided by `items`.

    Its graph shows it: a division by `items`, or without these one loss of torch's, with nothing added behind it.
    """
    node: Any = loss.grad_fn
    while node is not None:
        if "Loss" in node.name() if items is None else divisor_of(node) == float(items):
            return False
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
