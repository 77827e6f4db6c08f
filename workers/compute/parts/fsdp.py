"""The private parts of torch's FSDP2 that members use: gradients of a split backward, sums in the order of members.

FSDP2 gathers a layer's parameters before its forward and backward, and sums gradients by hooks of a whole backward.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.utils._pytree import tree_flatten, tree_unflatten

from ....dependency import ConfigError
from ..modules.digest import sample
from ..modules.module_state import LOOKS
from .divided import local


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


class BackwardEnd:
    """The end of a group's backward, with zeros for gradients that it has not here, such as an expert's without rows.

    FSDP2 adds up the gradients that there are, so that another member's expert would be added to this one's.
    """

    def __init__(self, group: Any) -> None:
        self._group, self.ran = group, False
        #: parameters that had a gradient in this step, and those that had none when gradients were summed
        self.given: set[nn.Parameter] = set()
        self.missed: set[nn.Parameter] = set()

    def __call__(self, *unused: Any) -> None:
        group, self.ran = self._group, True
        if group.reduce_grads:
            held = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
            is_later = any(each.unsharded_accumulated_grad is not None for each in held)
            for each in held:
                whole = each.unsharded_param
                if each.unsharded_accumulated_grad is not None:
                    self.given.add(each.sharded_param)
                    continue
                if whole.grad is not None:
                    self.given.add(each.sharded_param)
                elif whole.requires_grad:
                    self.missed.add(each.sharded_param)
                    whole.grad = torch.zeros_like(whole)
                if is_later:  # in the type of the others
                    each.to_accumulated_grad_if_needed()
        type(group).post_backward(group, *unused)


class _Reaches(torch.autograd.Function):
    """Lets backward go through a layer, though its output depends on no weight here, as it may on other members.

    They would wait for this one in the gathers of their backward. No gradient comes of it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> Any:
        return None, None


def _post_forward(group: Any, module: nn.Module, inputs: Any, output: Any) -> Any:
    weights = [each.unsharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
    if torch.is_grad_enabled():
        leaves, form = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # FSDP2 loses its hook of backward where a view is written in place.
        new = {id(each): each.clone() for each in tensors if each.requires_grad and each._is_view()}
        if weights and not any(tensor.requires_grad for tensor in tensors):
            floats, through = filter(Tensor.is_floating_point, tensors), cast(Any, _Reaches.apply)
            new = {id(each): through(each, weights[0]) for each in floats}
        if new:
            output = tree_unflatten([new.get(id(leaf), leaf) for leaf in leaves], form)
    return type(group).post_forward(group, module, inputs, output)


def _refuse_writes(group: Any) -> None:
    """Let the first forwards of a group raise if they write weights: the gathered ones are forgotten behind them."""
    before: list[Any] = []
    looks = [None] * LOOKS

    def begin(*given: Any) -> Any:
        found = type(group).pre_forward(group, *given)
        whole = (local(each.unsharded_param).detach() for each in group.fsdp_params)
        before[:] = [(weight, sample(weight).clone()) for weight in whole]
        return found

    def end(*given: Any) -> Any:
        for each, (weight, was) in zip(group.fsdp_params, before, strict=True):
            now = local(each.unsharded_param).detach()
            if now.data_ptr() != weight.data_ptr() or not torch.equal(sample(now), was):
                why = f"shard: a forward writes its parameter of shape {tuple(now.shape)}, which FSDP2 would forget"
                raise ConfigError(f"{why}; leave its layer whole by blocks=, or bound it by pipe.modify")
        looks.pop()
        if not looks:
            del group.pre_forward
            group.post_forward = partial(_post_forward, group)
        return _post_forward(group, *given)

    group.pre_forward, group.post_forward = begin, end


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
    for _, group in _groups([layer]):
        group.post_backward = BackwardEnd(group)
        _refuse_writes(group)


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
        for _, group in _groups(self.layers):
            group.post_backward.ran = False
        for layer in self.layers:
            layer.set_requires_gradient_sync(sums, recurse=False)
            layer.set_is_last_backward(last)

    def missing(self) -> set[nn.Parameter]:
        """Return the parameters that had no gradient in this step, and forget them."""
        found: set[nn.Parameter] = set()
        for _, group in _groups(self.layers):
            found |= group.post_backward.missed - group.post_backward.given
            group.post_backward.missed, group.post_backward.given = set(), set()
        return found

    def take_gradients(self, *, sums: bool, alone: bool) -> None:
        """Keep, or sum over members, gradients that no hook of FSDP2 has seen.

        Args:
            alone: behind a backward of weights alone, which calls no hook in time; else behind one that has left out
                layers without a gradient here.
        """
        for layer, group in reversed(list(_groups(self.layers))):
            if group.post_backward.ran and not alone:
                continue
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
