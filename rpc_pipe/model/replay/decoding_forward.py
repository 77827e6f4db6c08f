"""The forward of one stage in generation: the model's forward, where blocks of other stages return at once.

No script is followed: a round has other lengths than the one before. Every stage computes all that is outside of
blocks, such as masks and positions, from the tokens. A block of an earlier stage returns a placeholder, and the last
such block the result that has come. Placeholders spread: a result that needed anything else is a placeholder, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import ModelError
from ...workers.transport.payload import Tree, map_tensors
from ..observe.placeholder import Placeholder
from ..observe.skeleton import Skeleton
from ..observe.trees import tensors


class DecodingForward:
    """One forward over a stage's blocks. While it runs it is the skeleton's `run`.

    Args:
        calls: numbers of the stage's calls of blocks.
        is_last: whether the stage is the last.
        arrived: the result of the last block before them; None on the first stage.
    """

    def __init__(self, skeleton: Skeleton, calls: range, is_last: bool, arrived: Tree) -> None:
        self._skeleton, self._calls, self._is_last, self._arrived = skeleton, calls, is_last, arrived
        self._next = 0

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Return the result of the stage's last block, or on the last stage the model's output.

        Raises:
            ModelError: the stage needs more of other stages than that result.
        """
        embedding: Any = self._skeleton.module.get_input_embeddings()  # type: ignore[operator]
        is_elsewhere = isinstance(getattr(embedding, "weight", None), Placeholder) and "forward" not in vars(embedding)
        if is_elsewhere:  # torch's fake tensors would take a millisecond for its result
            embedding.forward = partial(self._embedded, embedding.weight)
        try:
            with self._skeleton.reporting(self):
                output = self._skeleton.module(**inputs)
        except _StageEnds as ended:
            output = ended.args[0]
        finally:
            if is_elsewhere:
                del embedding.forward
        found = output.logits if self._is_last else output
        if self._next < self._calls.stop or any(isinstance(tensor, Placeholder) for tensor in tensors(found)):
            raise ModelError(
                "generate: a stage needs more of the stage before than the result of one block; cut between whole "
                "layers, by blocks= or fewer stages"
            )
        return output

    def _embedded(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Return a placeholder for the vectors of tokens."""
        made = torch.empty(*tokens.shape, weight.shape[1], dtype=weight.dtype, device="meta")
        return self._skeleton.placeholders.like(made, weight.device)

    def block(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of this stage; return at once from any other."""
        number, self._next = self._next, self._next + 1
        if number == self._calls.start - 1:
            return self._arrived
        if number < self._calls.start:
            return map_tensors(self._arrived, self._skeleton.placeholders.like)
        self._skeleton.run = None  # blocks inside of this one run by themselves
        try:
            result = forward(*args, **kwargs)
        finally:
            self._skeleton.run = self
        if number == self._calls.stop - 1 and not self._is_last:
            raise _StageEnds(result)
        return result


class _StageEnds(BaseException):
    """The stage has its result. A BaseException, so that no model catches it."""
