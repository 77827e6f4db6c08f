"""Plain values in checkpoints, and the state of optimizers."""

import json

import numpy
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


def test_a_loaders_state_is_kept_with_its_tensors():
    """A StatefulDataLoader's state has its generator's, which was refused."""
    state = {
        "generator": torch.Generator().manual_seed(3).get_state(),
        "numpy": numpy.random.default_rng(0).integers(9, size=(2, 3)),
        "one": numpy.float32(0.5),
        "half": torch.tensor([[1.5], [2]], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.bool),
        "number": torch.tensor(7),
        "bytes": b"\x00\xff",
    }
    kept = decoded(json.loads(json.dumps(encoded(state, "extra"))))
    assert kept["bytes"] == state["bytes"] and list(kept) == list(state)
    for name in ("generator", "half", "empty", "number"):
        assert kept[name].dtype == state[name].dtype and torch.equal(kept[name], state[name])
    assert (kept["numpy"] == state["numpy"]).all() and kept["numpy"].dtype == state["numpy"].dtype
    assert kept["one"] == state["one"]
    torch.Generator().set_state(kept["generator"])
    for large in (torch.zeros(2**20 + 1, dtype=torch.uint8), torch.zeros(2).to_sparse(), object()):
        with refused("extra"):
            encoded({"large": large}, "extra")
