"""The road between a GPU and the outbox, on a GPU. `scripts/gpu` runs these; without one they are skipped."""

import queue

import pytest
import torch

from rpc_pipe.workers.compute.backends import backend_for
from rpc_pipe.workers.transport.payload import pack, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def backend():
    found = backend_for("cuda:0")
    yield found
    found.close()


def tensors():
    x = torch.randn(64, 32, device="cuda")
    complex_ = torch.randn(8, 8, device="cuda", dtype=torch.complex64)
    return x, x.T, x[:, ::2], x[0].expand(5, 32), complex_.conj(), complex_.conj().imag, x.bfloat16(), x > 0


def test_payloads_leave_and_enter_as_they_are(backend):
    source, left = tensors(), queue.SimpleQueue()
    backend.leave(pack(source), left.put, left.put)
    entered = unpack(backend.ready(backend.enter(left.get(timeout=20))))
    for one, other in zip(source, entered, strict=True):
        assert other.is_cuda and one.is_conj() == other.is_conj()
        assert one.is_neg() or one.stride() == other.stride(), "numbers shown negative travel as numbers"
        assert torch.equal(one, other)


def test_a_payload_may_be_written_when_its_caller_has_let_it_go(backend):
    left = queue.SimpleQueue()
    for number in range(50):
        source = torch.full((2**20,), float(number), device="cuda")
        backend.leave(pack(source), left.put, left.put)
        del source
        torch.full((2**20,), -1.0, device="cuda")
    assert [float(unpack(left.get(timeout=20))[-1]) for _ in range(50)] == list(range(50))


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
    torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")
    times = backend.resolve([first, backend.timestamp()])
    assert times[0] < times[1]
