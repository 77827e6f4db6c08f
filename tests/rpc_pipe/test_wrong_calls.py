"""Options and batches that cannot be: each is refused in a sentence that says what would be right."""

from functools import partial

import pytest
import torch
from small_pipeline import SGD, X, Y, pipeline
from torch import nn

from rpc_pipe.dependency import ConfigError

SLOWER = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda pipe: pipe.step(X), r"batch is a Tensor: must be \(inputs, targets\)"),
        (lambda pipe: pipe.step((X, Y, X)), "batch is a tuple of 3: must be"),
        (lambda pipe: pipe.step((X[:0], Y[:0])), "the batch has no rows: needs at least 1"),
        (lambda pipe: pipe.checkpoint_every(0, "x"), "steps 0: must be a whole number, at least 1"),
        (lambda pipe: pipe.save_checkpoint("x", keep=-1), "keep -1: must be a whole number, at least 1"),
        (lambda pipe: pipe.step(), r"pass a batch, \(inputs, targets\), or else microbatches="),
        (lambda pipe: pipe.step((X, Y), microbatches=[(X, Y)]), "pass a batch, "),
        (lambda pipe: pipe.step(microbatches=[]), "must be a list of at least one"),
        (
            lambda pipe: pipe.step((torch.ones(6, 6).tril(), torch.ones(6, 6))),
            "6 x 6 that is one triangle looks",
        ),
        (lambda pipe: pipe.step(microbatches=[(X, Y), (X[:0], Y[:0])]), "microbatch 1 has no rows"),
        (lambda pipe: pipe.evaluate(microbatches=[(X, Y), X]), "microbatch 1 is a Tensor"),
    ],
)
def test_what_is_no_batch_or_no_number_is_refused_in_one_sentence(call, message):
    with pytest.raises(ConfigError, match=message):
        call(pipeline())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_workers": 9}, "stages 9: the model has only 4 layers"),
        ({"num_workers": 0}, "num_workers 0: must be a whole number, at least 1"),
        (
            {"num_microbatches": 0},
            "num_microbatches 0: must be a whole number, at least 1; without a plan there is no default",
        ),
        ({"stall_s": float("nan")}, "stall_s nan: must be a number of seconds above 0"),
        ({"num_microbatches": 4.0}, r"num_microbatches 4\.0: must be a whole number"),
        ({"seed": None}, "seed None: must be a whole number, at least 0"),
        ({"order": "best"}, "order 'best': must be ready or fixed, or None"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(X)], lr=0.5)}, r"such as partial\(torch.optim.SGD, lr=0.5\)"),
        ({"optimizer": "adam"}, "optimizer 'adam': must be callable"),
        ({"optimizer": None, "lr_scheduler": SLOWER}, "lr_scheduler: needs an optimizer"),
        ({"lr_scheduler": SLOWER(SGD([nn.Parameter(X)]))}, r"such as partial\(torch.optim.lr_scheduler.StepLR, "),
        (
            {"loss": nn.CrossEntropyLoss},
            r"is the class CrossEntropyLoss: pass an instance, CrossEntropyLoss\(\)",
        ),
        ({"loss": 0.5}, "loss_fn 0.5: must be callable"),
        ({"device": "gpu"}, "device 'gpu': must be cpu, cuda"),
        ({"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"schedule": "1F1B"}, "did you mean '1f1b'"),
        ({"split": [1, 1]}, "add up to the model's 4 layers"),
        ({"device": "tpu"}, "device 'tpu': must be cpu, cuda or cuda:N"),
        ({"schedule_options": {"windows": 3}}, "schedule 1f1b has no such parameter; it has window"),
        ({"schedule_options": {"window": "x"}}, "window=x: schedule 1f1b takes int"),
        ({"schedule": "gpipe", "schedule_options": {"b_order": "up"}}, "takes descending, ascending"),
        ({"loss": None}, "loss_fn is None: layers compute no loss"),
    ],
)
def test_wrong_options_say_what_would_be_right(options, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(**options)
