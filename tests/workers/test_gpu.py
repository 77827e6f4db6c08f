"""The road between a GPU and the outbox, on a GPU or another accelerator that torch knows.

`scripts/gpu` runs these; without a device they are skipped.
"""

import queue

import pytest
import torch

from rpc_pipe.workers.compute.devices.backends import backend_for
from rpc_pipe.workers.transport.form import form_of
from rpc_pipe.workers.transport.payload import pack, unpack
from rpc_pipe.workers.transport.peer_memory import ON_HOST

KIND = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KIND, reason="there is no accelerator"),
    pytest.mark.filterwarnings("default"),
]
cuda_alone = pytest.mark.skipif(KIND != "cuda", reason="not on this device")


@pytest.fixture
def backend():
    found = backend_for(f"{KIND}:0")
    yield found
    found.close()


def tensors():
    x = torch.randn(64, 32, device=KIND)
    complex_ = torch.randn(8, 8, device=KIND, dtype=torch.complex64)
    return x, x.T, x[:, ::2], x[0].expand(5, 32), complex_.conj(), complex_.conj().imag, x.bfloat16(), x > 0


def test_payloads_leave_and_enter_as_they_are(backend):
    source, left = tensors(), queue.SimpleQueue()
    backend.leave(pack(source), left.put, left.put)
    entered = unpack(backend.ready(backend.enter(left.get(timeout=20))))
    for one, other in zip(source, entered, strict=True):
        assert other.device.type == KIND and one.is_conj() == other.is_conj()
        assert one.is_neg() or one.stride() == other.stride(), "numbers shown negative travel as numbers"
        assert torch.equal(one, other)


def test_a_payload_may_be_written_when_its_caller_has_let_it_go(backend):
    left = queue.SimpleQueue()
    for number in range(50):
        source = torch.full((2**20,), float(number), device=KIND)
        backend.leave(pack(source), left.put, left.put)
        del source
        torch.full((2**20,), -1.0, device=KIND)
    assert [float(unpack(left.get(timeout=20))[-1]) for _ in range(50)] == list(range(50))


@cuda_alone  # which tells of waits
def test_a_batch_is_loaded_without_a_wait(backend):
    host = torch.randn(1000, 1000), torch.randn(1000)[:, None].expand(1000, 10), torch.randn(64, 64)[:, ::2]
    torch.cuda.set_sync_debug_mode("error")
    try:
        loaded = backend.load(host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, host, (each.cpu() for each in loaded)))
    assert [each.stride() for each in loaded] == [each.stride() for each in host]


def test_times_of_the_device_are_told_by_the_hosts_clock(backend):
    first = backend.timestamp()
    torch.randn(2000, 2000, device=KIND) @ torch.randn(2000, 2000, device=KIND)
    times = backend.resolve([first, backend.timestamp()])
    assert times[0] < times[1]


@cuda_alone
def test_payloads_go_through_memory_of_the_host_that_the_device_reaches(backend):
    way, source = backend.way(), tensors()
    fetching, lending = way.reach(("refused", way.page()[1])), way.lending(ON_HOST)
    for number in range(4):
        laid = lending.lay("0F0", backend.staying(pack(source), print), number)
        laid.event.synchronize()
        lending.told(laid.block)
        assert all(map(torch.equal, map(torch.Tensor.cpu, source), unpack(laid.unfold())))
        payload, copied = fetching(laid.block.shared, form_of(laid.form))
        assert all(map(torch.equal, source, unpack(backend.ready(payload))))
        copied.synchronize()
    assert all(tensor.is_pinned() for tensor in laid.tensors)
    assert len(fetching._opened) == 2, "the proof and one block, again and again"
