"""What repeats elements or has gaps travels once, and looks afterwards as it did."""

import random

import pytest
import torch

from rpc_pipe.workers.compute.modules.borders import stage_inputs
from rpc_pipe.workers.transport.payload import fold, is_dense, is_sparing, pack, unfold


def drawn(seed):
    """Return a view of a view, and so on, of some numbers."""
    draw = random.Random(seed)
    view = torch.arange(3.0 * 4 * 6).reshape(3, 4, 6)
    for _ in range(draw.choice((1, 2, 4))):
        place = draw.randrange(view.dim())
        size, other = view.shape[place], draw.randrange(view.dim())
        view = draw.choice((
            lambda view=view, place=place, size=size: view.narrow(place, size // 2, size - size // 2),
            lambda view=view, place=place, size=size: view.unfold(place, min(size, 3), 1),
            lambda view=view, place=place: view.narrow(place, 0, 1).squeeze(place).unsqueeze(place),
            lambda view=view, place=place: view.select(place, 0).unsqueeze(place).expand(-1, *[-1] * (view.dim() - 1)),
            lambda view=view, place=place, other=other: view.transpose(place, other),
            lambda view=view: view.unsqueeze(0).expand(5, *view.shape),
            lambda view=view, place=place, size=size: view[(slice(None),) * place + (slice(0, size, 2),)],
        ))()  # fmt: skip
    return view


@pytest.mark.parametrize("seeds", [range(at, at + 200) for at in range(0, 1000, 200)], ids=str)
def test_each_element_travels_once_and_the_view_is_as_it_was(seeds):
    for seed in seeds:
        view = drawn(seed)
        dense = fold(view)
        if not is_sparing(view.shape, view.stride()):
            continue  # windows of what has gaps itself
        count, merged = view.unique().numel(), dense.shape != view.shape and dense.dim() == 1
        assert is_dense(dense) and (count <= dense.numel() if merged else count == dense.numel()), seed
        found = unfold(dense.clone(), view.shape, view.stride())
        assert torch.equal(found, view) and found.stride() == view.stride(), seed


@pytest.mark.parametrize("seed", range(200))
def test_windows_that_overlap_over_rows_travel_too(seed):
    """Shape (2, 8, 2) of strides (16, 1, 16) was sent as a contiguous copy, and summed in another order."""
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3, 8)) for _ in range(draw.choice((2, 3, 4))))
    strides = tuple(draw.choice((0, 1, 2, 3, 8, 16, 48)) for _ in shape) if seed else (16, 1, 16)
    shape = shape if seed else (2, 8, 2)
    view = torch.arange(2000.0).as_strided(shape, strides)
    dense = fold(view)
    assert is_dense(dense) and view.unique().numel() <= dense.numel()
    found = unfold(dense.clone(), shape, strides)
    assert torch.equal(found, view) and found.stride() == strides
    assert seed or is_sparing(shape, strides)


def test_what_reaches_over_as_many_elements_as_it_has_may_repeat_some():
    """Such an input was copied as if it filled its memory: without its strides, so that it was summed otherwise."""
    view = torch.randn(3, 4)[:, :1].expand(3, 3)
    assert not is_dense(view)
    (given,) = stage_inputs(pack((view.requires_grad_(),)))[0]
    assert given.stride() == view.stride() == (4, 0)


@pytest.mark.parametrize("view", ["one window, repeated", "one channel, channels last"])
def test_dimensions_of_size_one_keep_their_strides(view):
    """By them kernels lay out what they make of a tensor: its exponentials were summed in another order."""
    if view == "one window, repeated":
        x = torch.randn(5, 8).as_strided((1, 4, 2), (8, 0, 8))
    else:
        x = torch.randn(2, 1, 40, 40).as_strided((2, 1, 40, 40), (1600, 1, 40, 1))
    (given,) = stage_inputs(pack((x.requires_grad_(),)))[0]
    assert given.stride() == x.stride() and given.exp().stride() == x.exp().stride()
    given.sum().backward()


def test_what_would_take_far_more_memory_than_is_in_it_is_not_spread_out():
    assert is_sparing((4,), (2**16,)) and is_sparing((2**40,), (0,))
    assert is_sparing((6, 3), (1, 1)) and is_sparing((3, 2, 3), (8, 1, 1)) and is_sparing((6, 3), (100, 100))
    assert not is_sparing((6, 3), (1000, 700))
    assert not is_sparing((4,), (2**20,)) and not is_sparing((2, 3), (2**40, 0))
