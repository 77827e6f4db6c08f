"""What is measured of blocks: bytes that are there once, and what kernels need while they run."""

from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn

from bench.measured_layers import measure_layers
from rpc_pipe.dependency import B, F, G, I, U, W
from rpc_pipe.model.user_model import UserModel
from rpc_pipe.planning.measuring import block_timing, profiling
from rpc_pipe.planning.measuring.block_timing import _forward, scatter, time_blocks
from rpc_pipe.planning.measuring.profiling import profile_model, signature
from rpc_pipe.planning.measuring.timed_block import TimedBlock
from rpc_pipe.planning.profile import Chain


def test_what_two_blocks_both_keep_is_there_once():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    apart = measure_layers(blocks, x, target=y, loss_fn=nn.functional.mse_loss, repeats=1)
    joined = measure_layers([nn.Sequential(*blocks)], x, target=y, loss_fn=nn.functional.mse_loss, repeats=1)
    # The output of a ReLU is kept by its backward, and by the next layer as its input.
    assert sum(cost.size.activations for cost in apart) > joined[0].size.activations
    assert Chain(apart).size(0, 3).activations == joined[0].size.activations
    assert Chain(apart).size(1, 3).activations == (apart[1].size + apart[2].size).activations


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
    plain, wasteful = (
        measure_layers([block], x, repeats=1)[0].size.working for block in (nn.Linear(32, 32), Wasteful())
    )
    assert 50 * x.nbytes <= wasteful < 54 * x.nbytes
    assert plain < 4 * x.nbytes


class Noting(torch.optim.SGD):
    """Notes whose update is made."""

    def __init__(self, named, notes):
        super().__init__([parameter for _, parameter in named], lr=1.0)
        self.notes = notes

    def step(self, closure=None):
        self.notes.append(len(self.param_groups[0]["params"][0]))


@pytest.mark.parametrize(("walk", "order"), [(2**27, [[1, 2, 3]]), (0, [[1], [2], [3]])])
def test_updates_are_measured_of_all_blocks_in_turn_by_all_workers_at_once(monkeypatch, walk, order):
    """Of one block after the other they were measured in the caches, and alone: to a quarter of what a step's took."""
    monkeypatch.setattr(block_timing, "_GROUP_BYTES", walk)
    blocks, notes = [nn.Linear(1, 1), nn.Linear(1, 2), nn.Linear(2, 3)], []
    weights = [parameter.detach().clone() for block in blocks for parameter in block.parameters()]

    x = torch.randn(4, 1)
    measure_layers(
        blocks, x, optimizer=lambda named: Noting(named, notes), repeats=2, barrier=partial(notes.append, "barrier")
    )
    assert notes == [note for row in order for note in (*row, *2 * ("barrier", *row))]
    assert all(torch.equal(a, b) for a, b in zip(weights, [p for m in blocks for p in m.parameters()], strict=True))


@pytest.mark.parametrize(
    ("walk", "order"), [(2**27, ["F0F1F2", "B2B1B0", "F0F1F2", "B2B1B0"]), (0, ["F0B0F0B0", "F1B1F1B1", "F2B2F2B2"])]
)
def test_what_a_backward_reads_is_no_longer_in_the_caches(monkeypatch, walk, order):
    """A block's backward was timed right behind its forward: of a T5 it took 5 % longer in a stage."""
    monkeypatch.setattr(block_timing, "_GROUP_BYTES", walk)
    notes = []

    class Block(nn.Linear):
        def __init__(self, number):
            super().__init__(4, 4)
            self.number = number

        def forward(self, x):
            notes.append(f"F{self.number}")
            output = super().forward(x)
            output.register_hook(lambda grad: notes.append(f"B{self.number}"))
            return output

    blocks = [
        TimedBlock(lambda block=block: _forward(block, torch.ones(2, 4), None, False), list(block.named_parameters()))
        for block in map(Block, range(3))
    ]
    for block in blocks:
        block.run()
    notes.clear()
    time_blocks(blocks, 2)
    assert "".join(notes) == 2 * "".join(order)
    assert all(parameter.grad is None for block in blocks for _, parameter in block.named)


@pytest.mark.parametrize(("slower", "equal"), [(1.0, True), (2.0, False)])
def test_layers_that_compute_the_same_take_the_same_time(slower, equal):
    """Of eight equal layers a plan was cut 1,5,1,1, because noise had made one of them look slow."""

    def noisy(disturbed, factor=1.0):
        layer = nn.Linear(4, 4)
        block = TimedBlock(lambda: _forward(layer, torch.ones(2, 4), None, False), list(layer.named_parameters()))
        took = iter([9.0] * 5 + [factor * (3.0 if run < disturbed else 1.0) for run in range(3) for _ in range(5)])
        block._time = lambda kind, run: (run(), block.runs[kind].append(next(took)))
        return block

    blocks = [noisy(1), noisy(2), noisy(1, slower)]
    for block in blocks:
        block.run()
    time_blocks(blocks, 3)
    times = [block.times[F] for block in blocks]
    assert (times[0] == times[1] == times[2]) is equal, "only where the fastest runs agree that they are"
    assert scatter(blocks) > 0, "which a plan tells, as more noise than its plans differ by makes their order chance"


def test_a_model_that_does_not_fit_into_memory_is_estimated_when_asked():
    class Large(nn.ReLU):
        def forward(self, inputs):
            if inputs.device.type == "meta":
                return super().forward(inputs)
            raise torch.OutOfMemoryError

    x = torch.randn(4, 8)
    made = UserModel([nn.Linear(8, 8), Large()], (x, x), nn.functional.mse_loss)
    with refused("model"):
        profile_model(made, [2], repeats=1)
    times = profile_model(made, [2], estimate=True).measured[2][0].times
    assert times[F] == times[W], "what is counted is the same to a bit"


def test_what_is_estimated_holds_buffers_and_what_the_loss_keeps_and_a_shared_layer_once():
    """Estimates had walked the model by code of their own, which forgot the first two; the optimizer state of a layer
    that is there twice was counted twice, measured or not."""
    x, shared = torch.randn(4, 8), nn.Linear(8, 8)
    made = UserModel([shared, nn.BatchNorm1d(8), shared], (x, x), nn.functional.mse_loss)
    found = profile_model(made, [4], estimate=True)
    sizes = [cost.size for cost in found.measured[4]]
    assert sizes[1].weights == sum(t.nbytes for t in made.model[1].state_dict().values())
    assert sizes[2].activations == 3 * x.nbytes, "its input, and of the loss its output and the target"
    whole = Chain(found.measured[4], ties=found.ties).size(0, 1)
    assert whole.optimizer == sizes[0].optimizer + sizes[1].optimizer


def test_an_update_takes_as_long_whatever_the_rows():
    x = torch.randn(4, 64)
    made = UserModel([nn.Linear(64, 64)] * 2, (x, x), nn.functional.mse_loss)
    measured = profile_model(made, [1, 2, 4], repeats=1).measured
    assert {len({costs[block].times[kind] for costs in measured.values()}) for block in (0, 1) for kind in (U, G)} == {
        1
    }


@pytest.mark.parametrize(
    "change", [lambda net: net[0].requires_grad_(False), lambda net: setattr(net[1], "p", 0.5), lambda net: None]
)
def test_a_profile_is_of_what_is_trained_and_of_how_blocks_compute(change):
    """A model with frozen layers was planned by what had been measured when all were trained."""
    x = torch.randn(4, 8)

    def net():
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))

    changed = net()
    same = change(changed) is None and changed[0].weight.requires_grad and changed[1].p == 0.1
    names = [signature(UserModel(model, (x, x), nn.functional.mse_loss)) for model in (net(), changed)]
    assert (names[0] == names[1]) is same


def test_what_stages_take_besides_their_blocks_is_the_same_for_all_rows_and_for_split_backwards(monkeypatch):
    """It was that of the most rows, noise and all, and of I it was the first block's, which has none."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    wholes = iter([37.0, 37.0, 10.0])  # ms of a backward in one piece; the last one was disturbed

    def fake_times(blocks, repeats, tell):
        first, *others, whole = blocks
        first.runs = {F: [5.0], B: [10.0], I: [0.3], W: [10.0]}
        for block in others:
            block.runs = {F: [5.0], B: [10.0], I: [6.0], W: [4.0]}
        took = next(wholes)
        whole.runs = {F: [20.0], B: [took], I: [0.3], W: [took]}

    monkeypatch.setattr(profiling, "time_blocks", fake_times)
    user_model = UserModel(Net(), (torch.randn(8, 4), torch.randn(8, 4)), nn.functional.mse_loss)
    profile = profile_model(user_model, [2, 4, 8], repeats=1)
    for rows in (2, 4, 8):
        chain = Chain(profile.at(rows), profile.per_stage)
        one, three = ({kind: chain.time(kind, 1, stop) for kind in (F, B, I, W)} for stop in (2, 4))
        assert one == pytest.approx({F: 5.15, B: 10.15, I: 6.15, W: 4.15}), "a stage of one block is what was measured"
        assert three == pytest.approx({F: 15.15, B: 28.15, I: 16.15, W: 12.15}), "1 ms besides its blocks, once"
