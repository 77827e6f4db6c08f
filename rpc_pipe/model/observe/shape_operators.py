"""The operators that placeholders run on meta tensors: their results' shapes, strides and dtypes are those on a CPU.

Fake tensors support all operators but are many times slower. A test compares each of these with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_OPERATORS = """
    alias.default detach.default view.default _unsafe_view.default t.default transpose.int permute.default
    unsqueeze.default squeeze.dim squeeze.dims expand.default slice.Tensor select.int split.Tensor
    split_with_sizes.default unbind.int diagonal.default unfold.default add_.Tensor add_.Scalar sub_.Tensor
    mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar silu_.default relu_.default leaky_relu_.default
    hardtanh_.default hardswish_.default masked_fill_.Scalar logical_not.default logical_and.default
    logical_or.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor clone.default _to_copy.default
    cat.default stack.default constant_pad_nd.default roll.default flip.default repeat.default sum.default
    sum.dim_IntList mean.default amax.default amin.default var.correction var_mean.correction cumsum.default
    linalg_vector_norm.default argmax.default baddbmm.default embedding.default convolution.default
    max_pool2d_with_indices.default avg_pool2d.default _adaptive_avg_pool2d.default add.Tensor add.Scalar sub.Tensor
    sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default exp.default log.default
    sqrt.default rsqrt.default reciprocal.default sin.default cos.default abs.default sign.default erf.default
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar tanh.default sigmoid.default silu.default gelu.default
    relu.default elu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default
    softplus.default mish.default clamp.default clamp_min.default clamp_max.default maximum.default minimum.default
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor isnan.default where.self masked_fill.Scalar masked_fill.Tensor native_dropout.default bernoulli_.float
    _softmax.default _log_softmax.default _safe_softmax.default nll_loss_forward.default empty_like.default
    ones_like.default zeros_like.default native_layer_norm.default native_group_norm.default
    native_batch_norm.default addmm.default mm.default bmm.default mean.dim upsample_nearest2d.default
    upsample_bilinear2d.default upsample_bicubic2d.default _scaled_dot_product_flash_attention_for_cpu.default
"""
_CONSTRUCTORS = """
    empty.memory_format empty_strided.default zeros.default ones.default full.default arange.default arange.start
    arange.start_step scalar_tensor.default rand.default randn.default eye.default linspace.default
"""


def _named(text: str) -> Iterator[Any]:
    for full_name in text.split():
        name, overload = full_name.split(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and overload in packet.overloads():
            yield getattr(packet, overload)


def _takes_data(operator: Any) -> bool:
    # The aliased arguments of a batch normalisation are its running means, which it does not return.
    is_batch_norm = operator is torch.ops.aten.native_batch_norm.default
    return is_batch_norm or not any(argument.alias_info for argument in operator._schema.arguments)


#: operator -> whether its arguments may be real tensors too: if its results are no views of them
OPERATORS = {operator: _takes_data(operator) for operator in _named(_OPERATORS)}
#: operators without tensor arguments
CONSTRUCTORS = frozenset(_named(_CONSTRUCTORS))
