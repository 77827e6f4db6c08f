"""The private parts of torch's FSDP2 that members use: gradients of a split backward, sums in the order of members.

FSDP2 gathers a layer's parameters before its forward and backward, and sums gradients by hooks of a whole backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ....dependency import ConfigError


class InOrder(ReduceScatter):
    """A reduce-scatter that adds up in the order of members: gloo's order depends on the place in the buffer."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        torch.distributed.all_to_all_single(parts, input_tensor, group=group)
        first, *rest = parts.view(group.size(), -1)
        output_tensor.copy_(first.view_as(output_tensor))
        for part in rest:
            output_tensor.add_(part.view_as(output_tensor))


def divide(module: nn.Module, mesh: Any, policy: MixedPrecisionPolicy | None = None) -> None:
    """Let each member hold a part of every parameter of a layer or block."""
    if next(module.parameters(), None) is None:
        return
    # True, since each layer is a root, and torch keeps a root gathered by default.
    policy = policy or MixedPrecisionPolicy()
    made: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    _sum(made)
    if mesh.size() > 2:  # of two parts the sum is the same in any order
        made.set_custom_reduce_scatter(InOrder())


def _sum(layer: Any) -> None:
    """Let FSDP2 add gradients up: each is of its part of one batch, so that their mean would be too small."""
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)


def _layers(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def _groups(layers: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for layer in layers:
        state = layer._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from ((layer, group) for group in groups if group is not None)


def sum_over_rows(module: nn.Module, part_of: Mapping[int, int]) -> None:
    """Let the layers that a user's function has given to FSDP2 add gradients up.

    Args:
        part_of: which part of the rows a rank computes.

    Raises:
        ConfigError: FSDP2 adds over members that do not have each part of the rows once.
    """
    for layer, group in _groups(_layers(module.modules())):
        _sum(layer)
        ranks, parts = group.mesh_info.mesh.mesh.flatten().tolist(), set(part_of.values())
        if sorted(part_of[rank] for rank in ranks) != sorted(parts):
            first = "set function.rows to their number, and take the first dimension of a mesh for them"
            raise ConfigError(f"shard: FSDP2 adds over {len(ranks)} members, but rows have {len(parts)} parts; {first}")


class Gathered:
    """The layers that `divide` has divided, in the order of a forward. They share buffers.

    Each alone would keep its last gradients.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = _layers(modules)
        inside = {part for module in self.layers for part in module.modules() if part is not module}
        share_comm_ctx([module for module in self.layers if module not in inside])

    def expect(self, *, sums: bool, last: bool) -> None:
        """Set whether the next backward sums the layers' gradients, and whether it is the last of the step."""
        for layer in self.layers:
            layer.set_requires_gradient_sync(sums, recurse=False)
            layer.set_is_last_backward(last)

    def take_gradients(self, *, sums: bool) -> None:
        """Keep, or sum over members, the gradients of a backward of weights alone, which calls no hook of FSDP2."""
        for layer, group in _groups(self.layers):
            group.reduce_grads = sums
            group.post_backward()
            group.reduce_grads = False
            group._training_state = type(group._training_state).IDLE
            group.finalize_backward()
            layer._get_fsdp_state()._training_state = group._training_state

    def hold(self, held: Collection[Any]) -> None:
        """Let some layers stay whole behind the next forward or backward; all other layers are divided again."""
        for layer, group in _groups(self.layers):
            group.post_forward_mesh_info = None if layer in held else group.mesh_info
            group.reshard_after_backward = layer not in held
            if layer is self.layers[0]:  # FSDP2 would gather the last layer again behind a backward
                group._post_forward_indices.clear()

    def release(self) -> None:
        """Divide layers again that are whole, or that are being gathered."""
        for _, group in _groups(self.layers):
            group.wait_for_unshard()
            group._to_sharded()
