"""A loader in processes: each reads what it uses, or all from the first."""

import itertools

import numpy as np
import pytest
from processes import rpc_pipe, unmerged

from rpc_pipe.data import Loader, tokens
from rpc_pipe.model.batches.own_rows import OwnRows, read_microbatches
from rpc_pipe.model.batches.sequences import Sequences
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.transport.scatter import run_by

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, tokens

class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 50)
    def forward(self, x):
        return self.linear(x).flatten(0, 1)

def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits, targets.flatten())

layers = [partial(nn.Embedding, 50, 8), nn.Tanh, Last]
pipe = Pipeline(layers, loss_fn, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=3)
how, folder = sys.argv[1:]

def make():
    assert pipe.worker == 0, "only the first worker has the data"
    return tokens(folder, 4)

if how == "first":
    loader = Loader(make, rows=8, readers="first")
else:
    loader = Loader(tokens(folder, 4), rows=8, seed=pipe.worker if how == "seeds" else 0)
losses = []
for step, loss in enumerate(pipe.train(loader)):
    losses.append(loss)
    if step == 5:
        break
for step, batch in zip(range(2), loader):
    losses += [pipe.step(batch), pipe.evaluate(batch)]
print(f"{sum(losses):.9f} at {loader.position}, worker {pipe.worker} loaded {loader.loads > 0}\\n", end="")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    for i in range(4):
        rng.integers(50, size=61, dtype=np.uint16).tofile(folder / f"{i}.u16")
    (folder / "train.py").write_text(SCRIPT)

    def run(how, workers=3, replicas=1):
        options = "--workers", workers, "--replicas", replicas
        return rpc_pipe("run", folder / "train.py", *options, "--", how, folder, OMP_NUM_THREADS="1")

    return run


def test_processes_read_what_they_use_or_pull_it_from_the_first(run):
    users, first = run("users"), run("first")
    assert users.returncode == first.returncode == 0, users.stdout + first.stdout
    figure = users.stdout.split("| ")[1].split(",")[0]
    assert figure.endswith(" at 64"), "six steps, and two whose batches are evaluated on, too"
    assert unmerged(users.stdout).count(figure) == unmerged(first.stdout).count(figure) == 3, (
        users.stdout + first.stdout
    )
    for worker, by_users, by_first in ((0, True, True), (1, False, False), (2, True, False)):
        assert f"worker {worker} loaded {by_users}" in users.stdout
        assert f"worker {worker} loaded {by_first}" in first.stdout


def test_replicas_pull_what_they_run_from_the_first():
    spec = make_spec("1f1b", 4, 8, {"replicas": 2})
    assert run_by(spec, 1, [*"abcd"]) == [None, "b", None, "d"]
    assert run_by(make_spec("1f1b", 4, 8), 1, [*"abcd"]) == [*"abcd"]


def test_replicas_train_alike_on_what_they_read_and_pull(run):
    users, first = run("users", 4, 2), run("first", 4, 2)
    assert users.returncode == first.returncode == 0, users.stdout + first.stdout
    figure = users.stdout.split("| ")[1].split(",")[0]
    assert unmerged(users.stdout).count(figure) == unmerged(first.stdout).count(figure) == 4, (
        users.stdout + first.stdout
    )


def test_of_other_replicas_rows_only_the_form_is_cut_into_slices(tmp_path):
    """Targets that another replica reads have no numbers here, by which tokens are counted."""
    np.arange(80, dtype=np.uint16).tofile(tmp_path / "0.u16")
    spec = make_spec("1f1b", 4, 2, {"replicas": 2}, "2")
    (batch,) = itertools.islice(Loader(tokens(tmp_path, 6), rows=4), 1)
    own = OwnRows(spec.unsliced(), 3)
    read = read_microbatches(batch, batch.read(True, True, own), 2, own)
    cut = Sequences(spec, None, loss_is_inside=False).cut(read)
    assert [target.is_meta for target in cut.targets] == [True, True, False, False]
    assert [tuple(target.shape) for target in cut.targets] == [(2, 3)] * 4 and cut.shares == [0.25] * 4


def test_loaders_that_differ_are_told_by_what_they_read(run):
    failed = run("seeds")
    assert failed.returncode == 1
    assert "were given different inputs (samples 0-7 in the order of" in failed.stdout, failed.stdout
