"""Channels between workers of one host: what goes in comes out, in order, once, the same; the rest is refused."""

import os
import random
import sys
from collections import deque
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_pipe.workers.transport import peer_memory
from rpc_pipe.workers.transport import shared_memory as module
from rpc_pipe.workers.transport.payload import pack, unpack
from rpc_pipe.workers.transport.shared_memory import Channels
from rpc_pipe.workers.transport.values import decode_value, encode_value
from rpc_pipe.workers.transport.wakeup import Wakeup

pytestmark = pytest.mark.skipif(not module.POSSIBLE, reason="channels are for Linux on x86-64")


@pytest.fixture
def ends():
    """A channel that one object writes and reads: worker 0 to itself, as the memory does not care."""
    channels = Channels(0, Wakeup())
    channels.made = channels.offer(0)
    assert channels.accept(0, channels.made)
    return channels


def told(pages):
    """What a writer has replied to an offer, as its reader gets it."""
    reply = Future()
    reply.set_result(decode_value(encode_value(pages)))
    return reply


def same(a, b):
    return a.skeleton == b.skeleton and all(
        x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
        for x, y in zip(a.tensors, b.tensors, strict=True)
    )


@pytest.mark.parametrize(
    "tree",
    [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 3).t(),
        torch.randn(100)[10:20],
        torch.randn(6, 4)[2:5].t(),
        torch.randn(0, 7),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(5).to(torch.bfloat16),
        (torch.arange(6), torch.tensor([True, False])),
        (torch.randn(2).requires_grad_(), torch.randn(2)),
        {"hidden": torch.randn(2, 2), "step": 3, "on": True, "scale": 1.0, "name": "x", "none": None},
        (1, True, 1.0),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_payload_comes_out_as_it_went_in(ends, tree):
    payload = pack(tree)
    for _ in range(2):  # the second time its form is known
        assert ends.write(0, (1, "0F0"), payload)
        ((peer, key, answer, _),) = ends.read()
        assert peer == 0 and key == (1, "0F0") and same(answer, payload)
        assert repr(answer.skeleton) == repr(payload.skeleton)  # 1, True and 1.0 are equal, and not the same


def test_what_was_read_is_the_readers_own(ends):
    tensor = torch.ones(3)
    ends.write(0, (1, "0F0"), pack(tensor))
    ((_, _, answer, _),) = ends.read()
    for _ in range(20_000):  # the ring goes round
        ends.write(0, (1, "0F1"), pack(torch.zeros(3)))
        ends.read()
    assert torch.equal(answer.tensors[0], tensor)
    assert answer.tensors[0].data_ptr() % 64 == 0  # kernels may take other paths where memory is not aligned


def test_being_finished_is_an_answer_too(ends):
    assert ends.write(0, (7, "2F1 done"), None)
    ((_, key, answer, _),) = ends.read()
    assert key == (7, "2F1 done") and answer is None


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(4, 4).to_sparse(),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.zeros(100)[::2],
        torch.rand(8, 8)[:, :1].expand(8, 8),
        torch.rand(8, 8)[-1:].expand(8, 8),
        torch.arange(10).unfold(0, 5, 4),
    ],
    ids="sparse, conjugate, with gaps, column repeated, row repeated, overlapping".split(", "),
)
def test_views_arrive_as_they_look(ends, tree):
    """A view may repeat parts of a storage that is as large as the view: one overwrote the heap of the reader."""
    assert ends.write(0, (1, "0F0"), pack(tree))
    ((_, _, answer, _),) = ends.read()
    arrived = unpack(answer)
    assert arrived.is_conj() == tree.is_conj() and arrived.layout == tree.layout
    assert torch.equal(arrived.to_dense(), tree.to_dense())


def test_what_is_too_large_goes_another_way(ends):
    assert ends.write(0, (1, "0F0"), pack(torch.zeros(module.LARGEST // 8)))
    assert not ends.write(0, (1, "0F1"), pack(torch.zeros(module.LARGEST // 4 + 1)))
    assert len(ends.read()) == 1


def test_a_reader_that_is_too_slow_loses_nothing(ends):
    payload = pack(torch.randn(20_000))
    written = 0
    while ends.write(0, (1, str(written)), payload):
        written += 1
    assert [key for _, key, _, _ in ends.read()] == [(1, str(i)) for i in range(written)]
    assert ends.write(0, (1, "again"), payload)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([10, 1000, 50_000]))
def test_any_interleaving_of_writing_and_reading_keeps_the_order(seed, largest):
    draw, channels, expected = random.Random(seed), Channels(0, Wakeup()), deque()
    channels.accept(0, channels.offer(0))
    for number in range(200):
        payload = pack((torch.full((draw.randrange(largest),), float(number)), number))
        if channels.write(0, (number, f"0F{number}"), payload):
            expected.append((number, payload))
        else:
            assert expected, "an empty channel has room"
        if draw.random() < 0.2:
            for _, key, answer, _ in channels.read():
                at, wanted = expected.popleft()
                assert key == (at, f"0F{at}") and same(answer, wanted)
    assert len(channels.read()) == len(expected)


def test_a_channel_is_offered_once_and_only_to_this_host(ends):
    assert ends.offer(0) is None
    offer = ends.offer(1)
    assert not ends.accept(1, offer._replace(name=f"net:[1] {offer.name.split()[-1]}"))
    assert not ends.accept(1, offer._replace(name=offer.name[:-1]))
    assert not ends.accept(1, offer._replace(process=2**22 + 1))
    assert not ends.accept(1, offer._replace(memory=0))
    assert not ends.accept(1, offer._replace(wakeup=10**6))
    assert not ends.write(1, (1, "0F0"), None)
    assert ends.accept(1, decode_value(encode_value(offer)))


def test_a_peer_on_another_host_is_asked_once(ends):
    assert ends.offer(1) is not None
    ends.decided(1, told(None))
    assert ends.offer(1) is None
    assert ends.write(0, (1, "0F0"), None) and len(ends.read()) == 1, "the other channels are as they were"


def test_a_channel_goes_on_from_its_start_once_all_is_read(ends):
    """Memory that caches hold, and that the system has given already: a job's channels take what they need."""
    for number in range(100):
        assert ends.write(0, (number, "0F0"), pack(torch.ones(50_000)))
        assert len(ends.read()) == 1
    held = os.stat(f"/proc/self/fd/{ends.made.memory}").st_blocks * 512
    assert held < 2**20


def test_a_name_may_have_any_letters(ends):
    assert ends.write(0, (1, "größe"), None)
    assert ends.read()[0][1] == (1, "größe")


def test_the_default_device_is_not_where_payloads_arrive(ends):
    ends.write(0, (1, "0F0"), pack(torch.ones(3)))
    with torch.device("meta"):
        ((_, _, answer, _),) = ends.read()
    assert answer.tensors[0].tolist() == [1, 1, 1]


def test_a_sandbox_that_does_not_say_who_is_on_this_host_has_no_channels(monkeypatch):
    def refuse():
        raise PermissionError("/proc/self/ns/net")

    monkeypatch.setattr(module, "_network", refuse)
    assert Channels(0, Wakeup()).offer(0) is None


def test_a_system_without_such_memory_has_no_channels(monkeypatch):
    def refuse(name):
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert Channels(0, Wakeup()).offer(0) is None


def test_who_is_gone_reads_nothing_more(ends):
    ends.write(0, (1, "0F0"), None)
    ends.gone(0)
    assert not ends.write(0, (1, "0F1"), None)
    offer = ends.offer(1)
    ends.gone(1)
    assert not ends.accept(1, offer), "its offer came late"


def test_a_writer_may_die():
    """The reader keeps what was written, and nothing is left in the file system."""
    ends = Channels(0, Wakeup())
    offer = ends.offer(1)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        writer = Channels(0, Wakeup())
        ok = writer.accept(1, offer) and writer.write(1, (1, "0F0"), pack(torch.ones(2)))
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ends.wakeup.wait(60)
    ((peer, _, answer, _),) = ends.read()
    assert peer == 1 and torch.equal(answer.tensors[0], torch.ones(2))


def test_only_a_reader_that_sleeps_is_notified(ends):
    ends.wake()
    ends.write(0, (1, "0F0"), None)
    assert not ends.wakeup.wait(0), "it would look by itself"
    assert ends.sleep(), "what has come while it was awake"
    ends.read()
    assert not ends.sleep()
    ends.write(0, (1, "0F1"), None)
    assert ends.wakeup.wait(0)


def test_a_channel_made_while_its_reader_sleeps_wakes_it():
    ends = Channels(0, Wakeup())
    assert not ends.sleep()
    ends.accept(0, ends.offer(0))
    ends.write(0, (1, "0F0"), None)
    assert ends.wakeup.wait(0)


def test_two_processes_that_wait_for_each_other_never_both_sleep():
    """Writers used to notify always; each must now see that the other sleeps, or the other what was written."""
    rounds, here = 3000, Channels(0, Wakeup())
    to_child, to_parent = os.pipe(), os.pipe()
    sys.stdout.flush()
    child = os.fork()
    here = here if child else Channels(0, Wakeup())
    mine, theirs = (to_child, to_parent) if child else (to_parent, to_child)
    os.write(mine[1], encode_value(here.offer(0)))
    assert here.accept(0, decode_value(os.read(theirs[0], 4096)))
    woken = True
    for number in range(rounds):
        if child:
            here.write(0, (number, "0F0"), None)
        while woken and not here.read():
            woken = here.sleep() or here.wakeup.wait(10)
            here.wake()
        if not child:
            here.write(0, (number, "0F0"), None)
    if not child:
        os._exit(0 if woken else 1)
    assert woken and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def met(channels, pages, caplog, peer=0):
    """Let the reader try the pages of its writer; return what it says of them."""
    with caplog.at_level("INFO"):
        channels.decided(peer, told(pages))
    return caplog.messages[-1]


@pytest.fixture
def lending(caplog):
    """A channel whose reader can read the writer's memory, as this process can its own."""
    channels = Channels(0, Wakeup())
    how = met(channels, channels.accept(0, channels.offer(0)), caplog)
    if "read from its memory" not in how:
        pytest.skip(how)
    return channels


@pytest.mark.parametrize(
    "tree",
    [
        torch.randn(3 * 10**6),
        (torch.randn(300, 400).t(), {"mask": torch.ones(5) > 0, "none": None}, torch.randn(0, 7)),
        torch.randn(600, 600)[:, ::2],
        torch.randn(1000, 1).expand(1000, 1000),
        torch.eye(400).to_sparse(),
        torch.complex(torch.randn(10**5), torch.randn(10**5)).conj(),
        torch.randn(10**6)._neg_view(),
    ],
    ids="large, several, with gaps, repeated, sparse, conjugate, negated".split(", "),
)
def test_a_large_payload_is_read_from_where_it_lies(lending, tree, monkeypatch):
    monkeypatch.setattr(module, "LENT_FROM", 1000)
    payload = pack(tree)
    assert lending.write(0, (1, "0F0"), payload) is False
    assert not lending.returned(), "it has not been read"
    ((peer, key, answer, _),) = lending.read()
    assert peer == 0 and key == (1, "0F0") and same_values(answer, payload)
    assert lending.returned() == [(0, (1, "0F0"))] and not lending.returned()


def same_values(a, b):
    return all(torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(a.tensors, b.tensors, strict=True))


def test_what_is_lent_stays_until_it_has_been_taken(lending):
    """What had to be packed for the road lies in no tensor of the caller's."""
    tree = torch.randn(2000, 2000)[:, 1::2]
    wanted = tree.clone()
    assert lending.write(0, (1, "0F0"), pack(tree)) is False
    del tree
    heap = [torch.zeros(10**6) for _ in range(20)]
    ((_, _, answer, _),) = lending.read()
    assert torch.equal(answer.tensors[0], wanted) and not any(block.any() for block in heap)


def test_where_the_system_refuses_memory_is_copied(monkeypatch, caplog):
    """Seccomp profiles of containers and Yama refuse to read another process."""

    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(peer_memory, "read_memory", refuse)
    ends = Channels(0, Wakeup())
    how = met(ends, ends.accept(0, ends.offer(0)), caplog)
    assert how.startswith("worker 0: large payloads of worker 0 are copied by both") and "not permitted" in how
    assert ends.write(0, (1, "0F0"), pack(torch.ones(10**6)))
    assert not ends.write(0, (1, "0F1"), pack(torch.ones(2 * 10**6))), "it goes by a message"


def test_another_process_with_the_writers_number_is_not_read(caplog):
    ends = Channels(0, Wakeup())
    ((name, (process, address, proof)),) = ends.accept(0, ends.offer(0)).items()
    assert "copied by both" in met(ends, {name: (process, address + 1, proof)}, caplog)


def test_a_payload_whose_lender_died_is_an_error_at_once(ends, caplog):
    """The consumer would have waited for what nobody can send any more."""
    offer, payload = ends.offer(1), pack(torch.ones(10**6))  # a forked child has no threads that fill it
    to_child, to_parent = os.pipe(), os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        writer = Channels(0, Wakeup())
        os.write(to_parent[1], encode_value(writer.accept(1, offer)))
        os.read(to_child[0], 1)  # the reader has tried
        lent = writer.write(1, (1, "0F0"), payload)
        os._exit(0 if lent is False else 1)
    how = met(ends, decode_value(os.read(to_parent[0], 1000)), caplog, peer=1)
    os.write(to_child[1], b"1")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if "from its memory" not in how:
        pytest.skip(how)
    assert code == 0
    ((peer, key, answer, _),) = ends.read()
    assert peer == 1 and key == (1, "0F0") and isinstance(answer, ProcessLookupError)
