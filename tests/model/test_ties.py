"""Layers of a list that share a parameter may be cut apart: every stage holds it, and trains what one process would."""

import copy
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from training_options import pipeline_with

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
IDS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """Logits by the embedding's own weight."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def tied(sparse=False):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8, sparse=sparse)
    return [embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding)]


def loss(logits, ids):
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def trained(num_workers, steps=3, num_microbatches=1, layers=None, **options):
    pipe = pipeline_with(
        layers or tied(),
        loss,
        optimizer=SGD,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        **options,
    )
    return pipe, [pipe.step((IDS, IDS)) for _ in range(steps)]


@pytest.mark.parametrize(("num_workers", "sparse"), [(2, False), (4, False), (2, True)])
def test_two_holders_and_one_microbatch_have_the_bits_of_one_process(num_workers, sparse):
    """Of a sparse gradient and a dense one there was no sum."""
    layers = tied(sparse)
    plain = nn.Sequential(*copy.deepcopy(layers))
    optimizer = SGD(plain.parameters())
    expected = []
    for _ in range(3):
        expected.append(loss(plain(IDS), IDS))
        expected[-1].backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    pipe, losses = trained(num_workers, layers=layers, max_grad_norm=0.05)
    assert losses == [each.item() for each in expected]
    assert pipe.grad_norm == norm.item(), "the tie counts once"
    state = pipe.weights.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    assert layers[0].weight is layers[3].weight and torch.equal(layers[3].weight, state["3.weight"]), "trained in place"
    assert layers[3].bias.equal(state["3.bias"])


@pytest.mark.parametrize("schedule, workers", [("1f1b", 3), ("zb-v", 2), ("chimera", 2)])
def test_any_schedule_keeps_the_copies_alike(schedule, workers):
    layers = [*tied()[:1], nn.Linear(8, 8), *tied()[1:3]]
    layers.append(Head(layers[0]))
    expected = trained(1, num_microbatches=4, layers=copy.deepcopy(layers))[1]
    pipe, losses = trained(workers, num_microbatches=4, layers=layers, schedule=schedule)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    state = pipe.weights.state_dict()
    assert torch.equal(state["0.weight"], state["4.weight"])


def test_a_layer_may_be_in_the_list_twice_and_its_checkpoint_moves(tmp_path):
    def layers():
        torch.manual_seed(0)
        first = nn.Linear(8, 8)
        return [nn.Embedding(11, 8), first, nn.Tanh(), first, nn.Linear(8, 11)]

    pipe, _ = trained(3, layers=layers())
    pipe.checkpoints.save(tmp_path / "all")
    pipe.weights.save_pretrained(tmp_path / "weights")
    expected = pipe.step((IDS, IDS))
    for workers in (1, 2):
        other, _ = trained(workers, steps=0, layers=layers())
        other.checkpoints.load(tmp_path / "all")
        assert other.step((IDS, IDS)) == pytest.approx(expected, rel=1e-6)
        other, _ = trained(workers, steps=0, layers=layers())
        other.weights.load_pretrained(tmp_path / "weights")
        assert other.evaluate((IDS, IDS)) == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_shared_across_a_cut_is_refused():
    norm = nn.BatchNorm1d(8)
    with refused("model"):
        trained(2, layers=[nn.Linear(8, 8), norm, nn.Tanh(), norm])
    with refused("schedule"):
        trained(2, layers=tied(), schedule="pipedream")
    layers = tied()
    layers[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with refused("model"):
        trained(2, layers=layers)


class Codebook(nn.Module):
    """Moves frozen weights, of which backward reads what they have become."""

    def __init__(self):
        super().__init__()
        self.linear, self.book = nn.Linear(8, 8), nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        y = self.linear(x) * self.book
        self.book.data = torch.lerp(self.book.data, x.detach().abs().mean(0), 0.1)
        return y


def test_a_weight_that_is_given_other_memory_twice_in_a_forward_is_known():
    """Where backward is split, it read of the second call what the weight was then; in one process, what it is now."""
    torch.manual_seed(0)
    book, x, y = Codebook(), torch.randn(4, 8), torch.randn(4, 8)
    layers = [nn.Linear(8, 8), nn.Tanh(), book, nn.Tanh(), book]
    plain = nn.Sequential(*copy.deepcopy(layers))
    options = {"split": [2, 3], "num_workers": 2, "num_microbatches": 1, "optimizer": SGD}
    with pipeline_with(layers, nn.functional.mse_loss, schedule="zb-h1", **options) as pipe:
        pipe.step((x, y))
        state = pipe.weights.state_dict()
    optimizer = SGD([parameter for parameter in plain.parameters() if parameter.requires_grad])
    nn.functional.mse_loss(plain(x), y).backward()
    optimizer.step()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
