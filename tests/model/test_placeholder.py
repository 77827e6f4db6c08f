"""What operators make of tensors without numbers has the form of what they make of tensors with numbers."""

import pytest
import torch
from torch import Tensor

from rpc_pipe.model.observe.placeholder import OPERATORS, Placeholder, PlaceholderFactory, on_shapes, storage_of
from rpc_pipe.model.observe.trees import mapped, tensors

aten = torch.ops.aten
X, IMAGE, MASK = torch.rand(4, 4) + 0.1, torch.rand(2, 4, 8, 8), torch.rand(4, 4) > 0.5
SPECIAL = {
    "alias": (X,), "detach": (X,), "view": (X, [2, 8]), "_unsafe_view": (X, [2, 8]), "t": (X,),
    "transpose": (X, 0, 1), "permute": (IMAGE, [0, 2, 3, 1]), "unsqueeze": (X, 1), "expand": (X[:1], [3, 4]),
    "slice": (X, 0, 1, 3), "select": (X, 0, 1), "split": (X, 2), "split_with_sizes": (X, [1, 3]), "unbind": (X,),
    "diagonal": (X,), "unfold": (X, 0, 2, 1), "squeeze.dim": (X[:1], 0), "squeeze.dims": (X[:1], [0]),
    "clone": (X.t(),), "_to_copy": (X.t(),), "cat": ([X, X],), "stack": ([X, X],), "constant_pad_nd": (X, [1, 1]),
    "roll": (X, [1]), "flip": (X, [0]), "repeat": (X, [2, 1]), "sum": (X, [1]), "mean": (X, [1]),
    "sum.default": (X,), "mean.default": (X,), "amax": (X, [1]), "amin": (X, [1]), "var": (X, [1]),
    "var_mean": (IMAGE, [1]), "cumsum": (X, 1), "linalg_vector_norm": (X,), "argmax": (X, 1), "mm": (X, X.t()),
    "bmm": (IMAGE[0], IMAGE[1]), "addmm": (X[0], X, X), "baddbmm": (IMAGE[0], IMAGE[0], IMAGE[1]),
    "embedding": (X, torch.tensor([[1, 2, 3]])), "native_layer_norm": (X, [4], X[0], X[1], 1e-5),
    "native_group_norm": (IMAGE, X[0], X[1], 2, 4, 64, 2, 1e-5),
    "native_batch_norm": (IMAGE, X[0], X[1], torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
    "_softmax": (X, 1, False), "_log_softmax": (X, 1, False),
    "nll_loss_forward": (X, torch.tensor([0, 1, 2, 3]), None, 1, -100),
    "convolution": (IMAGE, torch.rand(6, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
    "max_pool2d_with_indices": (IMAGE, [2, 2]), "avg_pool2d": (IMAGE, [2, 2]),
    "_adaptive_avg_pool2d": (IMAGE, [2, 2]), "upsample_nearest2d": (IMAGE, [16, 16]),
    "upsample_bilinear2d": (IMAGE, [16, 16], False), "where": (MASK, X, X.t()), "masked_fill.Scalar": (X, MASK, 0.0),
    "masked_fill_.Scalar": (X.clone(), MASK, 0.0), "masked_fill.Tensor": (X, MASK, torch.tensor(0.0)),
    "native_dropout": (X, 0.5, True), "clamp": (X, 0, 1), "clamp_min": (X, 0), "clamp_max": (X, 0),
    "pow.Scalar": (2, X), "logical_and": (MASK, MASK), "logical_or": (MASK, MASK), "bitwise_and": (MASK, MASK),
    "bitwise_or": (MASK, MASK), "bitwise_not": (MASK,), "bernoulli_": (X, 0.5), "empty_like": (X,),
    "ones_like": (X,), "zeros_like": (X,), "upsample_bicubic2d": (IMAGE, [16, 16], False), "_safe_softmax": (X, 1),
    "_scaled_dot_product_flash_attention_for_cpu": (IMAGE, IMAGE, IMAGE),
}  # fmt: skip


#: what is done to each element depends on the layout of all that takes part
LAYOUTS = {
    "contiguous": (X, X),
    "transposed": (X.t(), X.t()),
    "mixed": (X.t(), X),
    "broadcast": (X[0], X[:, :1].clone()),
}


def arguments(operator, layout):
    packet, overload = operator.name().removeprefix("aten::"), operator._overloadname
    name = packet.partition(".")[0]
    for key in (f"{name}.{overload}", name):
        if key in SPECIAL:
            return SPECIAL[key]
    needed = [a for a in operator._schema.arguments if not a.has_default_value()]
    left = list(LAYOUTS[layout] if operator._schema.name[-1] != "_" else (X, X[0]))
    by_type = {"Tensor": lambda: left.pop(0), "number": lambda: 2, "Scalar": lambda: 2, "float": lambda: 0.5}
    return tuple(by_type[str(a.type)]() for a in needed)


def form(tensor: Tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name())
def test_operators_of_shapes_alone_make_the_forms_that_real_ones_do(operator, layout):
    real = mapped(arguments(operator, layout), torch.clone)
    shapes = PlaceholderFactory()
    given = mapped(real, shapes.like)
    made, expected = on_shapes(operator, given, {}), operator(*real)
    assert all(isinstance(tensor, Placeholder) for tensor in tensors(made))
    assert [form(t) for t in tensors(made)] == [form(t) for t in tensors(expected)]

    def from_whom(results, given):
        return [[storage_of(t) == storage_of(other) for other in tensors(given)] for t in tensors(results)]

    assert from_whom(made, given) == from_whom(expected, real), "views are known as such"
    assert [any(t is other for other in tensors(given)) for t in tensors(made)] == [
        any(t is other for other in tensors(real)) for t in tensors(expected)
    ]
