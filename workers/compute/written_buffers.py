"""Buffers that forwards write and backward reads: in a pipeline, other forwards come between the two.

In one process a microbatch's backward comes before the next one's forward, so a layer may scale by an average that it
has just moved. Here backward gets what its own forward read, also of what `.data` hides from autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

#: where the elements of a tensor lie
_Address = int


class WrittenBuffers:
    """Finds out, by the first forward in training, which buffers of a shard these are.

    Args:
        modules: all that compute. Of torch's own norms backward reads no running statistics.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for module in modules if module._buffers and not isinstance(module, _NormBase)]
        self._modes: list[bool] = []
        self._written: list[tuple[nn.Module, str]] = []
        self._before: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def begin(self) -> set[_Address]:
        """Return where the buffers lie of which a forward that begins must save copies: all, until it is known."""
        if not self._modules:
            return set()
        modes = [module.training for module in self._modules]
        if modes != self._modes:
            self._modes = modes
            held = [(m, name, b) for m in self._modules for name, b in m._buffers.items() if b is not None]
            self._before = [(m, name, b, b.clone()) for m, name, b in held if b.layout is torch.strided]
            return {b.untyped_storage().data_ptr() for _, _, b, _ in self._before}
        buffers = [module._buffers[name] for module, name in self._written]
        return {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer is not None}

    def end(self) -> None:
        """Take note of what the forward has written."""
        if self._before:
            self._written = [
                (module, name)
                for module, name, buffer, before in self._before
                if module._buffers.get(name) is buffer and not torch.equal(buffer, before)
            ]
            self._before = []
