"""Messages as bytes: what is decoded is what was encoded."""

import pytest
import torch

from rpc_pipe.workers.transport.exchange import Message
from rpc_pipe.workers.transport.message import decode, encode
from rpc_pipe.workers.transport.payload import pack, unpack

COMPLEX = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)


def through(payload):
    message = decode(*encode(Message([(1, "0F1")], [(1, "0F0")], [((1, "1B0"), payload)])))
    assert (message.asks, message.taken) == ([(1, "0F1")], [(1, "0F0")])
    ((key, answer),) = message.answers
    assert key == (1, "1B0")
    return answer


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
