"""Workers on several hosts: names that resolve to themselves, several interfaces, losses, a cable that is pulled."""

import re
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from processes import python

from rpc_pipe.launching.interfaces import make_key

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SCRIPT = """
import sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 64, 64), nn.Tanh, partial(nn.Linear, 64, 64)]
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, training=Training(partial(torch.optim.SGD, lr=0.1)),
                stall_s=float(sys.argv[3]) if sys.argv[3:] else 300.0)
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
for step in range(int(sys.argv[1])):
    loss = pipe.step((x, x))
    if pipe.worker == 0:
        print("step", step, flush=True)
    time.sleep(float(sys.argv[2]))
if pipe.worker == 0:
    print("loss", loss.hex(), flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start a worker on each host, as torchrun would, and return their processes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    make_key(tmp_path / "key")

    def started(hosts, *arguments, count=2, **more):
        workers = []
        for host in range(count):
            environment = {
                "PYTHONPATH": str(ROOT), "RANK": str(host), "WORLD_SIZE": str(count), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29600",
                "RPC_PIPE_TRANSPORT": "zmq", "RPC_PIPE_KEY_FILE": str(tmp_path / "key"), "OMP_NUM_THREADS": "1",
                "RPC_PIPE_JOIN_TIMEOUT": "60", **more,
            }  # fmt: skip
            workers.append(hosts.start(host, tmp_path / "train.py", *arguments, **environment))
        return workers

    return started


def test_hosts_meet_whatever_their_names_say_and_lose_nothing(start, tmp_path):
    """Each host's own name is 127.0.1.1, packets of two networks are lost; the loss has one process's bits."""
    with Hosts(delay_s=0.005, loss=0.01, networks=2) as hosts:
        workers = start(hosts, "6", "0")
        said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    alone = python(tmp_path / "train.py", "6", "0", RPC_PIPE_TRANSPORT="local")
    assert re.findall("loss .*", said[0])[:1] == re.findall("loss .*", alone.stdout)[:1] != []


def test_hosts_meet_by_ipv6_alone(start):
    """Listeners were of IPv4, so workers of such hosts said that their interface had no address."""
    with Hosts(ipv6=True) as hosts:
        workers = start(hosts, "2", "0")
        said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert "loss" in said[0]


def test_a_pulled_cable_is_noticed_and_named(start):
    with Hosts() as hosts:
        workers = start(hosts, "1000", "0.02", RPC_PIPE_LOST_AFTER="3")
        for line in workers[0].stdout:
            if line.startswith("step 3"):
                break
        hosts.cut.add(1)
        said = [worker.communicate(timeout=60)[0] for worker in workers]  # a stall takes 300 s
    for worker, text in zip(workers, said, strict=True):
        assert worker.returncode not in (0, None) and "the connection broke" in text, text


def test_over_rpc_the_host_that_is_silent_is_named_by_all(start):
    """TensorPipe tells nobody of a silent host: worker 0 blamed worker 1, which waited for worker 2 itself."""
    with Hosts(3) as hosts:
        rpc = {"RPC_PIPE_TRANSPORT": "rpc", "RPC_PIPE_TRUST_NETWORK": "on"}
        workers = start(hosts, "1000", "0.02", "2", count=3, **rpc)
        for line in workers[0].stdout:
            if line.startswith("step 3"):
                break
        hosts.cut.add(2)
        for worker in workers[:2]:  # that they say so is all: to leave, they wait for the silent host too
            text = next((line for line in worker.stdout if "Stalled: " in line), "")
            assert "worker 2 cannot be reached" in text and "worker 1 cannot" not in text, text
