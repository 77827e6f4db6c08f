"""Words that a new user met where nothing was wrong."""

import pytest
import torch
from saved_training import BATCHES, pipeline

from rpc_pipe import Pipeline
from rpc_pipe.commands.main import as_typed, main
from rpc_pipe.dependency import BatchError, WorkerFailure
from rpc_pipe.dependency.pipeline_options import Options
from rpc_pipe.model.batches.microbatches import Microbatches, rows_in
from rpc_pipe.model.sharding import settle_sharing


def test_an_evaluation_of_one_row_is_no_larger_bubble(caplog):
    pipe = pipeline(2)
    row = tuple(tensor[:1] for tensor in BATCHES[0])
    pipe.evaluate(row), pipe.predict(row[0])
    assert not [record for record in caplog.records if record.name.endswith("batch_reader")]


@pytest.mark.parametrize(
    "typed, is_free",
    [
        ("simulate --replicas 2 --workers 4", True),
        ("simulate --replicas 2 --workers 4 --comm 1", False),
        ("simulate --replicas 2 --workers 4 --uplink 1MB --payload 1MB", False),
        ("simulate --replicas 2 --workers 4 --cost F=1,B=2,G=1", False),
        ("simulate --workers 4", False),
        ("compare --replicas 2 --workers 4 --microbatches 4", True),
        ("compare --replicas 2 --workers 4 --microbatches 4 --comm 1", False),
    ],
)
def test_a_free_exchange_of_replicas_is_said_to_be_free(capsys, typed, is_free):
    """Replicas seemed to cost nothing, as no line said that their exchange was not priced."""
    assert main(typed.split()) == 0
    assert ("replicas exchange gradients in no time" in capsys.readouterr().out) == is_free


@pytest.mark.parametrize(
    "text, typed, shown",
    [
        ("split [5, 5]: add up to 4", "--split 5,5", "--split 5,5: add up to 4"),
        ("shard='tp': no plan", "--shard tp", "--shard tp: no plan"),
        ("num_workers: 20 stages", "--workers 20", "--workers 20: 20 stages"),
        ("memory: too little", "--memory=", "--memory '': too little"),
        ("replicas 2 with 3 workers: no", "--replicas 2", "--replicas 2 with 3 workers: no"),
    ],
)
def test_an_error_shows_the_value_as_it_was_typed(text, typed, shown):
    """`--split 5,5` was refused as `--split [5, 5]`, and `--workers 20` as 20 stages of no option."""
    assert as_typed(text, ["run", *typed.split()]) == shown


@pytest.mark.parametrize(
    "layers, target, place",
    [
        ([torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)], torch.ones(4, 4), "float32[1, 4]: 1 row; fewer"),
        ([torch.nn.Linear(4, 4)], torch.zeros(4, dtype=torch.int32), "output float32[1, 4] and target int32[1]"),
    ],
    ids=["too few rows", "a wrong target"],
)
def test_a_failure_shows_the_shapes_that_it_comes_from(layers, target, place):
    """A batch norm of one row, and a target of a wrong type, showed the input of the stage alone."""
    loss_fn = torch.nn.functional.mse_loss if target.is_floating_point() else torch.nn.functional.cross_entropy
    with pytest.raises(WorkerFailure) as caught:
        Pipeline(layers, loss_fn, num_microbatches=4).step((torch.ones(4, 4), target))
    assert place in str(caught.value)


def test_the_order_of_a_batchs_names_changes_no_weight():
    """Patches of images counted as rows where they came first: the same microbatches had two losses."""
    batch = {"pixels": torch.ones(32, 4), "ids": torch.ones(2, 5), "labels": torch.ones(2, 5), "grid": torch.ones(3, 3)}
    assert {rows_in(batch), rows_in(dict(reversed(batch.items())))} == {2}
    assert rows_in((torch.ones(24, 4), torch.ones(2, 4))) == rows_in((torch.ones(2, 4), torch.ones(24, 4))) == 2


def test_one_microbatch_is_a_batch_that_needs_no_cut():
    """Patches of images beside rows were refused for a cut that nobody had asked for."""
    given = {"pixels": torch.ones(32, 4), "ids": torch.ones(2, 5), "labels": torch.ones(2, 5)}
    found = Microbatches.of((given, None), None, 1, 0, lambda pair: pair)
    assert found.rows == 2 and found.shares == [1.0] and found.inputs[0]["pixels"].shape == (32, 4)
    with pytest.raises(BatchError):
        Microbatches.of((given, None), None, 2, 0, lambda pair: pair)


def test_the_form_of_members_that_are_not_there_is_warned_of(caplog):
    """`--shard fsdp` without `--members` trained undivided stages, and no line said so."""
    assert settle_sharing(Options(shard="fsdp")).count == 1
    assert [record.args for record in caplog.records] == [("fsdp",)]
    caplog.clear()
    assert settle_sharing(Options()).count == 1 and not caplog.records
