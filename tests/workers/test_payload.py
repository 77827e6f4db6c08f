from collections import namedtuple

import pytest
import torch

from rpc_pipe.workers.transport.payload import map_tensors, pack, split_rows, unpack
from rpc_pipe.workers.transport.rpc import compact

Pair = namedtuple("Pair", "left right")


def test_a_tree_travels_whole_and_only_what_owes_a_gradient_is_a_leaf():
    learned = torch.ones(2, 3, requires_grad=True) * 2
    tree = {
        "x": (learned, None, True, 3, 2.5, "text"),
        "mask": [torch.tensor([True, False])],
        "pair": Pair(torch.zeros(1), 7),
    }
    back = unpack(pack(tree))
    assert back["x"][1:] == (None, True, 3, 2.5, "text")
    assert back["pair"].right == 7 and isinstance(back["pair"], Pair)
    assert back["x"][0].requires_grad and back["x"][0].is_leaf
    assert not back["mask"][0].requires_grad
    assert torch.equal(back["x"][0], learned)


def test_repeated_elements_are_counted_once_as_they_travel():
    """A tensor that was expanded from one number counted as all of its shape."""
    assert pack((torch.zeros(1).expand(100, 8), torch.ones(4, 2).t())).num_bytes == 4 + 32


def test_two_consumers_of_one_payload_do_not_share_gradients():
    payload = pack(torch.ones(2, requires_grad=True) * 1)
    first, second = unpack(payload), unpack(payload)
    first.sum().backward()
    assert second.grad is None and not payload.tensors[0].requires_grad


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo], ids=str)
@pytest.mark.parametrize("owes_grad", [False, True])
def test_what_is_sparse_travels_as_its_parts(layout, owes_grad):
    """`record_stream` is there for strided tensors alone, and so are other things."""
    tensor = torch.eye(3).to_sparse(layout=layout).requires_grad_(owes_grad)
    payload = pack((tensor, [tensor]))
    assert len(payload.tensors) == (2 if layout is torch.sparse_coo else 3)
    assert {part.layout for part in payload.tensors} == {torch.strided}
    back, (again,) = unpack(payload)
    assert back is again and back.layout == layout and torch.equal(back.to_dense(), torch.eye(3))
    assert back.is_leaf and back.requires_grad == owes_grad


def test_what_cannot_travel_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"output\['a'\]\[1\] is a set"):
        pack({"a": [1, {2}]})


@pytest.mark.parametrize("read", [pack, lambda tree: map_tensors(tree, torch.Tensor.cpu)])
def test_what_contains_itself_or_is_thousands_deep_is_refused_in_a_sentence(read):
    """The error was a RecursionError, which told nothing of payloads."""
    endless, deep = [torch.ones(2)], torch.ones(2)
    endless.append(endless)
    for _ in range(3000):
        deep = [deep]
    for tree in (endless, deep, {"x": deep}, {"x": endless}):
        with pytest.raises(
            TypeError, match="dicts that contain themselves, or lie hundreds deep in each other, cannot"
        ):
            read(tree)


def test_a_view_travels_without_its_storage():
    """The wire carries whole storages (torch/csrc/distributed/rpc/utils.cpp)."""
    big = torch.arange(1000.0)
    small = compact(big[10:20])
    assert small.untyped_storage().nbytes() == 40
    whole = compact(big)
    assert whole.data_ptr() == big.data_ptr(), "what fills its storage is not copied"


def test_a_transposed_tensor_keeps_its_strides():
    """Otherwise the consumer's kernels could take another path and round differently."""
    part = torch.arange(24.0).view(2, 12)[:, :6].t()
    dense = torch.arange(12.0).view(3, 4).t()
    assert compact(dense).stride() == dense.stride()
    assert torch.equal(compact(part), part)


@pytest.mark.parametrize("rows, parts, sizes", [(9, 8, [2] + [1] * 7), (8, 4, [2] * 4), (5, 5, [1] * 5)])
def test_rows_are_split_as_evenly_as_possible(rows, parts, sizes):
    pieces = split_rows((torch.arange(rows), {"flag": True}), parts)
    assert [len(piece[0]) for piece in pieces] == sizes
    assert all(piece[1] == {"flag": True} for piece in pieces)
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), torch.arange(rows))
