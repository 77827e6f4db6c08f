"""Autograd's backward for every microbatch of a stage, without what `torch.autograd.backward` looks for in vain.

Of a microbatch of two small layers its looks for subclasses, batches of gradients and symbolic shapes are a fifth. The
engine itself checks shapes, types and devices once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_engine: Callable[..., Any] | None
try:
    from torch.autograd.graph import _engine_run_backward as _engine
except ImportError:  # another torch, whose public function does
    _engine = None


def run_backward(roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Do as `torch.autograd.backward(roots, grads)` does."""
    pairs = zip(roots, grads, strict=True)
    if _engine is None or not all([_is_plain(root, grad) for root, grad in pairs]):
        torch.autograd.backward(roots, grads)
        return
    begun = [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads, strict=True)]
    _engine(tuple(roots), tuple(begun), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(root: Tensor, grad: Tensor | None) -> bool:
    """Tell whether nothing has to be looked for: torch's own tensor, and a gradient or a loss."""
    if type(root) is not Tensor or root.is_nested:
        return False
    return grad is not None or (root.numel() == 1 and root.is_floating_point())
