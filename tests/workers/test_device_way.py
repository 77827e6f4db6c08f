"""Payloads from device to device: nothing is read before it is there, no block is written before it has been copied."""

import logging
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from carriers import loopback_carriers
from fake_cuda import FakeCuda
from processes import python
from unkind import MODELS, batches_for, differences

from rpc_pipe import Pipeline, Training, own_workers
from rpc_pipe.dependency import Malformed
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.devices.accelerator import AcceleratorBackend
from rpc_pipe.workers.transport import device_way, shared_memory
from rpc_pipe.workers.transport.device_way import HostMemory
from rpc_pipe.workers.transport.form import Moving
from rpc_pipe.workers.transport.payload import pack, unpack
from rpc_pipe.workers.transport.peer_memory import DEVICE, HANDLES, ON_HOST
from rpc_pipe.workers.transport.values import decode_value, encode_value

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
            list(model.layers),
            model.loss_fn,
            training=Training(model.optimizer),
            schedule=schedule,
            num_workers=2,
            seed=1,
            stall_s=30,
            **options,
        )
        for actor in pipe.actors:
            actor.carrier.post.use_device(actor.backend.way())
        make.backends = made[-4:]
        return pipe

    return make


ODD = ("weights", "one", "in place", "complex", "sparse", "views", "strided", "gradients", "named", "recurrent")
CASES = [("weights handed on", schedule) for schedule in ("1f1b", "chimera", "interleaved")]
CASES += [(name, "zb-v") for name in MODELS if name.startswith(ODD)]


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


@pytest.fixture
def refused(monkeypatch):
    """Let no process open another one's memory of a device, as some drivers do."""

    def opened(self, identity, handle):
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(FakeCuda, "opened", opened)


def told(caplog):
    """Return how payloads on a device come; each worker must have said it once of each other one."""
    said = [record.getMessage() for record in caplog.records if "on the device of worker" in record.getMessage()]
    assert said and len(said) == len(set(said))
    return said


def meet(pipe):
    """Wait until each worker knows how it takes payloads of each other one."""
    for actor in pipe.actors:
        for *_, counters in actor.carrier.post.channels._readers:
            while not counters[DEVICE]:
                time.sleep(0.001)


@pytest.mark.parametrize(
    "name, schedule", [("weights handed on", "1f1b"), ("views", "zb-v"), ("in place", "chimera"), ("sparse", "gpipe")]
)
def test_payloads_go_through_registered_memory_where_handles_are_refused(
    pipeline, refused, monkeypatch, caplog, name, schedule
):
    """They went by pinned memory, which two processors copied: from process to process, and to pinned memory again."""
    caplog.set_level(logging.INFO)
    entered, enter, before = [], AcceleratorBackend.enter, len(FakeCuda.registered)
    monkeypatch.setattr(
        AcceleratorBackend, "enter", lambda backend, payload: entered.append(payload) or enter(backend, payload)
    )
    pipe = pipeline(name, schedule, num_microbatches=4)
    pipe.evaluate(batches_for(name, 4)[0])  # blocks are made and written in inference mode, too
    step = pipe.step

    def next_step(batch):
        if entered:
            meet(pipe)
        entered.clear()
        return step(batch)

    pipe.step = next_step
    assert differences(pipe, MODELS[name], batches_for(name, 4) * 2, 1) == []
    assert all("through memory of the host" in each and "invalid resource handle" in each for each in told(caplog))
    if name != "sparse":
        assert all(isinstance(payload, Moving) for payload in entered), "no processor copies"
    assert len(FakeCuda.registered) >= before + 8, "a proof and a block each way, in both processes"


def test_registered_memory_is_unregistered_when_a_worker_lets_go_of_it():
    Counted = type("Counted", (FakeCuda,), {"registered": []})  # of this test alone
    producer, _, lending, fetching = ends(ON_HOST, Counted)
    laid = lay(producer, lending, torch.ones(300), 0)
    fetching(laid.block.shared, shared_memory.form_of(laid.form))[1].synchronize()
    assert len(Counted.registered) == 3, "a proof and a block of the consumer, a block of the producer"
    fetching.release()
    del lending
    assert len(Counted.registered) == 1, "a payload lies there"
    del laid
    assert Counted.registered == []


def test_another_process_maps_the_same_memory_and_no_other():
    block, _, shared = HostMemory(FakeCuda()).block(300, 1)
    block.fill_(1)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from fake_cuda import FakeCuda\n"
        "from rpc_pipe.workers.transport.device_way import HostMemory\n"
        "memory, _ = HostMemory(FakeCuda()).opened(bytes.fromhex(sys.argv[1])); print(memory.nbytes); memory += 1"
    )
    found = python("-c", code, shared.hex(), Path(__file__).parents[1])
    assert (found.returncode, found.stdout.strip()) == (0, "4096"), found.stderr
    assert block.unique().tolist() == [2]
    process, descriptor, name = decode_value(shared)
    for other in (process, descriptor, name[:-1] + "x"), (process, 0, name), (process, 10**6, name):
        with pytest.raises(OSError):
            HostMemory(FakeCuda()).opened(encode_value(other))
    for other in (process, str(descriptor), name), [process, descriptor, name], None:
        with pytest.raises(Malformed):
            HostMemory(FakeCuda()).opened(encode_value(other))


def test_a_device_that_reaches_no_memory_of_another_process_is_told_once_and_changes_no_bit(
    pipeline, refused, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)

    def register(self, memory):
        raise OSError("cudaHostRegister returns 801")

    monkeypatch.setattr(FakeCuda, "register", register)
    pipe = pipeline("frozen", "1f1b", num_microbatches=4)
    assert differences(pipe, MODELS["frozen"], batches_for("frozen", 4) * 2, 1) == []
    for each in told(caplog):
        assert all(why in each for why in ("brought by the host", "invalid resource handle", "returns 801"))


@pytest.mark.parametrize("opens", [False, True])
def test_memory_that_cannot_be_registered_later_changes_no_bit(pipeline, refused, monkeypatch, caplog, opens):
    """A process may register so much: a producer goes back to its first way, a consumer copies what is there."""
    caplog.set_level(logging.INFO)
    register, opened, here = FakeCuda.register, HostMemory.opened, threading.local()

    def full(self, memory):
        if memory.nbytes > 4096 and getattr(here, "opens", False) == opens:
            raise OSError("cudaHostRegister returns 2")
        register(self, memory)

    def opening(self, shared):
        here.opens = True
        try:
            return opened(self, shared)
        finally:
            here.opens = False

    monkeypatch.setattr(FakeCuda, "register", full)
    monkeypatch.setattr(FakeCuda, "unregister", lambda self, address: None)
    monkeypatch.setattr(HostMemory, "opened", opening)
    monkeypatch.setattr(device_way, "_ALIGNED", 8192)
    pipe = pipeline("frozen", "1f1b", num_microbatches=4)
    assert differences(pipe, MODELS["frozen"], batches_for("frozen", 4) * 2, 1) == []
    said = [record.getMessage() for record in caplog.records if "returns 2" in record.getMessage()]
    assert len(said) == 2 and all("by the driver alone" in each for each in said) == opens


def test_a_device_without_memory_for_blocks_goes_on_by_the_host(pipeline, monkeypatch):
    made = FakeCuda.shared_event

    def full(self):
        if self.num_copies > 40:
            raise RuntimeError("CUDA out of memory")
        return made(self)

    monkeypatch.setattr(FakeCuda, "shared_event", full)
    pipe = pipeline("frozen", "1f1b", num_microbatches=6)
    assert differences(pipe, MODELS["frozen"], batches_for("frozen", 6) * 3, 1) == []


@pytest.mark.parametrize("kind", [HANDLES, ON_HOST])
def test_a_block_is_used_again_when_it_has_been_copied_and_not_before(kind):
    way, consumer, lending, fetching = ends(kind)
    lent, taken = [], 0
    for number in range(6):
        laid = lay(way, lending, torch.full((300,), float(number)), taken)
        lent.append((laid.block.shared, shared_memory.form_of(laid.form)))
        assert lending.told(laid.block) == number + 1
        if number == 2:  # the first two have been copied
            found = [fetching(*each) for each in lent[:2]]
            values = [float(unpack(consumer.ready(payload)).mean()) for payload, _ in found]
            assert values == [0.0, 1.0] and all(event.query() for _, event in found)
            taken = 2
    blocks = [where for where, _ in lent]
    assert blocks[3:5] == blocks[:2], "they are free"
    assert len({*blocks}) == 4
    found = [fetching(*each)[0] for each in lent[2:]]
    assert [float(unpack(consumer.ready(payload)).mean()) for payload in found] == [2.0, 3.0, 4.0, 5.0]


def ends(kind, cuda=FakeCuda):
    """Return a producer, a consumer, the pool between them, and what fetches from it."""
    producer, consumer = AcceleratorBackend(cuda()), AcceleratorBackend(cuda())
    way = producer.way()
    page = way.page() if kind == HANDLES else ("refused", way.page()[1])
    fetching = consumer.way().reach(page)
    assert fetching.kind == kind
    return producer, consumer, way.lending(kind), fetching


def lay(producer, lending, tensor, taken):
    """Have a tensor copied to a block, and wait as the producer's thread does."""
    laid = lending.lay("0F0", producer.staying(pack(tensor), print), taken)
    if laid.block.event is None:
        laid.event.synchronize()
        laid = laid.unfold()
        assert unpack(laid).equal(tensor)
    return laid


def test_a_tensor_with_gaps_is_read_when_it_has_come_to_memory_of_the_host():
    """A payload goes on from there if its channel has no room: its gaps were made before the device had copied."""
    producer, consumer, lending, fetching = ends(ON_HOST)
    tensor = torch.arange(600.0).view(20, 30)[:, ::2]
    laid = lay(producer, lending, tensor, 0)
    payload, _ = fetching(laid.block.shared, shared_memory.form_of(laid.form))
    assert unpack(consumer.ready(payload)).equal(tensor)
    lending.untold(laid.block)
    assert unpack(laid).equal(tensor) and unpack(laid).stride() == tensor.stride()


@pytest.mark.parametrize("kind", [HANDLES, ON_HOST])
def test_payloads_of_alternating_sizes_open_no_further_blocks(kind):
    """Each of two sizes took the place of the other's blocks, and a consumer keeps all blocks open that it has seen."""
    producer, consumer, lending, fetching = ends(kind)
    for number in range(40):
        tensor = torch.full((300 if number % 2 else 10_000,), float(number))
        laid = lay(producer, lending, tensor, number)
        lending.told(laid.block)
        payload, event = fetching(laid.block.shared, shared_memory.form_of(laid.form))
        assert unpack(consumer.ready(payload)).equal(tensor) and event.query()
    assert len(fetching._opened) <= 3, "the proof and two blocks"


def test_a_payload_of_which_a_part_is_on_the_host_leaves_by_it():
    backend = AcceleratorBackend(FakeCuda())
    backend._accelerator.has = lambda tensor: tensor.dim() > 0
    assert backend.staying(pack((torch.ones(3), torch.tensor(1.0))), print) is None
    assert backend.staying(pack(torch.ones(3)), print) is not None
