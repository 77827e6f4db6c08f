"""The state of a stage: the writes of its forwards, kept for each microbatch until its backward.

In one process a microbatch's backward runs before the next one's forward, so backward reads the state that its forward
has left: moved averages, bounded weights, also by `.data`, which autograd does not see. In a pipeline other
forwards run between. So behind a forward the stage continues with copies of the written tensors; the graph keeps the
memory, and backward gets it back, also for layers that it runs again (`torch.utils.checkpoint`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import ConfigError
from .modules.autocast import forget_casts
from .modules.digest import digest, sample
from .modules.module_state import LOOKS, KeptAttribute, KeptTensor, ModuleState, Place, Probe
from .modules.randomness import computing
from .modules.torch_internals import NormBase, local
from .sequences.slices import Slice


class StageState:
    """Finds out, by the first two forwards in each mode of training, which tensors forwards of a stage write.

    Args:
        slice: the computing modules.
    """

    def __init__(self, slice: Slice) -> None:
        self._slice = slice
        self.probe = Probe(slice.modules)
        #: where forwards write buffers and other tensors that modules hold, as far as it is known
        self._places: dict[Place, None] = {}
        #: attributes that forwards set to other tensors, likewise
        self._anew: set[Place] = set()
        #: parameters that forwards write, as far as it is known
        self.weights: list[nn.Parameter] = []
        self._before: ModuleState | None = None
        #: where forwards leave something, as far as it is known
        self._left: set[Place] = set()
        self._weights_before: list[tuple[nn.Parameter, Tensor, int, Tensor]] = []
        #: training modes of the last step, and whether the next forward is observed
        self._modes: list[bool] = []
        self.is_looking = True
        #: whether anything has to be done around a forward: nothing, once it is known that forwards write nothing
        self.watches = True
        #: digest of the weights that forwards write, behind those of the first step; "": they write none
        self.first_written = ""
        #: digests of the persistent buffers that forwards write, likewise; None: the first step has not ended
        self.first_buffers: dict[str, str] | None = None
        #: backwards behind forwards of later microbatches that are still to be looked at
        self._looks_back = LOOKS + 1

    def note_first(self) -> None:
        """Record the weights that the forwards of the first step have left; called before its update."""
        self.first_written = self.first_written or self.written()
        if self.first_buffers is None:
            self.first_buffers = {  # averages of a norm are known to be each replica's
                f"{type(module).__name__}.{name}": f"{digest([buffer.detach().cpu()]):x}"
                for module, name in self._left
                if name.isidentifier() and name not in module._non_persistent_buffers_set
                if isinstance(buffer := getattr(module, name, None), Tensor) and not isinstance(module, NormBase)
            }

    def written(self) -> str:
        """Return a digest of the weights that forwards write, as they are now; "": they write none."""
        return f"{digest(local(p).detach().cpu() for p in self.weights):x}" if self.weights else ""

    def look_at_modes(self) -> None:
        """Observe the next forward if modules have other modes now, because it may then write other tensors."""
        modes = [module.training for module in self._slice.own]
        if modes != self._modes:
            self._modes, self.is_looking = modes, self.probe.is_due()
            self.watches |= self.is_looking

    def begin(self) -> None:
        """Record the state that a forward may write, when it begins."""
        if self.weights:
            forget_casts()  # made of the old weights
        if not self.is_looking:
            return
        parameters = [p for _, p in self._slice.named_parameters() if p.layout is torch.strided]
        self._weights_before = [(p, p.data, p._version, sample(p).clone()) for p in parameters]
        self._before = self.probe.before()
        self._end_look = self._slice.look and self._slice.look()

    def end(self, again: bool) -> list[KeptTensor | KeptAttribute]:
        """Record the tensors that the forward has written, and continue with copies; return them, for `shown`.

        Args:
            again: whether the forward will be run again, or has been.

        Raises:
            ConfigError: the forward will be recomputed, and a parameter has changed since.
        """
        before, self._before = self._before, None
        if before is not None:
            if self._end_look is not None:
                self._end_look()
            self._note_written(before, again)
            self.is_looking = self.probe.is_due()
            self.watches = bool(self._places or self._anew or self.weights or self.is_looking)
        left = list(map(KeptTensor.now, self.weights))
        for place in self._places:
            tensor = getattr(*place, None)
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.requires_grad:
                left.append(KeptTensor.now(tensor, place))
        for value in left:
            value.tensor.data = value.data.clone()
        anew = [KeptAttribute(p, tensor) for p in self._anew if isinstance(tensor := getattr(*p, None), Tensor)]
        return [*left, *anew]

    def backward(self, overtaken: bool) -> AbstractContextManager[Any]:
        """Return a context for a backward.

        Args:
            overtaken: whether forwards of later microbatches have run, so that it must not write what forwards read.
        """
        self._looks_back -= bool(overtaken and self._looks_back)
        if not (overtaken and self._looks_back):
            return computing
        from .backward_state import refusing_writes  # with one stage nothing overtakes

        return refusing_writes(self._slice.own, self._left)

    def _note_written(self, before: ModuleState, again: bool) -> None:
        # A write through `.data` raises no version.
        places, weights = self._slice.expected_writes()
        own = {module for module in self._slice.own if not isinstance(module, NormBase)}  # their backward reads none
        self._places |= {place: None for place in (*before.written(), *places) if place[0] in own}
        # A limit that the first forward keeps may bind later. Tensors that an RNN moves for its device lie elsewhere.
        changed = [
            p
            for p, data, version, was in self._weights_before
            if (p._version != version and p.data_ptr() == data.data_ptr())
            or p in weights
            or not torch.equal(sample(p), was)
        ]
        self.weights = list(dict.fromkeys((*self.weights, *changed)))
        self._left |= self.probe.note(before)
        for place in self._left - self._places.keys():
            value = getattr(*place, None)
            if place[0] in own and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self._anew.add(place)
        self._weights_before = []
        if again and self.weights:
            shape = tuple(self.weights[0].shape)
            why = f"layer: writes its parameter of shape {shape} in its forward, which so cannot be recomputed"
            raise ConfigError(f"{why}; make it a buffer, or use a schedule that does not recompute")


def shown(left: Sequence[KeptTensor | KeptAttribute]) -> AbstractContextManager[Any]:
    """Return a context, on this thread alone, with the stage in the state of a forward; the present state returns.

    Writes of backward itself, in layers that it runs again, are dropped.
    """
    if not left:
        return computing
    from .backward_state import put_back  # few forwards write

    return put_back(left)
