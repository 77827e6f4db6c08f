"""Real processes over RPC: what comes out is what comes out of threads."""

import pytest
import torch
from processes import ROOT, rpc_pipe
from rpc_training import CASES, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each schedule gives in one job, all of whose payloads go by messages."""
    folder = tmp_path_factory.mktemp("trained")
    script = ROOT / "tests" / "rpc_training.py"
    done = rpc_pipe("run", script, "--workers", 4, "--", folder, RPC_PIPE_SHARED_MEMORY="off")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("schedule", CASES)
def test_replicas_split_backward_and_recomputation_are_the_same_by_rpc(trained, schedule):
    """Chimera sums a sparse gradient over replicas, zb-v splits backward and is sent by torch's public function alone.

    Varuna hung within 100 steps: its recomputation waits for other workers to have finished, and a worker that gave
    its weights away without waiting for anybody forgot what it had finished. Of zb-h2 updates are taken back.
    """
    losses, weights = torch.load(trained / schedule)
    expected, same = train(schedule, early=False)
    assert losses == expected and weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in same)
