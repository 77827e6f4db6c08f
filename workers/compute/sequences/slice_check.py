"""The check, in the first step, that slices of a sequence give the numbers of the whole sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....dependency import ConfigError
from ...transport.payload import Tree, distinct_tensors, map_tensors, unpack
from ..modules.borders import ForwardArgs, without_views
from ..modules.randomness import PYTHON_SEEDS
from ..modules.torch_internals import OperatorMode

#: names of the keys and values of earlier tokens: up to transformers 5.23, and later
CACHES = ("past_key_values", "cache")

#: greatest difference by rounding, relative to the largest number: of float32, and in units of other types
_TOLERANCE, _UNITS = 1e-3, 16
#: and losses, which are means
_TOLERANCE_OF_LOSS = 1e-5
#: the operator that seeds the generators of Python
_SEED = torch.ops.aten.randint.default

#: runs a forward of slice `number`, or of the whole (None), on (inputs, fields)
Run = Callable[[int | None, Tree, Tree], Tree]


def compare(noted: Sequence[ForwardArgs], run: Run, loss_fn: Callable[[Any, Any], Any] | None) -> None:
    """Compare slices with the whole.

    Args:
        noted: the arguments of each slice's forward.
        loss_fn: on the last stage.

    Raises:
        ConfigError: the numbers differ.
    """
    inputs = [without_views(unpack(each.inputs)) for each in noted]
    whole = run(None, joined(inputs), _whole_fields([each.fields for each in noted]))
    parts = [run(number, given, each.fields) for number, (given, each) in enumerate(zip(inputs, noted, strict=True))]
    if not _same(_sequences([whole]), parts):
        raise refused("mixes a sequence otherwise than from its beginning on")
    if loss_fn is None:
        return
    losses = [(loss_fn(part, each.target), each.share or 0.0) for part, each in zip(parts, noted, strict=True)]
    if noted[0].scale is not None and isinstance(losses[0][0], tuple):  # sums are divided slice by slice
        losses = [(loss[0] / loss[1] if loss[1] else 0.0, share) for loss, share in losses]
    added_up = noted[0].fields is not None and "shift_labels" in noted[0].fields[1]
    share = losses[0][1] if added_up else sum(share for _, share in losses)
    mean = _mean([(loss_fn(whole, joined([each.target for each in noted])), share)], share)
    by_slices = _mean(losses, share)
    if not _close(mean, by_slices, _TOLERANCE_OF_LOSS):
        why = f"slices: the loss of a sequence is {float(mean):.6g}, and {float(by_slices):.6g} by its slices"
        raise ConfigError(f"{why}: shift labels before, and let a loss_fn that leaves out tokens return (sum, weight)")


def refused(why: str) -> ConfigError:
    """Return the refusal of a stage; the workers' error names it."""
    why = f"slices: a layer of this stage {why}, as attention without earlier keys, convolutions and batch norm"
    return ConfigError(f"{why}: let it take and return a state (docs/models.md), or leave out slices")


def joined(trees: Sequence[Tree]) -> Tree:
    """Return trees of slices as one of the whole; tensors without sequences are the first slice's."""
    found = iter(_columns(trees))
    return map_tensors(trees[0], lambda _: next(found))


def _columns(trees: Sequence[Tree]) -> list[Tensor]:
    columns = zip(*map(distinct_tensors, trees), strict=True)
    return [torch.cat(list(each), 1) if each[0].dim() > 1 else each[0] for each in columns]


def _whole_fields(fields: Sequence[Tree]) -> Tree:
    """Return the fields of a whole model without the fields for slices."""
    if fields[0] is None:
        return None
    kwargs = fields[0][1]
    cache = next((each for name in CACHES if hasattr(each := kwargs.get(name), "whole")), None)
    return joined(fields) if cache is None else ((), cache.whole)


def _mean(losses: Sequence[tuple[Any, float]], share: float) -> Tensor:
    """Return the loss of all from (loss, share) of each; `share`: of all."""
    if isinstance(losses[0][0], tuple):
        return torch.as_tensor(sum(loss[0] for loss, _ in losses) / sum(loss[1] for loss, _ in losses)).detach()
    return torch.as_tensor(sum(loss * own for loss, own in losses if own) / share).detach()


def _sequences(parts: Sequence[Tree]) -> list[Tensor]:
    return [tensor for tensor in _columns(parts) if tensor.dim() > 1 and tensor.is_floating_point()]


def _same(expected: Sequence[Tensor], parts: Sequence[Tree]) -> bool:
    """Return whether the joined outputs of slices are as expected."""
    try:
        return all(_close(*pair) for pair in zip(expected, _sequences(parts), strict=True))
    except (RuntimeError, ValueError):  # shapes that make no whole
        return False


def _close(one: Tensor, other: Tensor, least: float = _TOLERANCE) -> bool:
    kind = one.device.type
    dtypes = [one.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    most = max(least, *(_UNITS * torch.finfo(dtype).eps for dtype in dtypes))
    if not one.numel() or one.isnan().any():  # these prove nothing
        return one.shape == other.shape
    return one.shape == other.shape and bool((one - other).abs().max() <= most * one.abs().max())


class NotedDraws(OperatorMode):
    """Records whether an operator draws numbers, other than a seed for the generators of Python."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeds = func is _SEED and args[0] == PYTHON_SEEDS
        self.found = self.found or (_draws(func, args, kwargs or {}) and not seeds)
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws: an attention draws if it is to drop out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))
