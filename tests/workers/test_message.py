"""Messages as bytes: what is read is what was written, and what nobody has written is refused."""

import os
import pickle
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from rpc_pipe.dependency import ConfigError, Disagreement, WorkerFailure
from rpc_pipe.workers.transport import form, message
from rpc_pipe.workers.transport.message import Message, decode, encode
from rpc_pipe.workers.transport.payload import Payload, Place, pack, unpack
from rpc_pipe.workers.transport.values import Malformed, decode_value, encode_value

COMPLEX = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)


class Pair(NamedTuple):
    left: int
    right: object


def read_again(said):
    data, tensors = encode(said)
    beside = iter(tensors)
    return decode(data, lambda _: next(beside))


def through(payload):
    read = read_again(Message([(1, "0F1")], [(1, "0F0")], [((1, "1B0"), payload)]))
    assert (read.asks, read.taken) == ([(1, "0F1")], [(1, "0F0")])
    ((key, answer),) = read.answers
    assert key == (1, "1B0")
    return answer


# --- values

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float16, torch.int64, torch.Size([2, 3]), torch.Size([])]),
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(st.text() | st.integers(), children, max_size=4)
        | st.builds(OrderedDict, st.dictionaries(st.text(), children, max_size=2))
        | st.builds(Pair, st.integers(), children)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_a_value_is_read_as_it_was_written(value):
    read = decode_value(encode_value(value))
    assert repr(read) == repr(value) and type(read) is type(value)  # 1, True and 1.0 are equal, and not the same


def test_named_tuples_are_of_their_classes():
    assert type(decode_value(encode_value(Pair(1, "x")))) is Pair
    best = decode_value(encode_value(torch.ones(2, 3).max(0)[:0] or torch.return_types.max(("values", "indices"))))
    assert type(best) is torch.return_types.max and best.indices == "indices"


def test_what_cannot_be_written_is_named():
    class Local(NamedTuple):
        x: int

    with pytest.raises(ConfigError, match=r"Local cannot travel between workers"):
        encode_value([Local(1)])
    deep = []
    for _ in range(3000):
        deep = [deep]
    with refused("containers"):
        encode_value(deep)


@pytest.mark.parametrize("value", [range(3), print, os.system, sys.exit], ids=str)
def test_nothing_is_made_or_called_but_plain_values(value):
    with pytest.raises(Malformed):
        decode_value(pickle.dumps(value))
    with pytest.raises(ConfigError):
        encode_value(value)


def test_nobody_imports_for_a_message():
    written = encode_value(Pair("echo", 1)).replace(__name__.encode(), b"antigravity".ljust(len(__name__), b"y"))
    with pytest.raises(Malformed, match="antigravity"):
        decode_value(written)
    assert not any(name.startswith("antigravity") for name in sys.modules)


# --- payloads


@pytest.mark.parametrize("repeats", [1, 2**15], ids=["small", "large"])
@pytest.mark.parametrize("view", ["conj", "neg", "conj of neg", "transposed conj"])
def test_views_that_change_what_bytes_mean_arrive_as_they_look(view, repeats):
    """Complex models were wrong over RPC below 32 KiB: the bytes were sent, without the bit that says how to read."""
    z = COMPLEX.repeat(repeats, 1)
    tree = {
        "conj": z.conj(),
        "neg": z.conj().imag,
        "conj of neg": torch.complex(z.real, z.real).conj(),
        "transposed conj": z.mH,
    }[view]
    arrived = unpack(through(pack(tree)))
    assert torch.equal(arrived, tree.resolve_conj().resolve_neg())
    assert arrived.is_conj() == tree.is_conj()  # matrix products choose their kernel by it


LAYOUTS = ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc", "coo of complex"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_travel(layout):
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 0] = 5, 7
    sparse = {
        "coo": lambda: dense.to_sparse(),
        "uncoalesced": lambda: torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 2.0], (4, 6)),
        "csr": lambda: dense.to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
        "coo of complex": lambda: torch.complex(dense, dense).to_sparse(),
    }[layout]()
    arrived = unpack(through(pack((sparse, torch.ones(2)))))[0]
    assert arrived.layout == sparse.layout and torch.equal(arrived.to_dense(), sparse.to_dense())
    if layout in ("coo", "uncoalesced"):
        assert arrived.is_coalesced() == sparse.is_coalesced()


@pytest.mark.parametrize(
    "tree",
    [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(100, 100).t(),
        torch.randn(100)[10:20],
        torch.randn(6, 4)[:, ::2],
        torch.randn(6, 40)[:, 30],
        torch.randn(1, 4).expand(5, 4),
        torch.randn(3, 4)[:, :1].expand(3, 3),  # reaches over as many elements as it has
        torch.randn(2, 3, 8)[:, None, 1, ::2].expand(2, 5, 4).transpose(0, 2),
        torch.arange(10.0).unfold(0, 5, 4),
        torch.randn(3, 8)[:, :4].unfold(1, 3, 1),
        torch.randn(1).expand(30_000),
        torch.randn(3, 30_000)[:, ::2],
        torch.randn(0, 7),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn),
        (torch.randn(2).requires_grad_(), torch.randn(2), 3),
        {"hidden": torch.randn(2, 2), "step": 3, "on": True, "scale": -0.0, "pair": Pair(1, torch.ones(1))},
        [torch.zeros(20_000), torch.ones(1), torch.zeros(20_000)],
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_payload_arrives_as_it_was(tree):
    payload = pack(tree)
    for _ in range(2):  # the second time its form is known
        arrived = through(payload)
        assert repr(arrived.skeleton) == repr(payload.skeleton)
        for a, b in zip(arrived.tensors, payload.tensors, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.double(), b.double())
            assert a.stride() == b.stride(), "kernels choose by it"


def test_forms_that_are_equal_but_not_the_same_are_told_apart():
    for value in (1, True, 1.0, 0.0, -0.0, (1,), [1], {"a": 1}, {"a": True}):
        assert repr(through(Payload([], value)).skeleton) == repr(value)


def test_forms_without_end_are_not_remembered_without_end():
    for size in range(form._MOST + 10):
        through(pack((torch.empty(0, size), size)))
    assert form._written_once.cache_info().currsize <= form._MOST


UNABLE = {
    "a NestedTensor on cpu": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    "a Tensor on meta": lambda: torch.ones(2, device="meta"),
    "a Mine on cpu": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "a quantized tensor on cpu": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a Tensor on cpu of layout torch._mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
}


@pytest.mark.parametrize("says", UNABLE)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_travel_is_named_with_its_payload(says):
    for skeleton in (None, Place(0, False)):
        with refused("payload"):
            through(Payload([UNABLE[says]()], skeleton))


# --- messages


def test_questions_of_several_runs_arrive_with_theirs():
    keys = [(1, "0F0"), (2, "0F0"), (1, "0F1"), (10**12, "größe\n\0")]
    read = read_again(Message(keys, keys[:1], []))
    assert sorted(read.asks) == sorted(keys) and read.taken == keys[:1]


def test_a_failure_arrives_whole():
    failure = WorkerFailure(3, "2B1", 7, "ValueError: nö", "Traceback\n  \ud800")
    read = read_again(Message([], [], [((1, "0F0 done"), None)], failure))
    assert vars(read.failure) == vars(failure) and str(read.failure) == str(failure)
    assert read.answers == [((1, "0F0 done"), None)]


def test_a_disagreement_arrives_as_its_text():
    read = read_again(Message([], [], [], Disagreement("worker 0 calls x")))
    assert type(read.failure) is Disagreement and str(read.failure) == "worker 0 calls x"


def test_a_message_of_another_version_says_so(monkeypatch):
    data, _ = encode(Message([(1, "0F0")], [], []))
    monkeypatch.setattr(message, "VERSION", 9)
    with refused("message", Malformed):
        decode(data, None)


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_a_message_that_is_cut_is_refused_in_one_sentence(seed):
    data, _ = encode(Message([(1, "0F1")], [], [((1, "1B0"), pack(torch.ones(3)))]))
    with refused("malformed", Malformed):
        decode(data[: seed % len(data)], None)
