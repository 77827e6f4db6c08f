"""Models and hooks that look at numbers and compute nothing by them: logs, and assertions that all are finite."""

import copy
from functools import partial

import pytest
import torch
from refusals import failed, refused
from torch import nn

from rpc_pipe import Pipeline, Training

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
        model, nn.functional.cross_entropy, training=Training(partial(torch.optim.SGD, lr=0.1)), num_workers=workers,
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
    with failed(AssertionError):
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


class Encoder(nn.Module):
    """torch's encoder, with a padding mask."""

    def __init__(self, norm_first, batch_first, **nested):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, norm_first=norm_first, batch_first=batch_first)
        self.batch_first, self.encoder = batch_first, nn.TransformerEncoder(layer, 4, **nested)

    def forward(self, x, mask):
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=mask)
        x = x if self.batch_first else x.transpose(0, 1)
        return (x * ~mask[..., None]).sum(1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("nested", [{}, {"enable_nested_tensor": False}])
@pytest.mark.parametrize(("norm_first", "batch_first"), [(False, True), (True, False)])
def test_an_encoder_is_evaluated_with_a_padding_mask(norm_first, batch_first, nested):
    """With default arguments it was refused, as if a block had written something in place."""
    torch.manual_seed(0)
    model = Encoder(norm_first, batch_first, **nested)
    x, mask = torch.randn(8, 7, 16), torch.arange(7).expand(8, 7) > 4
    alone = copy.deepcopy(model).eval()
    pipe = Pipeline(model, lambda output, batch: output.square().mean(), num_workers=2, num_microbatches=1)
    alone.encoder.use_nested_tensor = False  # in which rows of padding cost nothing, and sums have another order
    with torch.no_grad():
        wanted = alone(x, mask).square().mean().item()
    assert pipe.evaluate({"x": x, "mask": mask}) == wanted


class Unlike(nn.Linear):
    """Raises once, in its first call."""

    def __init__(self):
        super().__init__(8, 8)
        self.seen = []

    def forward(self, x):
        if not self.seen:
            self.seen.append(1)
            raise ValueError("not yet")
        return super().forward(x)


def test_what_a_block_raises_where_it_is_observed_is_told(caplog):
    """It was tried again, with random numbers, and nobody was told why."""
    model = Asserting()
    model.blocks[1] = Unlike()
    with caplog.at_level("DEBUG", "rpc_pipe.model"), failed(ValueError):
        Pipeline(model, nn.functional.cross_entropy, num_workers=2, num_microbatches=1).evaluate((X, Y))
    assert "block blocks.1 runs on random numbers, as it raised on shapes: ValueError('not yet')" in caplog.text


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
        with refused("loss_fn"):
            pipe.step((X, Y))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_loss_reads_what_the_last_block_has_set(workers):
    """It was refused, as if it read all blocks, and the stage that computes it has this one."""
    torch.manual_seed(0)
    whole = Asserting()
    whole.blocks = nn.ModuleList(Balanced() for _ in range(4))
    alone = copy.deepcopy(whole)

    def loss_of(last):
        return lambda output, target: nn.functional.cross_entropy(output, target) + last.aux

    sgd, ours = partial(torch.optim.SGD, lr=0.1), loss_of(whole.blocks[-1])
    pipe = Pipeline(whole, ours, training=Training(sgd), num_workers=workers, num_microbatches=1)
    optimizer = sgd(alone.parameters())
    for _ in range(3):
        loss = loss_of(alone.blocks[-1])(alone(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step((X, Y)) == loss.item()
