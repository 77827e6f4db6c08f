"""Unequal microbatches trained in another order than given."""

from functools import partial

import pytest
import torch
from processes import python
from small_pipeline import X, Y, pipeline
from torch import nn

from rpc_pipe import BatchError, ConfigError, Listener, SplitBatch
from rpc_pipe.commands.main import main
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.call_difference import difference

ROWS = [1, 4, 2, 3]
#: by rows, the longest in the middle
ORDER = [0, 3, 1, 2]


def ragged():
    return SplitBatch(zip(X.split(ROWS), Y.split(ROWS), strict=True))


class Orders(Listener):
    def __init__(self):
        self.seen = []

    def step_finished(self, record):
        self.seen.append(list(record.microbatch_order))


def trained(batches, streamed=False, **options):
    """Return the weights after some steps, and the orders of the steps' records."""
    orders = Orders()
    with pipeline(**options) as pipe:
        pipe.listen(lambda worker: orders if worker == 0 else Listener())
        losses = list(pipe.train(batches)) if streamed else [pipe.step(batch) for batch in batches]
        return losses, pipe.weights.state_dict(), orders.seen


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "pipedream"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_balanced_step_is_the_step_of_microbatches_in_that_order(schedule, streamed):
    by_hand = SplitBatch(ragged()[m] for m in ORDER)
    expected = trained([by_hand] * 2, streamed, schedule=schedule)
    found = trained([ragged()] * 2, streamed, schedule=schedule, microbatch_order="balanced")
    assert found[0] == expected[0] and found[2] == [ORDER] * 2 and expected[2] == [[], []]
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


def test_slices_of_microbatches_follow_their_order():
    def halves(order):
        whole = torch.arange(240.0).view(10, 4, 6).sin()
        parts = [(x, x[..., :4].sum(-1, keepdim=True).expand(-1, -1, 4)) for x in whole.split(ROWS)]
        return SplitBatch(parts[m] for m in order)

    layers = [partial(nn.Linear, 6, 8), nn.Tanh, partial(nn.Linear, 8, 4)]
    found = []
    for order, named in ((range(4), "balanced"), (ORDER, "given")):
        with pipeline(layers, nn.functional.mse_loss, slices=2, microbatch_order=named) as pipe:
            found.append(([pipe.step(halves(order)) for _ in range(2)], pipe.weights.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


def test_only_some_parts_of_steps_are_kept(monkeypatch):
    monkeypatch.setattr("rpc_pipe.model.batches.step_inputs.MOST_PARTS", 2)
    monkeypatch.setattr("rpc_pipe.workers.actor.MOST_PARTS", 2)
    with pipeline() as pipe:
        for rows in range(1, 5):
            pipe.step(SplitBatch(zip(X.split(rows), Y.split(rows), strict=True)))
        assert max(len(actor._bound) for actor in pipe.actors) <= 2
        pipe.evaluate((X, Y))


def test_equal_microbatches_keep_their_order_and_bits():
    equal = X[:8], Y[:8]
    expected, found = trained([equal] * 2), trained([equal] * 2, microbatch_order="balanced")
    assert found[0] == expected[0] and found[2] == expected[2] == [[], []]


def test_outputs_come_in_the_order_of_their_rows():
    with pipeline(microbatch_order="balanced") as pipe, pipeline() as other:
        assert torch.equal(pipe.predict(X), other.predict(X))


def test_a_cost_is_called_as_the_model_is():
    """Of a whole model it gets the arguments of its forward by their names."""
    seen = []

    def cost(x):
        seen.append(len(x))
        return 1.0 / len(x)

    for model in (None, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))):
        found = trained([ragged()], model=model, microbatch_order="balanced", microbatch_cost=cost)
        assert found[2] == [[1, 2, 0, 3]]
    assert seen == ROWS * 2


def test_a_cost_may_tell_the_seconds_of_each_stage():
    found = trained([ragged()], microbatch_order="balanced", microbatch_cost=lambda x: [1.0 / len(x)] * 2)
    assert found[2] == [[1, 2, 0, 3]]


@pytest.mark.parametrize("time", [float("nan"), -1.0, None, float("inf"), [1.0] * 3, [1.0, float("nan")]])
def test_a_cost_that_is_no_time_is_refused(time):
    with pipeline(microbatch_order="balanced", microbatch_cost=lambda x: time) as pipe, pytest.raises(ConfigError):
        pipe.step(ragged())


def test_microbatches_without_a_size_are_refused():
    """A worker in the middle may be given neither inputs nor targets, and could find no order."""
    pipe = pipeline(microbatch_order="balanced")
    with pipe, pytest.raises(BatchError):
        pipe.step(SplitBatch([(None, Y[:2]), (None, Y[2:8])]))


def test_a_cost_that_raises_is_a_refusal_with_its_cause():
    """The script ended in the bare KeyError of its function."""
    with (
        pipeline(microbatch_order="balanced", microbatch_cost=lambda x: {}["images"]) as pipe,
        pytest.raises(ConfigError) as raised,
    ):
        pipe.step(ragged())
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_cost_without_an_order_that_goes_by_it_is_refused():
    """It was never called, and the script's author saw no gain of it."""
    with pytest.raises(ConfigError):
        pipeline(microbatch_cost=len)


@pytest.mark.parametrize("options", [{"microbatch_order": "sorted"}, {"microbatch_cost": 3}])
def test_an_order_that_is_none_is_refused(options):
    with pytest.raises(ConfigError):
        pipeline(**options)


def test_workers_that_find_other_orders_disagree():
    call = Call(0, "step 3", order="0 2 1")
    assert difference(call, 1, call._replace(worker=1).told()) is None
    for other in ("0 1 2", ""):
        assert difference(call, 1, call._replace(order=other).told()) is not None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_verify_compares_with_one_process_that_sums_in_the_same_order(schedule, capsys):
    asked = ["verify", "gpt", "--transport", "local", "--steps", "2", "--microbatches", "4", "--schedule", schedule]
    assert main([*asked, "--lengths", "3,16,5,9", "--microbatch-order", "balanced"]) == 0
    assert "identical" in capsys.readouterr().out


def test_lengths_are_of_gpt_alone():
    for model, lengths in (("mlp", "3,2"), ("gpt", "3,17")):
        assert main(["verify", model, "--lengths", lengths]) == 2


def test_a_pipeline_that_takes_microbatches_as_they_come_loads_no_planner():
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/rpc_pipe']; from small_pipeline import *; "
        "sys.modules.pop('rpc_pipe.planning.unequal', None); "
        "pipeline().step((X, Y)); assert 'rpc_pipe.planning.unequal' not in sys.modules"
    )
    assert python("-c", code).returncode == 0
