"""What is measured of blocks: bytes that are there once, and what kernels need while they run."""

import torch
from torch import nn

from rpc_pipe.planning.measure import measure
from rpc_pipe.planning.profile import Chain


def test_what_two_blocks_both_keep_is_there_once():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    apart = measure(blocks, x, target=y, loss_fn=nn.functional.mse_loss, repeats=1)
    joined = measure([nn.Sequential(*blocks)], x, target=y, loss_fn=nn.functional.mse_loss, repeats=1)
    # The output of a ReLU is kept by its backward, and by the next layer as its input.
    assert sum(cost.size.activations for cost in apart) > joined[0].size.activations
    assert Chain(apart).size(0, 3).activations == joined[0].size.activations
    assert Chain(apart).activations(1, 3) == (apart[1].size + apart[2].size).activations
    assert Chain(apart).activations(1, 1) == 0


class Wasteful(nn.Module):
    """Needs 50 times its inputs for a moment, which its backward does not keep."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            most = x.repeat(50, 1).max()
        return x * self.weight + most


def test_what_a_block_needs_while_it_runs_is_measured():
    x = torch.randn(32, 32)
    plain, wasteful = (measure([block], x, repeats=1)[0].size.working for block in (nn.Linear(32, 32), Wasteful()))
    assert 50 * x.nbytes <= wasteful < 54 * x.nbytes
    assert plain < 4 * x.nbytes
