"""Calls that workers tell each other, and what becomes of those that differ."""

from threading import Thread

import pytest
import torch
from refusals import refused

from rpc_pipe.dependency import Disagreement
from rpc_pipe.workers.actor import WorkerActor
from rpc_pipe.workers.compute.devices.device import DeviceBackend
from rpc_pipe.workers.compute.modules.digest import describe, digest
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.call_difference import difference
from rpc_pipe.workers.transport.calls import Calls
from rpc_pipe.workers.transport.local import local_carriers

STEP = Call(0, "step 3", "1f1b", describe(((), {"mask": torch.ones(4, 2)})), describe(torch.ones(4)), "0=1f 1=2e")


@pytest.mark.parametrize(
    "other, message",
    [
        ({}, None),
        ({"what": "evaluate"}, "worker 0 calls step 3 where worker 1 calls evaluate"),
        ({"pipeline": "gpipe"}, "step 3: worker 0 made the pipeline as 1f1b, worker 1 as gpipe"),
        (
            {"inputs": describe(torch.zeros(4, 2))},
            r"different inputs \(float32\[4, 2\] and float32\[4, 2\], with other",
        ),
        ({"targets": describe(torch.ones(5))}, r"different targets \(float32\[4\] and float32\[5\]\)"),
        ({"inputs": "", "targets": ""}, None),
        ({"inputs": describe(((), {"mask": torch.zeros(4, 2)}))}, r"with other values of mask\)"),
        ({"weights": "1=ff"}, "workers 0 and 1 hold stage 1 with different initial weights"),
        ({"weights": "2=ff"}, None),
        ({"weights": ""}, None),
    ],
)
def test_only_what_both_have_is_compared(other, message):
    found = difference(STEP, 1, STEP._replace(worker=1, **other).told())
    assert found is None if message is None else isinstance(found, Disagreement)
    if message:
        with pytest.raises(Disagreement, match=message):
            raise found


@pytest.mark.parametrize("order", ["told first", "begun first", "over already", "begun never"])
def test_a_question_that_belongs_to_another_call_is_answered_by_the_difference(order):
    first, second = local_carriers(2)

    def ask():
        second.begin(Call(1, "evaluate"))
        second.pull(0, 1, ["0F0"])

    if order == "told first":
        ask()
        with refused("worker", Disagreement):
            first.begin(STEP)
    elif order == "begun never":
        ask()
        first.close()
    else:
        first.begin(STEP)
        if order == "over already":
            first.end(1)
            first.begin(STEP)
        ask()
    (arrived,) = second.poll((1,))
    assert isinstance(arrived.answer, Disagreement)
    assert ("worker 0 has ended its script" in str(arrived.answer)) == (order == "begun never")
    for hears in (lambda: first.begin(STEP), lambda: first.poll((1,))):
        with pytest.raises(Disagreement):
            hears()


def test_a_worker_that_waits_to_be_relieved_of_its_payloads_hears_of_a_difference():
    """Read, not met: who called `state_dict` alone would have waited for five minutes for worker 0 to take it."""
    first, second = (WorkerActor(carrier, DeviceBackend(), {}) for carrier in local_carriers(2))
    raised = []

    def alone():
        try:
            for _ in range(4):
                second.gather("state", 1)
        except Disagreement as error:
            raised.append(error)

    thread = Thread(target=alone)
    thread.start()
    with refused("worker", Disagreement):
        first.barrier()
    thread.join(30)
    assert "worker 1 calls gather state where worker 0 calls barrier" in str(raised[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (64, 9), (256, 1024), (7, 5001), (2**17 + 1,)])
def test_values_tell_batches_apart(shape, dtype):
    generator = torch.Generator().manual_seed(0)

    def drawn():
        return (3 * torch.rand(shape, generator=generator)).ge(1).to(dtype)

    one = torch.ones(shape).to(dtype) if shape == () else drawn()
    other = torch.zeros(shape).to(dtype) if shape == () else drawn()
    assert describe(one) == describe(one.clone())
    assert digest([one]) != digest([other])
    if len(shape) == 2:
        assert describe(one.t()) == describe(one.t().contiguous())


def test_every_row_counts_and_a_shuffled_batch_is_another():
    rows = torch.arange(256).repeat(1000, 1).t().contiguous()
    for row in (0, 100, 255):
        other = rows.clone()
        other[row] += 1
        assert digest([rows]) != digest([other])
    assert digest([rows]) != digest([rows[torch.randperm(256, generator=torch.Generator().manual_seed(0))]])


def test_of_many_tensors_all_are_seen_in_a_few_calls():
    many = [torch.zeros(2) for _ in range(40)]
    for changed in range(40):
        other = [tensor + (i == changed) for i, tensor in enumerate(many)]
        assert any(describe(many, call) != describe(other, call) for call in range(5))


def test_on_a_device_only_the_form_is_compared():
    there = describe(torch.ones(4, 2, device="meta"))
    for same in (torch.ones(4, 2), torch.zeros(4, 2)):
        assert difference(Call(0, "step 0", "", there), 1, Call(1, "step 0", "", describe(same)).told()) is None
    assert difference(Call(0, "step 0", "", there), 1, Call(1, "step 0", "", describe(torch.ones(3, 2))).told())
    assert describe(None) == ""


@pytest.mark.parametrize("alone", [True, False])
def test_a_call_between_two_results_of_a_stream_is_made_by_all_or_told_at_once(alone):
    """The others went on with the next step, which had begun everywhere, and waited in it until `stall_s` was over."""
    found = []
    mine, theirs = Calls(0, found.append), Calls(1, found.append)
    for number, calls in enumerate((mine, theirs)):
        for step in (1, 2):
            calls.begin(Call(number, f"step {step}"))
            calls.go_on(1)  # the second one is begun while the first goes on
        calls.end(1)
    theirs.go_on(0)
    theirs.begin(Call(1, "evaluate"))
    mine.heard(1, 3, theirs.told(3))
    assert not found  # the first step has not come to its end here
    mine.go_on(0)
    if alone:
        mine.go_on(2)
        assert str(found[0]).startswith("worker 0 calls step 2 where worker 1 calls evaluate")
    else:
        mine.begin(Call(0, "evaluate"))
        mine.end(3)
        mine.go_on(2)
        assert not found
