"""Microbatches cut along their sequences, dimension 1, into slices that are trained on one by one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import ConfigError, Spec
from ...workers.compute.result import NUM_ITEMS
from ...workers.compute.sequences.sequence import current
from ...workers.compute.sequences.slice_check import CACHES
from ...workers.transport.payload import TensorHolder, Tree, map_tensors, shapes_in, tensors_of
from .microbatches import IGNORED, Microbatches, divides_sums


class Sequences:
    """Cuts microbatches into slices.

    Args:
        spec: has the sizes of slices.
        whole: the model, if its forward is cut and not a list of layers.
        loss_is_inside: whether it computes its loss itself.

    Raises:
        ConfigError: the model recomputes in backward tensors that it has put into its cache.
    """

    def __init__(self, spec: Spec, whole: nn.Module | None, *, loss_is_inside: bool) -> None:
        self._sizes = spec.parallelism.slices
        parameters = {} if whole is None else inspect.signature(whole.forward).parameters
        names = CACHES if "use_cache" in parameters else CACHES[:1]
        self._cache = next((name for name in names if name in parameters), "")
        takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        #: whether labels are shifted inside of the model, as Hugging Face's causal ones do
        self._shifts = bool(self._cache) and loss_is_inside and takes_more and "labels" in parameters
        self._names = list(parameters)
        # A model without positions, as one with ALiBi, takes these from the mask of tokens, and makes a mask of pairs.
        gives_masks = bool(self._cache) and "position_ids" in parameters
        self._masks = _masks(whole, max(self._sizes) / sum(self._sizes)) if gives_masks else None
        if self._cache and getattr(getattr(whole, "config", None), "output_router_logits", False):
            raise ConfigError("slices: output_router_logits=True balances experts over whole sequences; set it False")
        for name, module in whole.named_modules() if self._cache and whole is not None else ():
            if getattr(module, "gradient_checkpointing", False):
                why = f"slices: {name or type(module).__name__} has gradient checkpointing on, without their cache"
                raise ConfigError(f"{why}; turn it off, and let the schedule recompute (--set recompute=all)")

    def cut(self, found: Microbatches) -> Microbatches:
        """Return the slices of all microbatches, in order, as microbatches.

        Raises:
            ConfigError: there is no sequence to cut, or one that is too short.
        """
        if found.scatter is not None or (found.lazy is not None and found.lazy.scattered):
            raise ConfigError("slices: batches that one worker reads for all cannot be cut; let readers be 'users'")
        pairs = zip(found.inputs, found.targets, found.shares, strict=True)
        cut = [self._slices(*each) for each in pairs]
        inputs, targets, shares, places = [list(chain.from_iterable(side)) for side in zip(*cut, strict=True)]
        return replace(found, inputs=inputs, targets=targets, shares=shares, places=places)

    def _slices(self, inputs: Tree, target: Tree, share: float) -> tuple[list[Any], ...]:
        """Return inputs, targets, shares and places of the slices of a microbatch."""
        length = length_of([inputs, target])
        count, ranges = len(self._sizes), ranges_of(self._sizes, length)
        if any(begin == end for begin, end in ranges):
            sizes = str(count) if len(set(self._sizes)) == 1 else ",".join(map(str, self._sizes))
            raise ConfigError(f"slices {sizes}: a sequence of {length} has too few; take at most {min(count, length)}")
        if self._cache:
            whole = self._named(*inputs)
            named = self._shifted(whole)
            inputs = (), named
            pieces = [self._piece(named, whole, *place, length) for place in ranges]
        else:
            pieces = [_cut(inputs, *place, length) for place in ranges]
        targets = [_cut(target, *place, length) for place in ranges]
        places = [(*place, length) for place in ranges]
        if divides_sums(inputs, target):
            return pieces, targets, [share] * count, places
        counted = [_num_counted(each) for each in targets]
        weights = [each for each in counted if each is not None]
        if len(weights) < count or not sum(weights):
            weights = [end - begin for begin, end in ranges]
        return pieces, targets, [share * weight / sum(weights) for weight in weights], places

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a model with a cache, by name."""
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        places = named.get("position_ids")
        if isinstance(places, Tensor) and not places.is_meta and (places.diff(dim=-1) != 1).any():
            raise ConfigError("slices: position_ids begin anew within a row; leave one sequence in each row")
        return named

    def _shifted(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the same with labels that are shifted already, across the borders of slices."""
        if not self._shifts or not isinstance(labels := named.get("labels"), Tensor):
            return named
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
        counted = (shifted != IGNORED).sum()
        return {NUM_ITEMS: counted, **named, "labels": shifted, "shift_labels": shifted}

    def _piece(self, named: Mapping[str, Any], whole: Mapping[str, Any], begin: int, end: int, length: int) -> Tree:
        # A mask is of all that is attended to, so also of the slices before.
        first = {"attention_mask": 0}
        piece = {name: _cut(tree, first.get(name, begin), end, length) for name, tree in named.items()}
        if self._masks is not None and begin and named.get("attention_mask") is None:
            piece["attention_mask"] = self._masks(begin, end, length)
            if piece.get("position_ids") is None:  # some models would count them by the mask
                piece["position_ids"] = torch.arange(begin, end)[None]
        return (), {**piece, self._cache: SliceCache(begin, end, length, whole)}


class SliceCache(TensorHolder):
    """A `past_key_values` that knows a slice's place; keys and values lie with the stage that computes it.

    Each stage has the layers that it runs, and all read the number of earlier tokens from here: so masks and positions
    are the whole sequence's on every stage.

    Args:
        begin, end: place of the slice; `total`: length of the sequence.
        whole: the model's arguments by name for all of it.
    """

    is_compileable = False

    def __init__(self, begin: int, end: int, total: int, whole: Mapping[str, Any]) -> None:
        self._place, self._whole = (begin, end, total), whole
        self._changes: tuple[Callable[[Tensor], Any], ...] = ()

    @property
    def whole(self) -> Mapping[str, Any]:
        """The model's arguments by name for the whole sequence, which few slices ask for."""
        return reduce(map_tensors, self._changes, self._whole)

    def mapped(self, change: Callable[[Tensor], Any]) -> SliceCache:
        found = SliceCache(*self._place, self._whole)
        found._changes = (*self._changes, change)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceCache) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens are before the slice."""
        return self._place[0]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys there are, and the place of the first."""
        return self._place[0] + query_length, 0

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **more: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slices up to this one."""
        begin = self._place[0]
        piece = current()
        if piece is None or type(keys) is not Tensor:  # a forward on shapes
            before = [new.new_zeros((*new.shape[:-2], begin, new.shape[-1])) for new in (keys, values)]
            return torch.cat([before[0], keys], -2), torch.cat([before[1], values], -2)
        left = piece.left
        return left.join((layer_idx, 0), keys, begin), left.join((layer_idx, 1), values, begin)


def _masks(whole: Any, largest: float) -> Callable[[int, int, int], Tensor] | None:
    """Return the maker of the mask of a slice from `begin` to `end` of a sequence; None: the model makes the mask.

    All layers save one mask for backward, and the masks of all slices are parts of one. Each layer would save a copy
    of a mask made by the model: 34 MB for 4,096 tokens in 8 slices, a sixth of GPT-2's activations.

    Args:
        largest: the part of a sequence that is in its largest slice.
    """
    config, dtype = getattr(whole, "config", None), next(p.dtype for p in whole.parameters() if p.is_floating_point())
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = getattr(config, "sliding_window", None) or kinds
    if windows or getattr(config, "_attn_implementation", "") not in ("sdpa", "eager"):
        return None

    @lru_cache(maxsize=8)
    def triangle(length: int) -> Tensor:
        rows = math.ceil(largest * length)
        return torch.full((rows, -(-(length + rows) // 8) * 8), float("-inf"), dtype=dtype).triu(length + 1)

    def mask(begin: int, end: int, length: int) -> Tensor:
        # Row i sees the first `begin` + i + 1 tokens. Kernels read 16 bytes at once, and only from multiples of 16.
        seen = triangle(length)[None, None, : end - begin, length - begin : length - begin + end]
        return seen.contiguous() if seen.data_ptr() % 16 else seen

    return mask


def ranges_of(sizes: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return the beginning and end of each slice of a sequence; `sizes` are in parts of it.

    >>> ranges_of([2, 1, 1], 10)
    [(0, 5), (5, 8), (8, 10)]
    """
    parts = sum(sizes)
    ends = [(at * length + parts // 2) // parts for at in accumulate(sizes)]
    return list(zip([0, *ends], ends, strict=False))


def length_of(tree: Tree) -> int:
    """Return the length of the sequences of a microbatch: the size of dimension 1.

    Raises:
        ConfigError: there is none, or there are several.
    """
    long = [tensor for tensor in tensors_of(tree) if tensor.dim() > 1]
    sizes = {tensor.shape[1] for tensor in long}
    if not any(tensor.dim() > 2 or not tensor.is_floating_point() for tensor in long):
        why = "a batch without tokens (rows, length) or vectors (rows, length, size)"
        raise ConfigError(f"slices: {why}; found {shapes_in(tree)}; leave slices out, or give (rows, length, 1)")
    if len(sizes) == 1:
        return sizes.pop()
    raise ConfigError(f"slices: needs tensors that agree in dimension 1, the sequence; found {shapes_in(tree)}")


def _cut(tree: Tree, begin: int, end: int, length: int) -> Tree:
    """Return a part of all tensors that have sequences; other tensors count for all slices."""
    return map_tensors(tree, lambda t: t[:, begin:end].contiguous() if t.dim() > 1 and t.shape[1] == length else t)


def _num_counted(target: Tree) -> int | None:
    """Return how many tokens of a slice a mean loss counts; None: unknown, so all do, as where a replica has it."""
    tensors = list(tensors_of(target))
    if len(tensors) != 1 or tensors[0].is_meta or tensors[0].is_floating_point() or tensors[0].dim() < 2:
        return None
    return int(torch.count_nonzero(tensors[0] != IGNORED))
