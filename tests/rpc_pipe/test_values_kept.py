"""Plain values in checkpoints, and the state of optimizers."""

import json

import pytest
import torch
from refusals import refused

from rpc_pipe.checkpoints.json_values import decoded, encoded
from rpc_pipe.checkpoints.shard_state import Stages


@pytest.mark.parametrize("value", [None, 1.5, float("inf"), (1, [2, {"a": (None,)}]), {1: {2: 3}}, {"$tuple": 1}])
def test_plain_values_come_back_as_they_were(value):
    assert decoded(json.loads(json.dumps(encoded(value, "x")))) == value


def test_what_is_not_plain_is_refused():
    with refused("extra"):
        encoded({"a": {1}}, "extra")


def test_the_count_of_steps_is_where_torch_wants_it_on_whatever_device_it_was_written():
    """On the host, where it is read without waiting for a GPU; a fused optimizer has it beside the parameter."""
    names = ["state.w.step", "state.w.exp_avg"]
    tensors = {name: torch.ones(()) for name in names}
    parameter = torch.nn.Parameter(torch.empty((), device="meta"))
    for written in ([], ["state.w.step"]):
        told = {"groups": [{"parameters": ["w"], "options": {}}], "on_host": written, "updates": 1}
        stages = Stages({"0": told}, names, tensors)
        for fused, where in ((None, ["cpu", "meta"]), (True, ["meta", "meta"])):
            found = [stages._value(name, tensors, parameter, {"fused": fused}) for name in names]
            assert [value.device.type for value in found] == where
