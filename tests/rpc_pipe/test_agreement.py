"""What happens where processes are not asked for the same: scripts that users write, over RPC."""

import pytest
from processes import python, unmerged

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from rpc_pipe.pipeline import Pipeline, Training

torch.manual_seed(0)
x = torch.randn(48, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
layers = [partial(nn.Linear, 4, 8), nn.Tanh(), partial(nn.Dropout, 0.2), nn.Linear(8, 2)]
optimizer = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.cross_entropy, training=Training(optimizer), num_microbatches=3, num_workers=2)
sampler = DistributedSampler(data, 2, pipe.worker) if "share" in sys.argv else None
loader = DataLoader(data, 8, shuffle=sampler is None, sampler=sampler)
for epoch in range(2):
    for batch in loader:
        loss = pipe.step(batch)
    if "early" in sys.argv and pipe.worker == 1:
        break
    if "body" in sys.argv:
        for loss in pipe.train(loader):
            if pipe.worker == 1:
                pipe.evaluate(data[:])
    print(f"epoch {epoch}: {loss:.9f}, {pipe.evaluate(data[:]):.9f}\\n", end="")
"""


def run(folder, *arguments):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launched = ["-m", "rpc_pipe", "run", script, "--workers", 2, "--", *arguments]
    return python(*([script] if arguments == ("alone",) else launched), OMP_NUM_THREADS="1")


def test_a_loader_that_shuffles_gives_every_worker_what_it_gives_one_process(tmp_path):
    """Accuracy was 0.994 alone and 0.258 on three workers, exit 0."""
    alone, launched = run(tmp_path, "alone"), run(tmp_path, "launched")
    assert alone.returncode == launched.returncode == 0, alone.stderr + launched.stdout + launched.stderr
    lines = alone.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert unmerged(launched.stdout).count(f"| {line}") == 2, launched.stdout


@pytest.mark.parametrize(
    "how, message",
    [
        ("share", "were given different inputs (float32[8, 4] and float32[8, 4], with other values)"),
        ("early", "worker 0 calls evaluate, but worker 1 has ended its script"),
        ("body", "worker 0 calls step 8 where worker 1 calls evaluate"),
    ],
)
def test_workers_that_are_not_asked_for_the_same_say_so_at_once(tmp_path, how, message):
    """A sampler for each rank trained to an accuracy of 0.395, exit 0; a worker that ended early was `EPIPE`.

    One that evaluated alone between two results of `train` was known after `stall_s`.
    """
    done = run(tmp_path, how)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stdout and "epoch 1" not in done.stdout
    assert "Traceback" not in done.stdout and "EPIPE" not in done.stdout
