"""The pipeline changes nothing: losses and weights equal one process bit for bit."""

import pytest

from rpc_pipe.launching import launcher_link as link
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.verifying.proof import prove
from rpc_pipe.verifying.verify_options import VerifyOptions

#: the others are in test_asynchronous.py
SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]


def verdict(monkeypatch, steps=2, **options):
    messages = []
    monkeypatch.setattr(link, "_instead", messages.append)
    prove(VerifyOptions(transport="local", steps=steps, **options))
    return messages[-1]["json"]


#: each schedule has every third one
SIZES = [(1, 3), (3, 2), (4, 8)], [(2, 1), (4, 3)], [(4, 1), (2, 5), (3, 8)]


@pytest.mark.parametrize(
    ("schedule", "P", "M"),
    [(name, P, M) for i, name in enumerate(SYNCHRONOUS) for P, M in SIZES[i % 3]],
)
def test_identical_to_one_process(monkeypatch, schedule, P, M):
    """With dropout, AdamW and a ragged last microbatch, in one order or the other."""
    order = ("ready", "fixed")[(P + M) % 2]
    if schedule == "dualpipe" and P % 2:
        P += 1  # it takes even numbers only
    report = verdict(monkeypatch, schedule=schedule, num_workers=P, num_microbatches=M, order=order, model="mlp")
    assert report["identical"], report
    assert report["max_abs_error"] == 0


@pytest.mark.parametrize(("schedule", "model"), [*zip(SYNCHRONOUS, ["gpt", "conv"] * len(SYNCHRONOUS), strict=False)])
def test_other_models(monkeypatch, schedule, model):
    report = verdict(monkeypatch, schedule=schedule, model=model, num_workers=2, num_microbatches=5)
    assert report["identical"], report


@pytest.mark.parametrize(
    "schedule, options",
    [
        ("chimera", {"pairs": "2"}),
        ("chimera", {"scale": "forward-doubling"}),
        ("mixpipe", {"window": "3"}),
        ("interleaved", {"chunks": "3"}),
        ("hanayo", {"waves": "2"}),
        ("gpipe-recompute", {"keep": "1"}),
        ("gpipe", {"b_order": "ascending"}),
    ],
)
def test_parameters_of_schedules(monkeypatch, schedule, options):
    report = verdict(
        monkeypatch, schedule=schedule, schedule_options=options, num_workers=4, num_microbatches=6, model="mlp"
    )
    assert report["identical"], report


def test_the_comparison_can_fail(monkeypatch):
    """A verdict that is always "identical" would prove nothing."""
    from rpc_pipe.workers.compute.shard import Shard

    backward = Shard.backward

    def forgetful(self, microbatch, grads):
        if self.stage == 1 and microbatch == 2:
            self.slice.layers[0][1].zero_grad()
        return backward(self, microbatch, grads)

    monkeypatch.setattr(Shard, "backward", forgetful)
    report = verdict(monkeypatch, model="mlp", num_workers=2, num_microbatches=4)
    assert not report["identical"] and report["max_abs_error"] > 0
