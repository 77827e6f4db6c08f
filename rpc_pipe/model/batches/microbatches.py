"""A user's batch, split into microbatches, and their tokens without padding, where a mask or labels show it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...dependency import Action, BatchError, Spec
from ...dependency.errors import first_sentence
from ...dependency.versions import summed_update
from ...workers.compute.modules.digest import describe
from ...workers.compute.result import IGNORED as IGNORED
from ...workers.compute.result import NUM_ITEMS
from ...workers.step import StepData
from ...workers.transport.payload import Tree, named_leaves, shapes_in, split_rows, tensors_of


class SomeRows(Protocol):
    """A choice of rows of each batch."""

    def of(self, rows: int, begin: int, /) -> list[int]:
        """Return the rows, of a batch of `rows` rows from position `begin` on."""


class LazyBatch:
    """A batch that every worker can name without reading it."""

    #: number of rows
    rows: int
    #: names the rows and their source; must be equal on all workers
    label: str
    #: whether only the worker of the first stage can read it; other workers pull the parts that they use
    scattered: bool = False
    #: the wait of its last reader, in ns, and the cause: disk, network or decode
    waited_ns: int = 0
    waited_for: str = ""

    def read(self, inputs: bool, targets: bool, own: SomeRows | None = None) -> tuple[Tree, Tree]:
        """Return the wanted ones of (inputs, targets), only the rows `own`; None for the unwanted."""
        raise NotImplementedError

    def follow(self) -> None:
        """Announce that `finished` will be called, unless the call with the batch fails."""

    def finished(self) -> None:
        """Announce that every worker has finished the call with the batch."""


def label_of(batch: object) -> str:
    """Return the label of a lazy batch; "" for any other."""
    return batch.label if isinstance(batch, LazyBatch) else ""


class TokenCount(NamedTuple):
    """The tokens of a batch; 0 if its inputs are not whole numbers."""

    tokens: int = 0
    #: whether padding counts too, because neither a mask nor labels show it
    with_padding: bool = False


def count_tokens(inputs: Sequence[Tree], targets: Sequence[Tree]) -> TokenCount:
    """Return the tokens of a batch, given in one or several parts.

    Microbatches that another replica reads are known by shape alone. Their share of padding is taken from the rest.
    No device is waited for: tensors there count whole.
    """
    total = seen = real = 0
    for each, target in zip(inputs, targets, strict=True):
        first = next(tensors_of(each), None)
        if first is None or first.is_floating_point() or first.is_complex():
            return TokenCount()
        total += first.numel()
        marks = _marks(each, target, first.shape)
        if marks is not None:
            seen += first.numel()
            real += int(marks.count_nonzero())
    return TokenCount(round(total * real / seen) if seen else total, not seen)


def _marks(inputs: Tree, target: Tree, shape: torch.Size) -> Tensor | None:
    """Return a tensor of the shape of the tokens that is 0 at padding; None if there is none on the host."""
    mask = dict(named_leaves([inputs, target])).get("attention_mask")
    for found, is_mask in (mask, True), (labels_of(inputs, target), False):
        if isinstance(found, Tensor) and found.shape == shape and found.is_cpu and not found.is_floating_point():
            return found if is_mask else found != IGNORED
    return None


def labels_of(inputs: Tree, target: Tree) -> Any:
    """Return the labels of a microbatch: the target itself, or what has this name; None if nothing has."""
    return target if isinstance(target, Tensor) else dict(named_leaves([inputs, target])).get("labels")


#: splits a batch into (inputs, targets)
Pair = Callable[[Tree], tuple[Tree, Tree]]


class SplitBatch(list[Tree]):
    """A batch that is split already: a list of microbatches; shapes may differ."""


@dataclass(frozen=True)
class Microbatches(StepData):
    """The microbatches of one batch. A share is 1 where the model only divides by `NUM_ITEMS`."""

    targets: list[Tree]
    #: shapes and digests of inputs and targets, which are compared between workers
    described: tuple[str, str] = "", ""
    #: describes the batch as it is when this is called; None: it is a lazy one
    now: Callable[[], tuple[str, str]] | None = None
    #: the lazy batch that they were read from; None: the user passed the batch itself
    lazy: LazyBatch | None = None
    #: (rows, length) of each, if all workers know these without reading
    sizes: list[tuple[int, int]] | None = None
    #: returns them with the rows that this worker runs now, where workers may have died since; None: all were read
    now_read: Callable[[], Microbatches] | None = None

    @classmethod
    def of(
        cls, batch: Tree | None, microbatches: Sequence[Tree] | None, num_microbatches: int, number: int, pair: Pair
    ) -> Microbatches:
        """Split `batch` into at most `num_microbatches`, or take the microbatches that the user has split.

        Args:
            number: number of calls so far; it selects the tensors that are compared between workers.
            pair: makes (inputs, targets) of a batch.

        Raises:
            BatchError: neither was given, or it has no rows.
        """
        if (batch is None) == (microbatches is None):
            raise BatchError("batch: pass one, or else microbatches=, a list of such")
        if isinstance(batch, SplitBatch):
            microbatches = batch
        if microbatches is not None:
            if not isinstance(microbatches, Sequence) or not microbatches:
                raise BatchError("microbatches: must be a list of at least one batch")
            all_inputs, all_targets = map(list, zip(*map(pair, microbatches), strict=True))
            batch = all_inputs, all_targets
        else:
            given, (inputs, targets) = batch, pair(batch)
            batch = inputs, targets
            # A worker may have been given inputs or targets only.
            whole = inputs if targets is None else targets if inputs is None else (inputs, targets)
            try:
                num = _num_rows(whole) if num_microbatches > 1 else rows_in(whole)
                parts = min(num_microbatches, max(1, num))
                if parts > 1:
                    refuse_lists(whole, num, given)
                    _refuse_packed(given, inputs, targets, num)
                all_inputs, all_targets = (split_rows(side, parts, num) for side in (inputs, targets))
            except RuntimeError as error:  # sparse and nested tensors
                raise BatchError(f"batch: {first_sentence(error)}; pass microbatches=, a list of batches") from error
        rows = [rows_in(t if x is None else x) for x, t in zip(all_inputs, all_targets, strict=True)]
        if 0 in rows:
            which = f"microbatch {rows.index(0)}" if len(rows) > 1 else "the batch"
            raise BatchError(f"{which} has no rows: needs at least 1, in tensors that each worker gets")
        sides = batch

        def now() -> tuple[str, str]:
            return describe(sides[0], number), describe(sides[1], number)

        shares = shares_of(rows, all_inputs[0], all_targets[0])
        tokens = count_tokens(*(batch if microbatches is not None else ([batch[0]], [batch[1]])))
        return cls(all_inputs, all_targets, shares, sum(rows), *tokens, described=now(), now=now)

    @property
    def num_items(self) -> float | None:
        """The `NUM_ITEMS` that divides a whole model's loss; None: it takes a mean."""
        for inputs, target, share in zip(self.inputs, self.targets, self.shares, strict=True):
            if divides_sums(inputs, target) and not getattr(inputs[1][NUM_ITEMS], "is_meta", False):
                return float(inputs[1][NUM_ITEMS]) / share
        return None

    @property
    def first(self) -> tuple[Tree, Tree]:
        """Inputs and targets of the first one."""
        return self.inputs[0], self.targets[0]

    def read_now(self) -> Microbatches:
        """Return these microbatches as this worker reads them now."""
        return self if self.now_read is None else self.now_read()

    def finished(self) -> None:
        """Inform the lazy batch's loader that the call with it has ended."""
        if self.lazy is not None:
            self.lazy.finished()


def refuse_lists(tree: Tree, rows: int, given: Any) -> None:
    """Refuse a list with an item for each row, such as strings, which every microbatch would get whole.

    Args:
        given: the user's batch, which names the list's place.

    Raises:
        BatchError: there is one.
    """
    if not isinstance(tree, (list, tuple, dict)) or isinstance(tree, torch.Size):
        return
    if isinstance(tree, dict) or any(tensor.dim() and tensor.shape[0] == rows for tensor in tensors_of(tree)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            refuse_lists(part, rows, given)
    elif len(tree) == rows > 2 and any(part is not None for part in tree):
        why = f"a {type(tree).__name__} of {rows} beside {rows} rows would go whole to every microbatch"
        raise BatchError(f"{_place(given, tree) or 'batch'}: {why}; make it a tensor, or pass microbatches=")


def _refuse_packed(given: Any, inputs: Tree, targets: Tree, rows: int) -> None:
    """Refuse sequences that are packed into one row, beside a tensor of their bounds that counts for the rows."""
    labels = given.get("labels") if isinstance(given, Mapping) else None
    if isinstance(targets, torch.Tensor) and not targets.is_floating_point():
        labels = targets  # of classes, which no two rows share
    wide = [tensor for tensor in tensors_of((inputs, targets)) if tensor.dim() > 1]
    packed = [tensor for tensor in wide if tensor is labels and len(tensor) == 1]
    packed += [] if packed or any(len(tensor) > 1 for tensor in wide) else wide
    if packed:
        why = f"{_place(given, packed[0])}: has one row, and others {rows}, as bounds of packed sequences have"
        raise BatchError(f"{why}; take num_microbatches=1, or pass microbatches=")


def refuse_graphs(given: Any) -> None:
    """Refuse a batch that something outside of the model would be trained by: no step hands it a gradient.

    Raises:
        BatchError: it has a tensor with a graph, or a parameter.
    """
    for tensor in tensors_of(dict(given) if isinstance(given, Mapping) else given):
        if tensor.grad_fn is not None or (tensor.requires_grad and isinstance(tensor, torch.nn.Parameter)):
            why = f"{_place(given, tensor) or 'batch'}: requires a gradient, and a step gives none to its batch"
            raise BatchError(f"{why}; make what made it a part of the model, or detach it")


def _place(tree: Any, wanted: Tree, name: str = "batch") -> str:
    """Return how Python reaches an object of a batch; an empty string if it is not there."""
    if tree is wanted:
        return name
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (tuple, list)) else ()
    return next((found for key, part in parts if (found := _place(part, wanted, f"{name}[{key!r}]"))), "")


def form_of(batch: Any) -> Any:
    """Return the form of a batch: its containers, names and types of tensors, without their shapes."""
    if isinstance(batch, Mapping):
        return {name: form_of(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return form_of(batch[0]) if isinstance(batch, SplitBatch) else [form_of(each) for each in batch]
    return batch.dtype if isinstance(batch, torch.Tensor) else type(batch)


def _num_rows(tree: Tree) -> int:
    """Return the rows of a batch; tensors without dimension, or with one row, count for all rows."""
    sizes = {tensor.shape[0] for tensor in tensors_of(tree) if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    if len(sizes) != 1:
        why = f"needs tensors that agree in dimension 0, or have 1 there; found {shapes_in(tree)}"
        raise BatchError(f"batch: {why}; pass microbatches=, or a SplitBatch, if the rows lie elsewhere")
    return sizes.pop()


def rows_in(microbatch: Tree) -> int:
    """Return the rows of a microbatch, the weight of its mean: the commonest size of dimension 0; fewer if two tie."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_of(microbatch) if tensor.dim())
    return max(sizes, key=lambda size: (sizes[size], -size), default=0)


def divides_sums(inputs: Tree, target: Tree) -> bool:
    """Return whether a whole model's loss is a sum, divided by a number of the whole batch that it is given."""
    return target is None and isinstance(inputs, tuple) and has_items(inputs)


def shares_of(rows: Sequence[int], inputs: Tree, target: Tree) -> list[float]:
    """Return each microbatch's share of the loss, by the rows of all, and the first one's inputs and target."""
    return [1.0] * len(rows) if divides_sums(inputs, target) else [count / sum(rows) for count in rows]


def has_items(side: Tree) -> bool:
    """Return whether a side of a microbatch has `NUM_ITEMS`: by name, or in (args, kwargs)."""
    named = side[1] if isinstance(side, tuple) and len(side) == 2 else side
    return isinstance(named, dict) and named.get(NUM_ITEMS) is not None


def update_shares(spec: Spec, shares: Sequence[float]) -> list[float] | None:
    """Return each microbatch's share of the rows of its update; None if updates take whole steps.

    Raises:
        BatchError: losses are divided by a number of the whole batch, but an update takes a part of it.
    """
    if spec.takes_steps:
        return None
    if sum(shares) > 1.5:
        raise BatchError(f"{NUM_ITEMS}: is of the whole batch, and {type(spec).__name__} updates by part; leave it out")
    taken = [summed_update(spec, m) for m in range(len(shares))]
    parts: defaultdict[Action, list[float]] = defaultdict(list)
    for share, update in zip(shares, taken, strict=True):
        parts[update].append(share)
    rows = {update: sum(of_update) for update, of_update in parts.items()}
    return [share / rows[update] for share, update in zip(shares, taken, strict=True)]


def with_means(found: Microbatches) -> Microbatches:
    """Return microbatches with the `NUM_ITEMS` of their share of rows, for losses with terms beside such sums.

    Each loss is then a mean of its microbatch. Terms that are means already, as a router's, would be added up else.
    """
    shares = factors = found.shares  # where a loss function, or a metric, is given the number
    if divides_sums(found.inputs[0], found.targets[0]):
        rows: list[float] = [rows_in(inputs) for inputs in found.inputs]
        for m, (begin, end, length) in enumerate(found.places or ()):
            rows[m] *= (end - begin) / length
        shares = [each / sum(rows) for each in rows]
        factors = [share / before for share, before in zip(shares, found.shares, strict=True)]
    sides = [[_multiplied(*each) for each in zip(side, factors, strict=True)] for side in (found.inputs, found.targets)]
    return replace(found, inputs=sides[0], targets=sides[1], shares=shares)


def _multiplied(side: Tree, factor: float) -> Tree:
    """Return a side of a microbatch with another `NUM_ITEMS`, a tensor, so that no forward differs by a number."""
    if not has_items(side):
        return side
    if isinstance(side, tuple):
        return side[0], _multiplied(side[1], factor)
    return {**side, NUM_ITEMS: torch.as_tensor(side[NUM_ITEMS] * factor)}
