"""ZeroMQ's own: connections that break, strangers, and peers that die. Real sockets of this host."""

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import zmq
from carriers import Cable, zmq_carriers
from refusals import refused

from rpc_pipe.dependency import NotMet
from rpc_pipe.workers.transport import sockets
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.form import Look
from rpc_pipe.workers.transport.payload import pack, unpack
from rpc_pipe.workers.transport.sockets import PIECE_BYTES, SECRET_PIECE_BYTES, Frames, Sockets, frames_of
from rpc_pipe.workers.transport.values import Malformed

CALL = Call(0, "step 0")


def begun(carriers):
    for carrier in carriers:
        carrier.begin(CALL)
    return carriers


def close(carriers):
    for carrier in carriers:
        carrier.close()


def exchange(carriers, count, run=1):
    """Let each of two pull `count` payloads of all sizes from the other, in order of their own."""

    def work(carrier):
        draw, peer = random.Random(f"{run} {carrier.worker}"), 1 - carrier.worker
        found = {}
        for m in range(count):
            carrier.pull(peer, run, [f"{peer}F{m}"])
            tensor = torch.full((draw.choice([1, 64, 20_000, 300_000]),), float(m))
            carrier.outbox.offer((run, f"{carrier.worker}F{m}"), pack(tensor), [peer])
            time.sleep(0.002)
            found |= {a.key[1]: a.answer for a in carrier.poll((run,))}
        deadline = time.monotonic() + 30
        while len(found) < count and time.monotonic() < deadline:
            carrier.wait(0.1)
            for arrived in carrier.poll((run,)):
                assert not isinstance(arrived.answer, str), arrived
                assert arrived.key[1] not in found, "it has arrived twice"
                found[arrived.key[1]] = arrived.answer
        assert {name: float(unpack(answer)[-1]) for name, answer in found.items()} == {
            f"{peer}F{m}": float(m) for m in range(count)
        }
        carrier.wait_taken(None, 30)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, carriers))


class Cables(list):
    """Those between workers, in the order in which they were laid."""

    def through(self, address):
        self.append(Cable(address))
        return self[-1].address


@pytest.fixture
def cables():
    laid = Cables()
    yield laid
    for cable in laid:
        cable.close()


def lost(carrier, within_s):
    """Wait until the peer is lost; return why."""
    begin = time.monotonic()
    carrier.pull(1 - carrier.worker, 1, ["1F9"])
    while not (found := carrier.poll((1,))):
        assert time.monotonic() < begin + within_s
        carrier.wait(0.2)
    return found[0].answer


def test_a_worker_whose_connection_breaks_is_lost(cables):
    """TCP outlives a network that is away for a while; what breaks a connection is an end of it, or a stranger."""
    carriers = begun(zmq_carriers(2, tcp=True, through=cables.through))
    exchange(carriers, 50)
    for cable in cables:
        cable.cut()
    for carrier in carriers:
        assert "the connection broke" in lost(carrier, 5)
        carrier.post.link.close()


def test_a_network_that_comes_back_in_time_loses_nothing(cables):
    carriers = begun(zmq_carriers(2, tcp=True, through=cables.through, lost_after_s=5))
    exchange(carriers, 3)
    for cable in cables:
        cable.pause(1.5)
    for carrier in carriers:
        assert carrier.begin(CALL) == 2
    exchange(carriers, 50, run=2)
    close(carriers)


HOSTILE = {
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "garbage": random.Random(0).randbytes(4096),
    "a large length": b"\xff"
    + bytes(8)
    + b"\x7f"
    + b"\x03"
    + bytes(53)
    + b"\x02"
    + struct.pack(">Q", 2**62)
    + b"x" * 99,
    "a greeting, then garbage": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x01CURVE"
    + bytes(47)
    + random.Random(1).randbytes(2000),
    "without a key": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x04\x29\x05READY" + bytes(36),
    "nothing": b"",
}


def test_strangers_get_nothing_and_disturb_nobody():
    carriers = begun(zmq_carriers(2, tcp=True))
    host, port = carriers[0].post.link._by[1].bound.removeprefix("tcp://").split(":")
    open_ones = []

    def attack():
        for name, data in HOSTILE.items():
            for _ in range(5):
                stranger = socket.create_connection((host, int(port)), timeout=0.2)
                if name == "nothing":
                    open_ones.append(stranger)  # slow
                    continue
                answer = b""
                with stranger, suppress(TimeoutError, ConnectionError):  # it may be thrown out before it has done
                    stranger.sendall(data[: len(data) // 2])
                    stranger.sendall(data[len(data) // 2 :])
                    answer = stranger.recv(4096)
                assert len(answer) <= 200, answer  # a greeting, at most

    attacker = threading.Thread(target=attack)
    attacker.start()
    exchange(carriers, 60)
    attacker.join()
    deadline = time.monotonic() + 5
    while carriers[0].post.link.refused < 30 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert carriers[0].post.link.refused == 30 and carriers[1].post.link.refused == 0
    for stranger in open_ones:
        stranger.close()
    close(carriers)


def test_who_has_another_key_or_none_is_not_heard():
    with refused("worker", NotMet):
        zmq_carriers(2, tcp=True, secrets=[b"a" * 32, b"b" * 32], join_timeout_s=1)
    carriers = zmq_carriers(2, tcp=True)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.routing_id, stranger.linger, stranger.rcvtimeo = b"1", 0, 300
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = carriers[0].post.link._by[1]._keys._public[0]  # it knows all that is public
    stranger.connect(carriers[0].post.link._by[1].bound)
    with pytest.raises(zmq.Again):
        stranger.recv()
    stranger.close()
    context.term()
    exchange(begun(carriers), 5)
    close(carriers)


def test_a_peer_whose_host_is_cut_off_is_lost_in_time(cables):
    carriers = begun(zmq_carriers(2, tcp=True, through=cables.through, lost_after_s=1))
    exchange(carriers, 3)
    for cable in cables:
        cable.stop()
    begin = time.monotonic()
    assert "the connection broke" in lost(carriers[0], 10)
    assert 0.9 < time.monotonic() - begin < 5
    for carrier in carriers:
        carrier.post.link.close()


@pytest.mark.parametrize("where", [{}, {"tcp": True}, {"tcp": True, "host": "::1"}], ids=["unix", "ipv4", "ipv6"])
def test_a_peer_that_has_died_is_known_at_once(where):
    carriers = begun(zmq_carriers(2, **where))
    exchange(carriers, 3)
    carriers[1].post.link.close()  # without a word
    assert "its process has ended" in lost(carriers[0], 5)
    carriers[0].post.link.close()


def _congestion(connection):
    name = connection.getsockopt(socket.IPPROTO_TCP, sockets._TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


def test_a_listener_chooses_a_congestion_control_that_does_not_pace():
    with socket.socket() as listener:
        sockets.choose(listener, "no-such,reno")
        assert _congestion(listener) == "reno"
        sockets.choose(listener, "no-such")  # the system's stays
        assert _congestion(listener) == "reno"


@pytest.mark.parametrize("most", [PIECE_BYTES, SECRET_PIECE_BYTES])
@pytest.mark.parametrize("size", [0, 1, SECRET_PIECE_BYTES, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 7])
def test_frames_are_small_and_put_together_again(size, most):
    tensors = [torch.arange(size, dtype=torch.uint8), torch.randn(3, 5).t(), torch.randn(2, dtype=torch.complex64)]
    body = bytes(size)
    first, *rest = [bytes(frame) for frame in frames_of(b"head", body, tensors, most)]
    assert all(len(frame) <= most + 4 for frame in (first, *rest))
    pieces = Frames(first, [zmq.Frame(frame) for frame in rest])
    assert first[4:] + pieces.read(size - len(first) + 4) == body
    for tensor in tensors:
        shape, strides = tensor.shape, tensor.stride()
        look = Look(tensor.dtype, shape, strides, False, False, shape, strides, tensor.nbytes, True, 0)
        assert torch.equal(pieces.tensor(look), tensor)
    with refused("malformed", Malformed):
        pieces.read(1)


@pytest.mark.parametrize(("tcp", "most"), [(True, SECRET_PIECE_BYTES), (False, PIECE_BYTES)], ids=["tcp", "unix"])
def test_what_is_encrypted_travels_in_frames_that_overlap(monkeypatch, tcp, most):
    """CURVE encrypts a frame as a whole before it travels: a payload of 4 MiB took 109 ms there and back, now 20."""
    sizes, hear = [], Sockets.hear

    def noted(sockets):
        pieces = hear(sockets)
        sizes.append([] if pieces is None else [len(part) for part in pieces._rest])
        return pieces

    monkeypatch.setattr(Sockets, "hear", noted)
    carriers = begun(zmq_carriers(2, tcp=tcp))
    carriers[0].pull(1, 1, ["1F0"])
    carriers[1].outbox.offer((1, "1F0"), pack(torch.arange(2**19)), [0])
    deadline = time.monotonic() + 10
    while not (found := carriers[0].poll((1,))) and time.monotonic() < deadline:
        carriers[0].wait(0.1)
    close(carriers)
    assert torch.equal(unpack(found[0].answer), torch.arange(2**19))
    assert max(sizes, key=len) == [most] * (2**22 // most)
