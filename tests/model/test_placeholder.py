"""What operators make of tensors without numbers has the form of what they make of tensors with numbers."""

import pytest
import torch
from torch import Tensor

from rpc_pipe.model.observe.placeholder import Placeholder, PlaceholderFactory, on_shapes, storage_of
from rpc_pipe.model.observe.trees import mapped, tensors

aten = torch.ops.aten
X, IMAGE = torch.rand(4, 4) + 0.1, torch.rand(2, 4, 8, 8)
#: views, what is written in place, several results, and layouts that depend on those of the arguments
CALLS = [
    (aten.view.default, (X, [2, 8])), (aten.t.default, (X,)), (aten.split.Tensor, (X, 2)),
    (aten.clone.default, (X.t(),)), (aten.mm.default, (X, X)),
    (aten.expand.default, (X[:1], [3, 4])), (aten.slice.Tensor, (X, 0, 1, 3)), (aten.cat.default, ([X, X.t()],)),
    (aten.add_.Tensor, (X, X[0])), (aten.t_.default, (X,)), (aten.add.Tensor, (X.t(), X.t())),
    (aten.mul.Tensor, (X.t(), X)), (aten.mul.Tensor, (X[0], X[:, :1])), (aten._softmax.default, (X.t(), 1, False)),
    (aten.convolution.default, (IMAGE, torch.rand(6, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
    (aten.native_batch_norm.default, (IMAGE, X[0], X[1], torch.zeros(4), torch.ones(4), True, 0.1, 1e-5)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (IMAGE, IMAGE, IMAGE)),
]  # fmt: skip


def form(tensor: Tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


@pytest.mark.parametrize("operator, args", CALLS, ids=lambda each: getattr(each, "name", lambda: "")())
def test_operators_of_shapes_alone_make_the_forms_that_real_ones_do(operator, args):
    for _ in range(2):  # computed, then known from the first call
        _compared(operator, args)


def _compared(operator, args):
    real = mapped(args, torch.clone)
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


def test_a_known_result_is_that_of_the_same_call_alone():
    """Keys of a dict are equal where 1, 1.0 and True are, which give other dtypes; so does the default dtype."""
    counts, shapes = PlaceholderFactory().like(torch.arange(4)), PlaceholderFactory()
    found = [on_shapes(aten.add.Tensor, (counts, number), {}).dtype for number in (1, 1.0, True, 1.0)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.float32]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert on_shapes(aten.add.Tensor, (counts, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    x = shapes.like(X)
    for rows in ([2, 8], [8, 2], [2, 8]):
        view = on_shapes(aten.view.default, (x, rows), {})
        assert list(view.shape) == rows and storage_of(view) == storage_of(x)
    parts = [storage_of(part) for part in on_shapes(aten.unsafe_split.Tensor, (x, 2), {})]
    assert parts == [storage_of(part) for part in on_shapes(aten.unsafe_split.Tensor, (x, 2), {})]
