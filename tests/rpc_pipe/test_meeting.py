"""The start of a job: workers that die or are late while they meet."""

import pytest
from processes import rpc_pipe

TRAIN = """
import os, signal, sys, time
import torch
from rpc_pipe import Pipeline, Training
rank, first = os.environ["RANK"], os.environ["RPC_PIPE_RESTARTS"] == "0"
{fault}
pipe = Pipeline(
    [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)], torch.nn.functional.mse_loss,
    training=Training(lambda p: torch.optim.SGD(p, lr=0.1)), num_microbatches=2,
)
loss = pipe.step((torch.ones(8, 4), torch.ones(8, 2)))
print("loss", loss)
"""

#: worker 0 hears of the broken connection half a second before the launcher can know of the death behind it
DIES = """
import torch.distributed.rpc as rpc
if first and rank == "1":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if first:
    def init_rpc(*args, **options):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    rpc.init_rpc = init_rpc
"""

LATE = """
if first and rank == "1":
    time.sleep(60)
"""


def test_a_worker_that_dies_while_the_workers_meet_is_named_and_the_job_starts_again(tmp_path):
    """The other worker's broken connection was told first, as a wrong option: exit 2, and no restart."""
    (tmp_path / "train.py").write_text(TRAIN.format(fault=DIES))
    done = rpc_pipe("run", "train.py", "--workers", 2, "--max-restarts", 1, cwd=tmp_path, RPC_PIPE_LOGS="off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 was killed by signal 9" in done.stdout + done.stderr
    assert "starting again (1 of 1)" in done.stdout and "loss " in done.stdout


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_worker_that_is_late_is_named_and_the_job_starts_again(tmp_path, transport):
    (tmp_path / "train.py").write_text(TRAIN.format(fault=LATE))
    options = "--max-restarts", 1, "--transport", transport
    more = {"RPC_PIPE_LOGS": "off", "RPC_PIPE_JOIN_TIMEOUT": "3"}
    done = rpc_pipe("run", "train.py", "--workers", 2, *options, cwd=tmp_path, **more)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "the workers could not meet" in said and "worker 1 has made no Pipeline so far" in said
    assert "starting again (1 of 1)" in said and "loss " in said
