"""Large payloads that NIXL reads: the same bits as in one process; where its reads would wait, another way is taken."""

import pytest
from processes import python, rpc_pipe

pytest.importorskip("nixl", reason="needs pip install 'rpc-pipe[nixl]'")

MODEL = """
import logging
import torch
from torch import nn
logging.basicConfig(level="INFO")

class Multiply(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1 + number / 8))

    def forward(self, x):
        return torch.sin(x * self.weight)

def make():
    return nn.Sequential(*map(Multiply, range(4))), (torch.randn(4, 2**20), torch.zeros(4)), loss

def loss(y, target):
    return (y.mean(1) - target).square().mean()
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "wide.py").write_text(MODEL)
    return f"{tmp_path / 'wide.py'}:make"


@pytest.mark.parametrize(
    "transport, schedule",
    [("rpc", "1f1b"), ("rpc", "zb-v"), ("rpc", "chimera"), ("zmq", "interleaved"), ("zmq", "zb-h1")],
)
def test_payloads_that_nixl_reads_train_the_same_bits(model, transport, schedule):
    typed = ["verify", model, "--workers", 2, "--microbatches", 4, "--steps", 3]
    done = rpc_pipe(*typed, "--schedule", schedule, "--transport", transport, anew=True, RPC_PIPE_WAYS="nixl")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "identical" in said, said
    for here, there in ((0, 1), (1, 0)):
        assert f"worker {here}: large payloads of worker {there} are read by NIXL, from 2048 KiB on" in said, said


def test_where_reads_would_wait_for_the_owner_another_way_is_taken(model):
    """Over TCP a read ends when its owner calls NIXL, which it does not: the first large payload hung."""
    typed = ["verify", model, "--workers", 2, "--microbatches", 4, "--steps", 3]
    done = rpc_pipe(*typed, anew=True, RPC_PIPE_WAYS="nixl,memory", UCX_TLS="tcp,self")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "identical" in said, said
    assert "read by NIXL" not in said and said.count("worker") > 1, said


def test_strangers_of_other_hosts_do_not_reach_an_agent():
    """UCX listens on every interface of the host, and authenticates nobody."""
    program = """
import psutil
from rpc_pipe.workers.transport.ways import ways_here

ways = ways_here(["nixl"])
print({each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN})
"""
    done = python("-c", program, anew=True)
    assert done.stdout == "{'127.0.0.1'}\n", done.stdout + done.stderr
