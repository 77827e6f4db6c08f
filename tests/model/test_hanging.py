"""Hooks of parameters' gradients, and attributes, in models that are cut by observation: those of what is trained."""

import copy
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from unkind_layers import OwnHooks

from rpc_pipe.pipeline import Pipeline, Training

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8)


class Block(OwnHooks):
    """Halves a gradient by a method of its own, bounds another, and counts in a buffer, behind other arguments too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(self.halved)
        self.scale.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.scale.register_post_accumulate_grad_hook(self.count)
        self.linear.bias.register_post_accumulate_grad_hook(partial(Block.count, self))
        self.scale._no_decay = True


class Blocks(nn.Module):
    def __init__(self, tied=False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if tied:
            self.blocks[2].scale = self.blocks[0].scale

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def groups(named):
    """Return an optimizer of the parameters that are marked, if any is."""
    marked = [parameter for _, parameter in named if getattr(parameter, "_no_decay", False)]
    assert marked, "attributes are lost"
    return SGD([parameter for _, parameter in named])


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
@pytest.mark.parametrize("made", ["module", "function"])
def test_hooks_see_and_write_what_is_trained(made, schedule):
    """Those of a module wrote buffers of the user's model, not of the copy; of copies and functions they were lost."""
    torch.manual_seed(0)
    model = Blocks()
    pipe = Pipeline(
        model if made == "module" else Blocks, nn.functional.mse_loss, training=Training(groups), schedule=schedule,
        num_workers=2, num_microbatches=2, example=(X, Y),
    )  # fmt: skip
    expected = copy.deepcopy(model) if made == "module" else Blocks()
    for name, block in enumerate(expected.blocks):  # a deep copy has no hooks
        expected.blocks[name] = fresh = Block()
        fresh.load_state_dict(block.state_dict())
    expected.load_state_dict(pipe.weights.state_dict())
    optimizer = SGD(expected.parameters())
    for _ in range(2):
        for x, y in zip(X.split(2), Y.split(2), strict=True):
            (nn.functional.mse_loss(expected(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        pipe.step((X, Y))
    state = pipe.weights.state_dict()
    assert [int(state[f"blocks.{i}.counted"]) for i in range(3)] == ([8] * 3 if schedule == "1f1b" else [4] * 3)
    for name, parameter in expected.named_parameters():
        assert torch.equal(state[name], parameter), name
    if made == "module":
        assert torch.equal(model.blocks[0].scale, state["blocks.0.scale"]), "trained in place"
        assert int(model.blocks[0].counted) == int(state["blocks.0.counted"]), "so are buffers kept by hooks"


def test_a_hook_of_a_gradient_that_two_stages_have_parts_of_is_refused():
    with refused("model"):
        Pipeline(
            Blocks(tied=True), nn.functional.mse_loss, num_workers=2, num_microbatches=2, example=(X, Y)
        )  # fmt: skip


def test_a_parameter_with_hooks_may_be_frozen():
    """A hook that is a method of its module was hung on the copy of a parameter that nobody trains: torch raised."""
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    pipe = Pipeline(
        model, nn.functional.mse_loss, training=Training(SGD), num_workers=2, num_microbatches=2, example=(X, Y)
    )  # fmt: skip
    before = model.blocks[1].scale.detach().clone()
    pipe.step((X, Y))
    assert torch.equal(pipe.weights.state_dict()["blocks.1.scale"], before)
