"""The norm of all gradients, measured without clipping, and parameters that have no gradient."""

from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe import Pipeline, Training


def _trained(streamed, training, **options):
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh())]
    draw = partial(torch.randn, 12, 6, generator=torch.Generator().manual_seed(1))
    batches = [(draw(), draw()) for _ in range(4)]
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    with Pipeline(layers, nn.functional.mse_loss, training=Training(optimizer, **training), **options) as pipe:
        found = [(loss, pipe.grad_norm) for loss in (pipe.train(batches) if streamed else map(pipe.step, batches))]
        state = {name: tensor.clone() for name, tensor in pipe.weights.state_dict().items()}
    return found, state


@pytest.mark.parametrize(
    ("streamed", "options"),
    [
        (False, {"num_workers": 1, "num_microbatches": 1}),
        (False, {"num_workers": 2, "num_microbatches": 4}),
        (True, {"num_workers": 4, "num_microbatches": 8, "schedule": "zb-h2"}),
        (False, {"num_workers": 2, "num_microbatches": 4, "schedule": "chimera"}),
        (True, {"num_workers": 4, "num_microbatches": 4, "replicas": 2}),
        (True, {"num_workers": 4, "num_microbatches": 4, "replicas": 2, "zero": 1}),
    ],
)
def test_the_norm_is_that_of_clipping_at_infinity(streamed, options):
    """A script that does not clip had no norm to log, unless it clipped at infinity."""
    (found, state), (clipped, expected) = (
        _trained(streamed, training, **options)
        for training in ({"log_grad_norm": True}, {"max_grad_norm": float("inf")})
    )
    assert found == clipped and all(norm > 0 for _, norm in found)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_norm_that_is_logged_changes_no_bit():
    logged, plain = (
        _trained(True, training, num_workers=2, num_microbatches=4) for training in ({"log_grad_norm": True}, {})
    )
    assert [loss for loss, _ in logged[0]] == [loss for loss, _ in plain[0]]
    assert [norm for _, norm in plain[0]] == [None] * 4
    assert all(torch.equal(logged[1][name], tensor) for name, tensor in plain[1].items())


def test_a_schedule_without_whole_steps_refuses_to_log_their_norm():
    with refused("log_grad_norm"):
        _trained(False, {"log_grad_norm": True}, num_workers=2, num_microbatches=4, schedule="pipedream")


class HalfUsed(nn.Module):
    """Leaves a layer out, which a stranger has forgotten."""

    def __init__(self):
        super().__init__()
        self.used, self.left, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, rows):
        return rows + self.used(rows).tanh()


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-v"}, {"replicas": 2, "num_workers": 4, "zero": 1}])
def test_parameters_without_a_gradient_are_named_once(options, caplog):
    """A layer that a block left out was no word, as the block has it; stages of the same layers say the same."""
    model = nn.Sequential(*(HalfUsed() for _ in range(4)))
    training = Training(partial(torch.optim.SGD, lr=0.01))
    options = {"num_workers": 2, "num_microbatches": 4} | options
    with Pipeline(model, nn.functional.mse_loss, training=training, **options) as pipe:
        for _ in range(2):
            pipe.step((torch.ones(8, 6), torch.zeros(8, 6)))
    (text,) = {record.getMessage() for record in caplog.records}
    assert text.startswith("parameters *.left.weight, *.left.bias: ")
    assert len(caplog.records) == pipe.spec.num_stages
