"""The names of torch that the product uses and that torch does not promise, and the versions that have them.

A new version of torch is tried by `tests/test_torch_names.py` first: it says which name is gone.
"""

import inspect
from importlib import import_module

import torch
from torch import nn


def _source(module):
    return inspect.getsource(import_module(module))


def _group():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return inspect.getsource(FSDPParamGroup)


def _state():
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return inspect.getsource(FSDPState)


def _sharded():
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def _dtensor():
    from torch.distributed.tensor import DTensor

    return DTensor


_PARAMETER = nn.Parameter(torch.ones(1))
_GRAPH = (_PARAMETER * _PARAMETER).sum().grad_fn
#: name -> (an object that has it, or the source of a class that sets it; first and last version, None: all so far)
NAMES = {
    "_get_fsdp_state": (_sharded, "2.11", None),
    "_fsdp_param_group": (_state, "2.11", None),
    "_fsdp_param_groups": (_state, "2.13", None),
    "_training_state": (_group, "2.11", None),
    "_post_forward_indices": (_group, "2.11", None),
    "_to_sharded": (_group, "2.11", None),
    "reduce_grads": (_group, "2.11", None),
    "post_backward": (_group, "2.11", None),
    "finalize_backward": (_group, "2.11", None),
    "post_forward_mesh_info": (_group, "2.11", None),
    "mesh_info": (_group, "2.11", None),
    "reshard_after_backward": (_group, "2.11", None),
    "wait_for_unshard": (_group, "2.11", None),
    "_local_tensor": (_dtensor, "2.11", None),
    "_op_dispatcher": (_dtensor, "2.11", None),
    "_custom_op_handlers": (lambda: _dtensor()._op_dispatcher, "2.11", None),
    "_local_scalar_dense": (lambda: torch.ops.aten, "2.11", None),
    "_backward_hooks": (nn.Identity, "2.11", None),
    "_backward_pre_hooks": (nn.Identity, "2.11", None),
    "_forward_hooks": (nn.Identity, "2.11", None),
    "_forward_pre_hooks": (nn.Identity, "2.11", None),
    "_compiled_call_impl": (nn.Identity, "2.11", None),
    "_call_impl": (nn.Identity, "2.11", None),
    "_parameters": (nn.Identity, "2.11", None),
    "_modules": (nn.Identity, "2.11", None),
    "_buffers": (nn.Identity, "2.11", None),
    "_non_persistent_buffers_set": (nn.Identity, "2.11", None),
    "_metadata": (lambda: nn.Identity().state_dict(), "2.11", None),
    "_check_input_dim": (lambda: nn.BatchNorm1d(1), "2.11", None),
    "_flat_weights": (lambda: nn.LSTM(1, 1), "2.11", None),
    "_DropoutNd": (lambda: nn.modules.dropout, "2.11", None),
    "_BatchNorm": (lambda: nn.modules.batchnorm, "2.11", None),
    "_NormBase": (lambda: nn.modules.batchnorm, "2.11", None),
    "_base": (lambda: _PARAMETER, "2.11", None),
    "_is_view": (lambda: _PARAMETER, "2.11", None),
    "_post_accumulate_grad_hooks": (lambda: _PARAMETER, "2.11", None),
    "_raw_saved_self": (lambda: (_PARAMETER * _PARAMETER).grad_fn, "2.11", None),
    "_cdata": (lambda: _PARAMETER.untyped_storage(), "2.11", None),
    "_new_shared_cuda": (lambda: torch.UntypedStorage, "2.11", None),
    "_share_cuda_": (lambda: torch.UntypedStorage, "2.11", None),
    "_make_wrapper_subclass": (lambda: torch.Tensor, "2.11", None),
    "_schema": (lambda: torch.ops.aten.add.Tensor, "2.11", None),
    "_C": (lambda: torch, "2.11", None),
    "_autograd": (lambda: torch._C, "2.11", None),
    "_disabled_torch_function_impl": (lambda: torch._C, "2.11", None),
    "_len_torch_dispatch_stack": (lambda: torch._C, "2.11", None),
    "_ensureCUDADeviceGuardSet": (lambda: torch._C, "2.11", None),
    "_top_saved_tensors_default_hooks": (lambda: torch._C._autograd, "2.11", None),
    "_unsafe_set_version_counter": (lambda: torch._C._autograd, "2.11", None),
    "_foreach_norm": (lambda: torch, "2.11", None),
    "_nested_tensor_from_mask_left_aligned": (lambda: torch, "2.11", None),
    "_ctc_loss": (lambda: torch.ops.aten, "2.11", None),
    "_safe_softmax": (lambda: torch.ops.aten, "2.11", None),
    "_softmax": (lambda: torch.ops.aten, "2.11", None),
    "_unsafe_view": (lambda: torch.ops.aten, "2.11", None),
    "_checkpoint_wrapped_module": (
        lambda: _source("torch.distributed.algorithms._checkpoint.checkpoint_wrapper"), "2.11", None
    ),
    "_orig_mod": (lambda: _source("torch._dynamo.eval_frame"), "2.11", None),
    "_qualified_op_name": (lambda: _source("torch._ops"), "2.11", None),
    "_is_param": (lambda: _source("torch.nn.parameter"), "2.11", None),
    "torch._C._distributed_rpc._invoke_rpc_python_udf": (None, "2.11", None),
    "torch._C._dynamo.eval_frame": (None, "2.11", None),
    "_FrameAction": (lambda: torch._C._dynamo.eval_frame, "2.11", None),
    "_FrameExecStrategy": (lambda: torch._C._dynamo.eval_frame, "2.11", None),
    "torch._functorch.config": (None, "2.11", None),
    "torch.utils._pytree.tree_flatten": (None, "2.11", None),
    "torch.utils._pytree.tree_unflatten": (None, "2.11", None),
    "torch._subclasses.fake_tensor.DataDependentOutputException": (None, "2.11", None),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": (None, "2.11", None),
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": (None, "2.11", None),
    "torch._subclasses.fake_tensor.FakeTensor": (None, "2.11", None),
    "torch._subclasses.fake_tensor.FakeTensorMode": (None, "2.11", None),
    "torch.autograd.graph._engine_run_backward": (None, "2.11", None),
    "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter": (None, "2.11", None),
    "torch.distributed.rpc.api._default_pickler": (None, "2.11", None),
    "torch.overrides._get_current_function_mode": (None, "2.11", None),
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": (None, "2.11", None),
    "torch.utils._python_dispatch.TorchDispatchMode": (None, "2.11", None),
    "torch.utils._python_dispatch._disable_current_modes": (None, "2.11", None),
}  # fmt: skip
#: private names of others: the standard library, numpy, Hugging Face, and beginnings of names
OTHERS = {
    "_SubParsersAction", "_asdict", "_attn_implementation", "_bit_generator", "_current_frames", "_exit", "_getframe",
    "_option_string_actions", "_pad_token_tensor", "_rand", "_tied_weights_keys", "_tp_plan", "_raw_saved_",
    "_update_model_kwargs_for_generation",
}  # fmt: skip
