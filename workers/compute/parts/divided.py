"""Tensors that the members of a worker hold in parts: torch's DTensor."""

from typing import Any

import torch
from torch import Tensor

from ....dependency import ConfigError
from ..modules.torch_internals import let_item_call
from ..modules.torch_internals import local as local


def is_divided(tensor: Tensor) -> bool:
    """Return whether each member holds another part of a tensor."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def place(tensor: Any) -> tuple[object, list[int]]:
    """Return which part of a tensor is in this process, and the members of its mesh; nothing of a whole tensor."""
    if not is_divided(tensor):
        return (), []
    mesh = tensor.device_mesh
    cuts = zip(tensor.placements, mesh.shape, mesh.get_coordinate(), strict=True)
    return [(str(cut), *at) for cut, *at in cuts if not cut.is_replicate()], mesh.mesh.flatten().tolist()


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a part that is in this process as a tensor that is laid out as another one is."""
    if not hasattr(tensor, "_local_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def added(grad: Any, tensor: Any) -> Any:
    """Return a gradient in its tensor's layout, by a collective if each member has a summand, as of norms of parts."""
    summands = any(placement.is_partial() for placement in getattr(grad, "placements", ()))
    return grad.redistribute(placements=tensor.placements) if summands else grad


def part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of the part of a whole tensor that another tensor's layout has here, without a message."""
    if not hasattr(tensor, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    # A copy, as a view would keep the memory of the whole.
    return like(tensor, local(distribute_tensor(whole, mesh, placements, src_data_rank=None)).clone())


def whole_of(tensor: Tensor) -> Tensor:
    """Return a whole tensor; if it is divided, by a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def read_whole_numbers() -> None:
    """Let `item()` of a sum, mean or norm of a divided tensor be its number: torch gives the summand of this member."""
    let_item_call(_number)


def _number(_: object, args: tuple[Any, ...], kwargs: object) -> Any:
    (tensor,) = args
    summands = any(placement.is_partial() for placement in tensor.placements)
    if summands and torch.distributed.get_world_size() < tensor.device_mesh.size():
        why = "members: a number of a divided tensor is read outside of the pipeline, where it is a summand"
        raise ConfigError(f"{why}; read it in pipe.gather, or take full_tensor() on all members")
    return local(tensor.full_tensor() if summands else tensor).item()
