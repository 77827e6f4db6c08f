"""Payloads from device to device: nothing is read before it is there, no block is written before it has been copied."""

import logging
import random

import pytest
import torch
from carriers import loopback_carriers
from fake_cuda import FakeCuda
from unkind import MODELS, batches_for, differences

from rpc_pipe import Pipeline, own_workers
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.accelerator import AcceleratorBackend
from rpc_pipe.workers.transport import shared_memory
from rpc_pipe.workers.transport.payload import pack, unpack

pytestmark = pytest.mark.skipif(not shared_memory.POSSIBLE, reason="channels are for Linux on x86-64")
SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]


@pytest.fixture
def pipeline(monkeypatch):
    """Return what makes a pipeline whose workers talk as processes do, each with a device; `backends`: of the last."""
    made = []
    monkeypatch.setattr(own_workers, "local_carriers", loopback_carriers)
    monkeypatch.setattr(
        own_workers, "backend_for", lambda name, place=0: made.append(AcceleratorBackend(FakeCuda())) or made[-1]
    )

    def make(name, schedule, cuda=FakeCuda, **options):
        model = MODELS[name]
        torch.manual_seed(0)
        pipe = Pipeline(
            list(model.layers), model.loss_fn, optimizer=model.optimizer, schedule=schedule, num_workers=2, seed=1,
            stall_s=30, **options,
        )  # fmt: skip
        for actor in pipe.actors:
            actor.carrier.post.use_device(actor.backend.way())
        make.backends = made[-4:]
        return pipe

    return make


CASES = [("weights handed on", schedule) for schedule in SYNCHRONOUS[::3]] + [(name, "zb-v") for name in MODELS]


@pytest.mark.parametrize("name, schedule", dict.fromkeys(CASES))
def test_payloads_from_device_to_device_have_the_bits_of_one_process(pipeline, name, schedule, caplog):
    caplog.set_level(logging.INFO)
    count = random.Random(name + schedule).choice([4, 6])
    pipe = pipeline(name, schedule, num_microbatches=count)
    batches = batches_for(name, count) + batches_for(name, count)
    if name != "counter handed on":  # which counts evaluations
        pipe.evaluate(batches[0])  # blocks are made in inference mode, too
    assert differences(pipe, MODELS[name], batches, 1) == []
    assert "copied from its device to this one" in caplog.text
    if name != "sparse, handed on":
        proofs = caplog.text.count("on the device of worker")
        assert sum(backend._accelerator.num_shared for backend in pipeline.backends) > proofs


def test_a_device_that_shares_no_memory_is_told_once_and_changes_no_bit(pipeline, monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def opened(self, identity, handle):
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(FakeCuda, "opened", opened)
    pipe = pipeline("frozen", "1f1b", num_microbatches=4)
    assert differences(pipe, MODELS["frozen"], batches_for("frozen", 4) * 2, 1) == []
    said = [record.getMessage() for record in caplog.records if "on the device of worker" in record.getMessage()]
    assert said and all("brought by the host" in each and "invalid resource handle" in each for each in said)
    assert len(said) == len(set(said))


def test_a_device_without_memory_for_blocks_goes_on_by_the_host(pipeline, monkeypatch):
    made = FakeCuda.shared_event

    def full(self):
        if self.num_copies > 40:
            raise RuntimeError("CUDA out of memory")
        return made(self)

    monkeypatch.setattr(FakeCuda, "shared_event", full)
    pipe = pipeline("frozen", "1f1b", num_microbatches=6)
    assert differences(pipe, MODELS["frozen"], batches_for("frozen", 6) * 3, 1) == []


def test_a_block_is_used_again_when_it_has_been_copied_and_not_before():
    producer, consumer = AcceleratorBackend(FakeCuda()), AcceleratorBackend(FakeCuda())
    lending, fetching = producer.way().lending(), consumer.way().reach(producer.way().page())
    lent, taken = [], 0
    for number in range(6):
        stays = producer.staying(pack(torch.full((300,), float(number))), print)
        lent.append(lending.lay("0F0", stays, taken))
        if number == 2:  # the first two have been copied
            found = [fetching(where, shared_memory.form_of(form)) for form, where in lent[:2]]
            values = [float(unpack(consumer.ready(payload)).mean()) for payload, _ in found]
            assert values == [0.0, 1.0] and all(event.query() for _, event in found)
            taken = 2
    blocks = [where for _, where in lent]
    assert blocks[3:5] == blocks[:2], "they are free"
    assert len({*blocks}) == 4
    found = [fetching(where, shared_memory.form_of(form))[0] for form, where in lent[2:]]
    assert [float(unpack(consumer.ready(payload)).mean()) for payload in found] == [2.0, 3.0, 4.0, 5.0]


def test_a_payload_of_which_a_part_is_on_the_host_leaves_by_it():
    backend = AcceleratorBackend(FakeCuda())
    backend._accelerator.has = lambda tensor: tensor.dim() > 0
    assert backend.staying(pack((torch.ones(3), torch.tensor(1.0))), print) is None
    assert backend.staying(pack(torch.ones(3)), print) is not None
