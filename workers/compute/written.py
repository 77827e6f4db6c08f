"""What forwards write and backward reads: in a pipeline, other forwards come between the two.

In one process a microbatch's backward comes before the next one's forward, so a layer may scale by an average that it
has just moved, or bound its weights first. Here backward gets what its own forward read, also of what `.data` hides
from autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...dependency import ConfigError
from .autocast import forget_casts
from .autograd_graph import children_first, saved_by
from .digest import few, imprint, sample
from .sharing import address
from .slices import Slice
from .torch_internals import NormBase

if TYPE_CHECKING:
    from .split_backward import Saved

#: so many forwards are looked at
_LOOKS = 2
#: where the elements of a tensor lie
_Address = int


class Written:
    """Finds out, by the first two forwards in training and when modes change, which tensors of a shard these are.

    Args:
        slice: what computes. Of torch's own norms backward reads no running statistics.
    """

    def __init__(self, slice: Slice) -> None:
        self._slice = slice
        self._modules = [module for module in slice.own if module._buffers and not isinstance(module, NormBase)]
        self._modes: list[bool] = []
        #: buffers that forwards write, as far as it is known
        self.buffers: list[tuple[nn.Module, str]] = []
        self._before: list[tuple[nn.Module, str, Tensor, _Address, Tensor, int]] = []
        #: parameters that forwards write; None until it is known
        self.weights: list[nn.Parameter] | None = None
        #: whether forwards write nothing, so that nothing has to be done for them
        self.nothing = False
        self._weights_before: list[tuple[nn.Parameter, _Address, int, Tensor]] | None = None
        self._in_full = True
        #: forwards still to be looked at
        self._looks = _LOOKS

    @property
    def found(self) -> bool:
        """Whether forwards have been seen to write something."""
        return bool(self.buffers or self.weights)

    def look_at_modes(self) -> None:
        """Look at the next forward if modules have other modes now, in which it may write something else."""
        if self._modes and self._modes != [module.training for module in self._modules]:
            self.nothing, self._looks = False, _LOOKS

    def begin(self) -> dict[_Address, Tensor]:
        """Return what a forward that begins will write, as far as it is known, by where it lies."""
        if self._looks:
            parameters = [p for _, p in self._slice.named_parameters() if p.layout is torch.strided]
            self._in_full = few(parameters)
            self._weights_before = [(p, address(p), p._version, self._seen(p)) for p in parameters]
        if self.weights:
            forget_casts()  # of what they were
        found: dict[_Address, Tensor] = {address(weight): weight for weight in self.weights or ()}
        if not self._modules:
            return found
        modes = [module.training for module in self._modules]
        if self._looks or modes != self._modes:
            self._modes = modes
            held = [(m, name, b) for m in self._modules for name, b in m._buffers.items() if b is not None]
            dense = [each for each in held if each[2].layout is torch.strided]
            self._before = [(m, name, b, address(b), b.clone(), b._version) for m, name, b in dense]
        buffers = [module._buffers[name] for module, name in self.buffers]
        return found | {address(buffer): buffer for buffer in buffers if buffer is not None}

    def begin_anew(self) -> None:
        """A forward has failed, and the first one will be run again.

        Raises:
            ConfigError: it has written a parameter.
        """
        if not self.nothing:
            self.end(again=True)
        self._modes, self.buffers, self._before, self.weights, self.nothing = [], [], [], None, False
        self._looks = _LOOKS

    def end(self, again: bool) -> dict[_Address, Tensor]:
        """Take note of what the forward has written; return what nobody knew of, by where it lay before.

        Args:
            again: whether the forward will be run again, or has been.

        Raises:
            ConfigError: it will be, and a parameter is not what it was computed from.
            ConfigError: it has written a parameter of which other stages hold copies.
        """
        found: dict[_Address, Tensor] = {}
        if not self._before and self._weights_before is None:
            return found
        # `.data` hides that what is there was written.
        buffers, weights = map(set, self._slice.expected_writes())
        if self._before:
            written = [
                (module, name, buffer, at)
                for module, name, buffer, at, before, version in self._before
                if module._buffers.get(name) is buffer
                and (buffer._version != version or (module, name) in buffers or not torch.equal(buffer, before))
            ]
            self.buffers = list(dict.fromkeys((*self.buffers, *((module, name) for module, name, _, _ in written))))
            self._before = []
            found = {at: buffer for _, _, buffer, at in written}
        if self._weights_before is None:
            return found
        # A limit that the first forward keeps may bind later. What an RNN moves for its device alone lies elsewhere.
        changed = [
            (p, at)
            for p, at, version, before in self._weights_before
            if (p._version != version and address(p) == at) or p in weights or not torch.equal(self._seen(p), before)
        ]
        self.weights = list(dict.fromkeys((*(self.weights or ()), *(weight for weight, _ in changed))))
        self._weights_before = None
        self._looks -= 1
        self.nothing = not (self.found or self._looks)
        self._refuse_copied()
        if again and self.weights:
            shape = tuple(self.weights[0].shape)
            raise ConfigError(
                f"a layer writes its parameter of shape {shape} in its forward, which so cannot be recomputed; make it "
                "a buffer, or use a schedule that does not recompute"
            )
        return found | {at: weight for weight, at in changed}

    def keep(
        self,
        roots: Sequence[Tensor],
        saved: Saved | None,
        hidden: Mapping[_Address, Tensor],
        known: Mapping[_Address, Tensor],
    ) -> None:
        """Let backward from `roots` read copies of what the forward has saved of what is written.

        Args:
            saved: where it was saved, if autograd does not hold it.
            hidden: what nobody knew of before the forward, `known`: and what was known.
        """
        if saved is not None and saved.seen:
            saved.keep(hidden)
        elif known or hidden:
            keep_saved(roots, {**known, **hidden}.values())

    def _refuse_copied(self) -> None:
        written, shared = set(self.weights or ()), self._slice.shared
        for name in [name for name, p in self._slice.named_parameters() if p in written and name in shared]:
            raise ConfigError(
                f"model: a layer writes its parameter {name} in its forward, of which stages "
                f"{', '.join(map(str, shared[name]))} hold copies; choose a split that leaves it in one"
            )

    def _seen(self, parameter: nn.Parameter) -> Tensor:
        return imprint(parameter) if self._in_full else sample(parameter).clone()


def keep_saved(roots: Sequence[Tensor], written: Iterable[Tensor]) -> None:
    """Let backward from `roots` read copies of what autograd has saved of these tensors."""
    addresses = {address(tensor) for tensor in written}
    for node in children_first(root.grad_fn for root in roots if root.grad_fn is not None):
        for saved in saved_by(node):
            tensor = saved.data  # not unpacked: a checkpoint would compute again
            if isinstance(tensor, Tensor) and address(tensor) in addresses:
                saved.register_hooks(_copy, _same)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _same(tensor: Tensor) -> Tensor:
    return tensor
