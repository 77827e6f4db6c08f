"""Models and hooks that look at numbers and compute nothing by them: logs, and assertions that all are finite."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from rpc_pipe import ConfigError, Pipeline, WorkerFailure

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


class Asserting(nn.Module):
    """Asserts between its blocks that what they return is finite, as much research code does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            assert torch.isfinite(x).all(), "not finite"
            if torch.isnan(x).any():
                raise ValueError("a nan")
        return self.head(x)


def _steps(model, workers, between=lambda model: None):
    """Return the losses of two steps by a pipeline and, in plain PyTorch, of a copy of the model."""
    alone = copy.deepcopy(model)
    optimizer, found = torch.optim.SGD(alone.parameters(), lr=0.1), []
    pipe = Pipeline(
        model, nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), num_workers=workers,
        num_microbatches=1,
    )  # fmt: skip
    for _ in range(2):
        loss = nn.functional.cross_entropy(alone(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((pipe.step((X, Y)), loss.item()))
        between(model)
    return pipe, found


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_model_asserts_that_its_activations_are_finite(workers):
    """It was refused, as the assertion needs numbers that other stages lack."""
    torch.manual_seed(0)
    pipe, found = _steps(Asserting(), workers)
    assert all(ours == alone for ours, alone in found)
    with pytest.raises(WorkerFailure, match=r"worker 0 failed .*AssertionError: not finite"):
        pipe.step((torch.full_like(X, float("nan")), Y))


def test_a_hook_logs_the_spread_of_activations():
    """It was refused, and is called once for each microbatch, where the numbers are."""
    torch.manual_seed(0)
    model, log = Asserting(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, made: log.append((module, made.std().item())))
    _, found = _steps(model, 2)
    assert all(ours == alone for ours, alone in found)
    ours = [value for module, value in log if module is model.blocks[0]]
    assert len(ours) - 2 <= 1  # once more where the forward is observed


def test_a_hook_that_is_registered_later_is_called():
    """It was refused, as stages had copies of the blocks."""
    torch.manual_seed(0)
    seen = []
    _, found = _steps(
        Asserting(), 2, lambda model: model.blocks[1].register_forward_hook(lambda module, *_: seen.append(module))
    )
    assert all(ours == alone for ours, alone in found)
    assert len(seen) == 1


class Balanced(nn.Module):
    """A block that sets a loss of its own, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear, self.aux = nn.Linear(8, 8), 0.0

    def forward(self, x):
        self.aux = self.linear(x).softmax(-1).mean(0).square().sum()
        return x + self.linear(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_reads_what_blocks_have_set(workers):
    """It read the initial value for ever; what another stage has set is refused."""
    torch.manual_seed(0)
    whole = Asserting()
    whole.blocks = nn.ModuleList(Balanced() for _ in range(4))
    alone = copy.deepcopy(whole)

    def loss_of(some):
        return lambda output, target: nn.functional.cross_entropy(output, target) + sum(b.aux for b in some.blocks)

    pipe = Pipeline(whole, loss_of(whole), num_workers=workers, num_microbatches=1)
    if workers == 1:
        assert pipe.step((X, Y)) == loss_of(alone)(alone(X), Y).item()
    else:
        with pytest.raises(ConfigError, match=r"loss_fn: refers to modules, and blocks\.0\.aux is left by a block"):
            pipe.step((X, Y))
