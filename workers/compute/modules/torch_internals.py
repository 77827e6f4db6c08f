"""Private functions of torch that computing uses, in one place: a new torch can break it here alone.

Fake tensors stand in `model/placeholder.py`, the RPC agent in `transport/rpc.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchNorm", "NormBase"]
#: a context that hides calls from function modes and subclasses
without_torch_function = torch._C.DisableTorchFunction


# --- autograd


def run_backward(roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Do as `torch.autograd.backward(roots, grads)` does.

    Its checks for subclasses, batched gradients and symbolic shapes take a fifth of a microbatch of two small layers.
    The engine itself checks shapes, types and devices once more.
    """
    if not all([_is_plain(root, grad) for root, grad in zip(roots, grads, strict=True)]):
        torch.autograd.backward(roots, grads)
        return
    begun = [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, grads, strict=True)]
    _engine_run_backward(tuple(roots), tuple(begun), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(root: Tensor, grad: Tensor | None) -> bool:
    """Return whether no check is needed: torch's plain tensor, and a gradient or a loss."""
    if type(root) is not Tensor or root.is_nested:
        return False
    return grad is not None or (root.numel() == 1 and root.is_floating_point())


def set_version(tensor: Tensor, version: int) -> None:
    """Set the version of a tensor, which autograd compares."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def no_view(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that to autograd is no view of it."""
    view: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return view


def has_saved_tensor_hooks() -> bool:
    """Return whether the caller has set hooks of saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keep_donated_buffers() -> None:
    """Let compiled functions run in a backward that keeps its graph: a split one runs each of them once all the same.

    The default is set, because the setting by name counts in one thread, and autograd has other threads.
    """
    from torch._functorch import config

    config._config["donated_buffer"].default = False  # type: ignore[attr-defined]


def keep_uncompiled(function: Any) -> None:
    """Let a function that compiled code calls, as hooks of saved tensors, run as it is written: versions are numbers.

    The compiler is not imported for it.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def keep_device_guard() -> None:
    """Let threads that end compile, where torch is built for GPUs and there is none.

    Forwards on shapes install a guard of devices that belongs to their thread, once a process. In torch 2.11 the guard
    stays installed when its thread has ended, and the next compilation crashes.
    """
    if torch.backends.cuda.is_built() and not torch.accelerator.is_available():
        torch._C._ensureCUDADeviceGuardSet()


# --- memory that several processes use


def share_device_memory(memory: Tensor) -> tuple[Any, ...]:
    """Return the handle of a tensor's memory on a GPU, plain values."""
    return tuple(memory.untyped_storage()._share_cuda_())


def open_device_memory(index: int, handle: Sequence[Any]) -> torch.UntypedStorage:
    """Return another process's memory, on the GPU that has this index here."""
    return torch.UntypedStorage._new_shared_cuda(index, *handle[1:])


# --- modes


class OperatorMode(TorchDispatchMode):
    """A mode that sees operators, and imports no compiler for it: compiled functions run as they were written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_current(mode: TorchFunctionMode) -> bool:
    """Return whether a function mode is the innermost one."""
    return _get_current_function_mode() is mode


# --- gradients


def divisor_of(node: Any) -> float | None:
    """Return the divisor of a node of a graph; None: it does something else, or is not known."""
    divisor = getattr(node, "_saved_other", None) if node.name().startswith("DivBackward") else None
    return float(divisor) if isinstance(divisor, Tensor) and divisor.numel() == 1 else None


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """Return the norm of each tensor, with the bits of `clip_grad_norm_`."""
    norms: Sequence[Tensor] = torch._foreach_norm(list(tensors), order) if tensors else ()
    return norms


def by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one device by type, in torch's order of groups."""
    groups = _group_tensors_by_device_and_dtype([list(tensors)]).values()
    return [[each for each in of_type if each is not None] for ([of_type], _) in groups]


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process: all of it, unless it is a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def let_item_call(function: Any) -> None:
    """Let `item()`, `float` and `bool` of every DTensor call `function(operation, arguments, keywords)`."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = function
