"""A script that logs each step to TensorBoard or wandb, without a watcher."""

from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from training_options import pipeline_with


def pipeline(**options):
    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    return pipeline_with(
        layers,
        nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        num_microbatches=2,
        **options,
    )


BATCH = torch.ones(6, 4), torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_script_logs_every_step_without_a_watcher(num_workers):
    logged = []
    with pipeline(num_workers=num_workers, max_grad_norm=1.0) as pipe:
        pipe.on_step(logged.append)
        losses = [pipe.step(BATCH), *pipe.train([BATCH, BATCH])]
        norm = pipe.grad_norm
    assert [report.step for report in logged] == [1, 2, 3]
    assert [report.loss for report in logged] == losses
    assert logged[-1].grad_norm == norm
    for report in logged:
        assert report.learning_rate == 0.5
        assert 0 <= report.lost_ms < report.step_ms
        assert report.rows_per_s == pytest.approx(6000 / report.step_ms)
        assert report.peak_bytes > 0
    assert set(logged[0]._asdict()) >= {"loss", "tokens_per_s"}


def test_an_evaluation_is_not_reported():
    logged = []
    with pipeline() as pipe:
        pipe.on_step(logged.append)
        pipe.evaluate(BATCH)
    assert logged == []


def test_what_the_users_function_raises_is_told_by_the_step():
    with pipeline() as pipe:
        pipe.on_step(lambda report: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.step(BATCH)


def test_a_function_that_cannot_be_called_is_refused():
    with pipeline() as pipe, refused("on_step"):
        pipe.on_step(3)
