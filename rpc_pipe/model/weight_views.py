"""Different weights and buffers of a model on the same memory, such as a weight that is another's transpose.

In one process the update of one is an update of the other. Stages and copies have separate memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.transport.payload import extent

_KINDS = (Tensor, nn.Parameter)


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield the names of pairs of tensors that reach over the same memory."""
    spans = []
    for name, tensor in named:
        fake = getattr(tensor, "fake", None)  # of a placeholder
        if (fake is not None or type(tensor) in _KINDS) and tensor.layout is torch.strided and tensor.numel():
            storage = (tensor if fake is None else fake).untyped_storage()._cdata
            begin = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((storage, begin, begin + extent(tensor.shape, tensor.stride()) * tensor.itemsize, name))
    last, end, of = None, 0, ""
    for storage, begin, reach, name in sorted(spans):
        if storage == last and begin < end:
            yield of, name
        if storage != last or reach > end:
            last, end, of = storage, reach, name


def refuse_parted(
    named: Mapping[str, Tensor], stages: Mapping[str, Iterable[int]], written: Iterable[str] = ()
) -> None:
    """Raise if training would write only one of two tensors on the same memory.

    Args:
        stages: the stages of each parameter that is kept as it is given; buffers are copies.
        written: names of buffers that forwards write.

    Raises:
        ModelError: there are two.
    """
    changing = {name for name, tensor in named.items() if tensor.requires_grad} | set(written)
    for one, other in overlapping(named.items()):
        first, second = (set(stages.get(name, ())) for name in (one, other))
        if {one, other} & changing and not (first == second and len(first) == 1):
            raise ModelError(
                f"model: {one} and {other} are views of the same memory, and stages would have copies that part: make "
                "them one parameter or buffer, or compute one of the other in the forward (as by weight.t())"
            )
