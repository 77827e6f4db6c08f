"""The pipeline changes nothing: losses and weights equal one process bit for bit."""

import pytest

from rpc_pipe import link
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.settings import VerifyOptions
from rpc_pipe.verify import verify


def verdict(monkeypatch, **options):
    messages = []
    monkeypatch.setattr(link, "_instead", messages.append)
    verify(VerifyOptions(transport="local", steps=2, **options))
    return messages[-1]["json"]


@pytest.mark.parametrize("M", [1, 2, 5, 8])
@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_identical_to_one_process(monkeypatch, schedule, P, M):
    """With dropout, AdamW and a ragged last microbatch, in both orders."""
    if schedule == "interleaved" and M % P:
        pytest.skip("interleaved needs a multiple of the workers")
    for order in ("ready", "fixed"):
        report = verdict(monkeypatch, schedule=schedule, workers=P, microbatches=M, order=order)
        assert report["identical"], report
        assert report["max_abs_error"] == 0


@pytest.mark.parametrize("model", ["conv", "mlp"])
def test_other_models(monkeypatch, model):
    assert verdict(monkeypatch, model=model, workers=3, microbatches=4)["identical"]


def test_the_comparison_can_fail(monkeypatch):
    """A verdict that is always "identical" would prove nothing."""
    from rpc_pipe.workers.shard import Shard

    backward = Shard.backward

    def forgetful(self, microbatch, grads):
        if self.stage == 1 and microbatch == 2:
            self.layers[0][1].zero_grad()
        return backward(self, microbatch, grads)

    monkeypatch.setattr(Shard, "backward", forgetful)
    report = verdict(monkeypatch, model="mlp", workers=2, microbatches=4)
    assert not report["identical"] and report["max_abs_error"] > 0
