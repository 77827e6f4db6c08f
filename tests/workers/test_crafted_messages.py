"""Messages that a peer with the key has crafted: each is refused by `Malformed`, or read as the data that it is.

The pickles of earlier versions started a process from 66 bytes, took 16.7 GB from 9 bytes, ended the process by deep
tuples, and copied as many bytes as a form claimed.
"""

import random
import sys
import tracemalloc
from collections import OrderedDict
from typing import NamedTuple

import msgspec
import pytest
import torch

from rpc_pipe.dependency import Malformed, WorkerFailure
from rpc_pipe.workers.transport.form import form_of
from rpc_pipe.workers.transport.message import NOTHING, VERSION, LinkCallbacks, Message, decode, encode
from rpc_pipe.workers.transport.messages import Messages
from rpc_pipe.workers.transport.payload import Place, Sparse, pack, unpack
from rpc_pipe.workers.transport.shared_memory import _HEAD, Channels
from rpc_pipe.workers.transport.values import decode_value, encode_value
from rpc_pipe.workers.transport.wakeup import Wakeup

pack_items = msgspec.msgpack.encode
KEY = 1, "1B0"
#: what may be taken beside twice the size of a message
SPARE = 2**20


class Pair(NamedTuple):
    left: int


class Loud(Pair):
    """Would run its own code when it is read."""

    def __iter__(self):
        raise AssertionError("read")


def ordinary():
    """Return messages as workers send them, and the large tensors beside each."""
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 0] = 5, 7
    trees = [
        torch.randn(3, 4),
        (torch.randn(2, 3).requires_grad_(), torch.arange(4), {"a": [1.5, None, 2**80], ("k", 1): "größe"}),
        OrderedDict(x=torch.randn(6, 40)[:, 30], y=torch.Size([1, 2]), z=torch.float16, w=1j),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        torch.randn(200, 100),
    ]
    for tree in trees:
        yield encode(Message([(1, "0F1")], [(1, "0F0")], [(KEY, pack(tree))], WorkerFailure(1, "2B1", 0, "x", "y")))
    yield encode(NOTHING._replace(note=(7, "offer", {"memory": (1, 2, b"x" * 16)})))


def reading(data, beside=()):
    """Read a message as a worker does; return what was read."""
    large = iter(beside)
    message = decode(data, lambda look: next(large, None))
    return message, [unpack(answer) for _, answer in message.answers if answer is not None]


def refused_or_read(read, size):
    """Read crafted bytes under bounds; return whether they were refused."""
    loaded = set(sys.modules)
    tracemalloc.start()
    try:
        read()
    except Malformed:
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 2 * size + SPARE
        assert set(sys.modules) == loaded
    return False


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_workers_send_with_bytes_cut_or_changed_is_refused_or_read():
    draw, refused = random.Random(0), 0
    for data, beside in ordinary():
        assert reading(data, beside)
        for _ in range(60):
            crafted = bytearray(data)
            for _ in range(draw.choice((1, 1, 2, 8))):
                crafted[draw.randrange(len(crafted))] = draw.choice(
                    (0, 0x7F, 0x90, 0xC0, 0xDD, 0xFF, draw.randrange(256))
                )
            if draw.random() < 0.3:
                del crafted[draw.randrange(len(crafted)) :]
            refused += refused_or_read(
                lambda crafted=bytes(crafted), beside=beside: reading(crafted, beside), len(data)
            )
    assert refused > 200


FIRST = Place(0, False)


def form_with(looks, skeleton=FIRST):
    return encode_value((skeleton, tuple(looks)))


def look(shape=(2,), strides=(1,), dtype=torch.float32, conjugate=False, reaches=False):
    return dtype, shape, strides, conjugate, reaches


SPARSE_PARTS = (Place(0, False), Place(1, False), torch.Size((4, 6)), False)
TWO = look((2, 3), (3, 1), torch.int64), look((3,), (1,))
FORMS = {
    "no look": b"",
    "a look of too few parts": encode_value((None, ((torch.float32, (2,), (1,)),))),
    "ranks that differ": form_with([look((2, 3), (1,))]),
    "a negative size": form_with([look((-2,), (1,))]),
    "a negative stride": form_with([look((2,), (-1,))]),
    "a size that is a float": form_with([look((2.0,), (1,))]),
    "a size that is True": form_with([look((True,), (1,))]),
    "terabytes": form_with([look((2**40,), (1,))]),
    "an element, and terabytes to the next one": form_with([look((2,), (2**40,))]),
    "gaps beyond measure": form_with([look((1000,), (60_000,))]),
    "many gaps": form_with([look((8,), (60_000,))] * 100),
    "sizes that overflow": form_with([look((2**40, 2**40), (0, 0))]),
    "a thousand dimensions": form_with([look((1,) * 1000, (1,) * 1000)]),
    "a dtype without tensors": form_with([look(dtype=torch.quint8)]),
    "a dtype that is a text": form_with([look(dtype="float32")]),
    "conjugate floats": form_with([look(conjugate=True)]),
    "a place that is not there": form_with([look()], Place(1, False)),
    "a place before the first": form_with([look()], [Place(-1, False)]),
    "a place that is no number": form_with([look()], {"a": Place("0", False)}),
    "a gradient of whole numbers": form_with([look(dtype=torch.int64)], Place(0, True)),
    "a sparse tensor of layout strided": form_with(TWO, Sparse("torch.strided", SPARSE_PARTS, False)),
    "a sparse tensor of layout os": form_with(TWO, Sparse("os", SPARSE_PARTS, False)),
    "a sparse tensor in another": form_with(TWO, Sparse("torch.sparse_coo", (Sparse("x", (), False),), False)),
    "sparse indices out of range": form_with(TWO, Sparse("torch.sparse_coo", SPARSE_PARTS, False)),
    "sparse without parts": form_with(TWO, Sparse("torch.sparse_coo", (), False)),
    "a sparse tensor of a list": form_with(TWO, Sparse("torch.sparse_coo", (*SPARSE_PARTS, [1]), False)),
    "a compressed tensor of odd parts": form_with(TWO, Sparse("torch.sparse_csr", SPARSE_PARTS, False)),
}


def message_of(form, content):
    return pack_items([VERSION, [], [], [[1, "1B0", form, content]], b"", None])


@pytest.mark.parametrize("case", FORMS)
def test_a_form_that_contradicts_itself_is_refused(case):
    form = FORMS[case]
    for size in (0, 8, 60, 4096):
        data = message_of(form, bytes([99]) * size)
        assert refused_or_read(lambda data=data: reading(data), len(data)) or not form


def test_contents_of_another_size_are_refused_before_they_are_copied():
    """`num_bytes` was believed: memory behind the tensor was overwritten, or that behind the message was read."""
    for size in (0, 7, 9, 100_000):
        with pytest.raises(Malformed):
            reading(message_of(form_with([look()]), bytes(size)))
    large = form_with([look((100, 100), (100, 1))])
    for beside in ([], [torch.zeros(100, 99)], [torch.zeros(100, 100).double()], [torch.zeros(100, 100).t()], ["x"]):
        with pytest.raises(Malformed):
            reading(message_of(large, b""), beside)
    assert reading(message_of(form_with([look()]), bytes(8)))


VALUES = {
    "deep arrays": b"\x92\x00" * 100_000,
    "deep maps": b"\x81\x01" * 100_000,
    "deep padding": b"\x93\x0a" * 5000,
    "billions of items": b"\xdd\x7f\xff\xff\xff",
    "a gigabyte": b"\xc6\x40\x00\x00\x00",
    "a text of a gigabyte": b"\xdb\x40\x00\x00\x00",
    "a million empty arrays": b"\xdd\x00\x10\x00\x01\x00" + b"\x90" * 2**20,
    "a million small values": b"\xdd\x00\x10\x00\x01\x00" + b"\xd0\x80" * 2**20,
    "a text of four bytes a letter": b"\xdb\x00\x20\x00\x04" + b"a" * 2**21 + "😀".encode(),
    "an extension": b"\xd4\x05\x00",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "a map": b"\x81\xa1a\x01",
    "a process": pack_items([5, "platform", "uname_result", *"abcde"]),
    "a class with a method": pack_items([5, __name__, "Loud", 1]),
    "a class that is none of tuples": pack_items([5, "threading", "Thread"]),
    "a function": pack_items([5, "os", "system", "true"]),
    "a named tuple of too many items": pack_items([5, Place.__module__, "Place", 1, False, 3]),
    "a module that is not loaded": pack_items([5, "antigravity", "Place", 1, False]),
    "a module's own attributes": pack_items([5, "transformers", "AutoModel", 1]),
    "a class by no name": pack_items([5, [1, 1], {}]),
    "a dtype that there is not": pack_items([6, "__class__"]),
    "a key twice": pack_items([2, 1, 1, 1, 2]),
    "a key without a value": pack_items([2, 1]),
    "a key that is a list": pack_items([2, [0], 1]),
    "an unknown tag": pack_items([99, 1]),
    "a tag that is True": pack_items([True, 1]),
    "no tag": pack_items([]),
    "a size of texts": pack_items([4, "a"]),
    "a complex text": pack_items([7, "1", "2"]),
    "a number of no bytes": pack_items([8, 1]),
    "half a text": pack_items([9, b"\xff"]),
    "bytes behind the value": pack_items(1) * 2,
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_nobody_sends_are_refused(case):
    data = VALUES[case]
    noted = pack_items([VERSION, [], [], [], b"", [1, "clock", data]])
    formed = message_of(data, b"")
    for read, size in (
        (lambda: decode_value(data), len(data)),
        (lambda: form_of(data), len(data)),
        (lambda: reading(noted), len(noted)),
        (lambda: reading(formed), len(formed)),
        (lambda: reading(data), len(data)),
    ):
        assert refused_or_read(read, size)


def test_many_values_travel_since_their_sender_pads_them():
    value = [(number, str(number)) for number in range(30_000)]
    data = encode_value(value)
    assert decode_value(data) == value and len(data) > 2**20
    asks = [(1, f"3F{number}") for number in range(20_000)]
    assert decode(encode(Message(asks, [], []))[0], None).asks == asks


ENVELOPES = {
    "no array": pack_items({"version": VERSION}),
    "another version": pack_items([5, [], [], [], b"", None]),
    "too few fields": pack_items([VERSION, [], []]),
    "too many fields": pack_items([VERSION, [], [], [], b"", None, b"", 1]),
    "a key that is no pair": pack_items([VERSION, [[1]], [], [], b"", None]),
    "a run that is a text": pack_items([VERSION, [["1", "0F0"]], [], [], b"", None]),
    "a run without end": pack_items([VERSION, [[2**64 - 1, "0F0"]], [], [], b"", None]),
    "half a million questions": b"\x96\x06\xdd\x00\x08\x00\x00" + b"\x92\x00\xa0" * 2**19 + b"\x90\x90\xc4\x00\xc0",
    "a failure of other parts": pack_items([VERSION, [], [], [], encode_value({"worker": 1}), None]),
    "a failure that is a number": pack_items([VERSION, [], [], [], encode_value([1]), None]),
    "a request without a name": pack_items([VERSION, [], [], [], b"", [1, None, b""]]),
}


@pytest.mark.parametrize("case", ENVELOPES)
def test_an_envelope_of_another_form_is_refused(case):
    data = ENVELOPES[case]
    assert refused_or_read(lambda: reading(data), len(data)) or case == "a run without end"


class _Silent:
    """A link that nobody hears."""

    sends_cheaply, look, wakeup = True, None, Wakeup()

    def open(self, ears: LinkCallbacks) -> None:
        pass

    def send(self, peer, message) -> None:
        pass


def test_an_unknown_request_is_no_goodbye():
    """Each request with an unknown name ended the talk with its peer, as "leave" does."""
    messages = Messages(_Silent())
    for note in ((1, "lease", None), (1, "look", "x"), (1, "offer", [1])):
        messages.channels = Channels(0, Wakeup())
        with pytest.raises(Malformed):
            messages.received(1, NOTHING._replace(note=note))
    assert not messages._talk(1).closed
    asked = messages.request(1, "clock")
    with pytest.raises(Malformed):
        messages.received(1, NOTHING._replace(note=(0, "", "noon")))
    assert not asked.done()


RECORDS = {
    "a record longer than the channel": (2**40, 3, 0, 0),
    "a record shorter than its head": (1, 3, 0, 0),
    "a name longer than the record": (128, 2**20, 0, 0),
    "a form longer than the record": (128, 3, 2**20, 0),
    "addresses longer than the record": (128, 3, 0, 2**40),
    "no contents": (128, 3, None, 0),
    "addresses of another number": (192, 3, None, 16),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_of_shared_memory_stays_within_it(case):
    """Sizes in a record were believed, and read from the memory behind it."""
    size, name_size, form_size, where_size = RECORDS[case]
    form = form_with([look((1000,), (1,))])
    form_size = len(form) if form_size is None else form_size
    channels = Channels(0, Wakeup())
    if channels.offer(1) is None:
        pytest.skip("this system has no channels")
    ((_, reader, counters),) = channels._readers
    reader.data[: _HEAD.size + 3 + len(form)] = _HEAD.pack(size, 0, 1, name_size, form_size, where_size) + b"1B0" + form
    counters[8] = 192
    with pytest.raises(Malformed):
        channels.read()
