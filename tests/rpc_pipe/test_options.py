"""The table of options: `Pipeline`, its rows and the command line are one list."""

import inspect

import pytest
from refusals import refused

from rpc_pipe import Pipeline
from rpc_pipe.commands.main import all_commands
from rpc_pipe.dependency.declared import OPTIONS
from rpc_pipe.dependency.pipeline_options import ROWS, TYPED, Options


def test_arguments_of_a_pipeline_are_the_rows():
    """An argument without a row reached no worker and no command line; two defaults of one option differed."""
    said = inspect.signature(Pipeline).parameters
    own = {"model", "loss_fn", "training"}
    assert said.keys() - own == ROWS.keys() | OPTIONS.keys()
    assert {name: said[name].default for name in ROWS} == {name: getattr(Options, name) for name in ROWS}


def test_run_takes_every_row_that_can_be_typed():
    typed = {each.dest for each in all_commands()["run"]._actions}
    assert typed >= {TYPED[name] for name, row in ROWS.items() if row.typed} | OPTIONS.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(num_microbatches=0), dict(num_microbatches=True), dict(num_workers=0), dict(order="any"), dict(stall_s=0),
        dict(reduce="never"), dict(microbatch_order="best"), dict(compile="yes"), dict(seed=-1), dict(members=1.5),
    ],
)  # fmt: skip
def test_a_value_outside_of_its_rule_is_refused_by_name(wrong):
    (name,) = wrong
    with refused(name):
        Options(**{"num_microbatches": 1, **wrong}).checked()


def test_what_must_be_alike_is_told_if_it_is_not_usual():
    assert Options(seed=3, device="cpu").alike() == ""
    assert Options(order="fixed").alike() == ", order=fixed"
