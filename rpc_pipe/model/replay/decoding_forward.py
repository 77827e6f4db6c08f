"""The forward of one stage in generation: the model's forward, where blocks of other stages return at once.

No script is followed: a round has other lengths than the one before. Every stage computes all that is outside of
blocks, such as masks and positions, from the tokens. A block of an earlier stage returns a placeholder, and the last
such block the result that has come. Placeholders spread: a result that needed anything else is a placeholder, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import ModelError
from ...workers.transport.payload import Tree, map_tensors
from ..observe.placeholder import Placeholder
from ..observe.skeleton import Skeleton
from ..observe.trees import tensors

#: placeholders that a stage keeps: rounds of all groups have few forms, prompts one each
_MOST_KEPT = 64


class DecodingForward:
    """The forwards over a stage's blocks in one generation. While one runs, it is the skeleton's `run`.

    Args:
        calls: numbers of the stage's calls of blocks.
        is_last: whether the stage is the last.
    """

    def __init__(self, skeleton: Skeleton, calls: range, is_last: bool) -> None:
        self._skeleton, self._calls, self._is_last = skeleton, calls, is_last
        self._arrived: Tree = None
        self._next = 0
        #: placeholders by form: fake tensors take 0.15 ms to make, and a millisecond to compute with
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    @contextmanager
    def ready(self) -> Iterator[DecodingForward]:
        """Return a context for `run`: blocks report, and embeddings of other stages return placeholders at once."""
        embeddings = [
            module
            for module in self._skeleton.module.modules()
            if isinstance(module, nn.Embedding)
            and isinstance(module.weight, Placeholder)
            and "forward" not in vars(module)
            and len(signature(type(module).forward).parameters) == 2  # OPT's positions are no function of tokens
        ]
        with self._skeleton.reporting(None):
            for module in embeddings:
                vars(module)["forward"] = partial(self._embedded, module.weight)
            try:
                yield self
            finally:
                for module in embeddings:
                    del vars(module)["forward"]

    def run(self, arrived: Tree, inputs: Mapping[str, Any]) -> Any:
        """Return the result of the stage's last block, or on the last stage the model's output.

        Args:
            arrived: the result of the last block of the stage before; None on the first stage.

        Raises:
            ModelError: the stage needs more of other stages than that result.
        """
        self._arrived, self._next, self._skeleton.run = arrived, 0, self
        try:
            output = self._skeleton.module(**inputs)
        except _StageEnds as ended:
            output = ended.args[0]
        finally:
            self._skeleton.run = None
        found = output.logits if self._is_last else output
        if self._next < self._calls.stop or any(isinstance(tensor, Placeholder) for tensor in tensors(found)):
            raise ModelError(
                "generate: a stage needs more of the stage before than the result of one block; cut between whole "
                "layers, by blocks= or fewer stages"
            )
        return output

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of this stage; return at once from any other."""
        number, self._next = self._next, self._next + 1
        if number == self._calls.start - 1:
            return self._arrived
        if number < self._calls.start:
            return map_tensors(self._arrived, self._like)
        self._skeleton.run = None  # blocks inside of this one run by themselves
        try:
            result = forward(*args, **kwargs)
        finally:
            self._skeleton.run = self
        if number == self._calls.stop - 1 and not self._is_last:
            raise _StageEnds(result)
        return result

    def _like(self, tensor: Tensor) -> Tensor:
        return self._of(tuple(tensor.shape), tensor.dtype, tensor.device)

    def _embedded(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return self._of((*tokens.shape, weight.shape[1]), weight.dtype, weight.device)

    def _of(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a placeholder of a contiguous tensor."""
        if (found := self._kept.get((shape, dtype, device))) is None:
            made = torch.empty(shape, dtype=dtype, device="meta")
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            found = self._kept[shape, dtype, device] = self._skeleton.placeholders.like(made, device)
        return found


class _StageEnds(BaseException):
    """The stage has its result. A BaseException, so that no model catches it."""
