"""What is asked of a pipeline besides training: evaluations, predictions, and weights in files."""

import copy
import gc
import json
import weakref
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file
from small_pipeline import X, Y, layers, num_held, pipeline
from torch import nn

from rpc_pipe.checkpoints import writing
from rpc_pipe.pipeline import Pipeline, Training


def test_evaluate_and_predict_train_nothing_and_may_come_first():
    pipe = pipeline()
    before = pipe.weights.state_dict()
    logits = pipe.predict(X)
    assert logits.shape == (10, 3)
    assert pipe.evaluate((X, Y)) == pytest.approx(nn.functional.cross_entropy(logits, Y).item())
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.weights.state_dict().items())
    first = pipe.step((X, Y))
    assert first == pytest.approx(pipe.step((X, Y)), rel=0.5) and pipe.evaluate((X, Y)) < first


def test_a_state_is_a_snapshot_and_shared_layers_can_be_saved(tmp_path):
    shared = nn.Linear(4, 4)
    pipe = pipeline([shared, nn.Tanh(), shared, nn.Linear(4, 3)], num_workers=1)
    before = pipe.weights.state_dict()
    pipe.step((X, Y))
    assert not torch.equal(before["0.weight"], pipe.weights.state_dict()["0.weight"])
    pipe.weights.save(tmp_path / "shared.safetensors")


def test_a_prediction_goes_to_who_wants_it():
    pipe = pipeline(num_workers=3)
    logits = pipe.predict(X)
    for to in (1, [0, 2], range(3)):
        assert torch.equal(pipe.predict(X, to=to), logits)
    assert pipe.predict(X, to=[]) is None
    handed = pipe._session.each(lambda actor: actor.hand("outputs to 1", actor.worker, [2], [1]))
    assert handed == [None, [2], None], "to no other worker"
    for to in (3, -1, True, [0, "1"], "0"):
        with refused("to"):
            pipe.predict(X, to=to)


def test_save_writes_the_unsplit_models_names(tmp_path):

    pipe = pipeline()
    pipe.step((X, Y))
    pipe.weights.save(tmp_path / "model.safetensors")
    unsplit = nn.Sequential(*(build() for build in layers()))
    unsplit.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(unsplit.eval()(X), pipe.predict(X)) or torch.allclose(unsplit(X), pipe.predict(X))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_equal_weights_are_equal_files(tmp_path):
    """Of eight runs that ended with the same weights four files differed: the texts of a header had any order."""
    pipe = pipeline()
    for number in range(8):
        pipe.weights.save(tmp_path / str(number))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe", "zb-v", "varuna", "gpipe-recompute"])
def test_evaluation_between_steps_of_any_schedule(schedule):
    """Forward only, without recomputation or split, on whichever replica a microbatch meets."""

    def run(schedule):
        pipe = pipeline(schedule=schedule, num_workers=2, num_microbatches=3)
        before = pipe.evaluate((X, Y))
        losses = [pipe.step((X, Y)) for _ in range(2)]
        kept = [num_held(shard) for actor in pipe.actors for shard in actor.shards.values()]
        assert not any(kept), "nothing outlives a step"
        return before, losses[0], pipe.predict(X)

    found, expected = run(schedule), run("1f1b")
    assert found[:2] == expected[:2] and found[0] == found[1]
    torch.testing.assert_close(found[2], expected[2])  # replicas sum in another order


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        return self.of(x)


@pytest.mark.parametrize(
    "of",
    [lambda x: Named(x, x + 1), lambda x: OrderedDict(b=x, a=x + 1), lambda x: [x, (x, None)]],
    ids=["namedtuple", "OrderedDict", "list"],
)
def test_predictions_keep_their_form(of):
    pipe = Pipeline([nn.Identity(), Returns(of)], nn.functional.mse_loss, num_microbatches=3, num_workers=2)
    x = torch.randn(7, 2)
    found, whole = pipe.predict(x), of(x)
    assert type(found) is type(whole) and list(found) is not None
    first = found["b"] if isinstance(found, dict) else found[0]
    assert torch.equal(first, x)


def test_a_prediction_without_rows_is_told():
    pipe = Pipeline([nn.Identity(), Returns(torch.sum)], nn.functional.mse_loss, num_microbatches=2, num_workers=2)
    with refused("predict"):
        pipe.predict(torch.randn(4, 2))


def test_an_evaluation_leaves_modules_in_the_modes_that_they_had():
    layers = [nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2).eval()]
    pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=2, num_workers=3)
    pipe.evaluate((torch.randn(4, 2), torch.randn(4, 2)))
    assert [layer.training for layer in layers] == [True, True, False]


def test_saving_touches_no_other_file(tmp_path):
    """`save("w.safetensors")` wrote over and removed the user's `w.partial`."""
    (tmp_path / "w.partial").write_text("mine")
    pipeline(num_workers=2).weights.save(tmp_path / "w.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.partial", "w.safetensors"]
    assert (tmp_path / "w.partial").read_text() == "mine"


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_that_is_written_holds_no_copy_of_the_weights(tmp_path, monkeypatch, wait):
    """A copy of weights and optimizer stayed until the next checkpoint, and in a cycle until Python collected it."""
    kept, copied = [], writing.Snapshot._copied

    def noted(snapshot, *given, **more):
        copies = copied(snapshot, *given, **more)
        kept.extend(map(weakref.ref, copies.values()))
        return copies

    monkeypatch.setattr(writing.Snapshot, "_copied", noted)
    pipe = pipeline(num_workers=2)
    pipe.step((X, Y))
    gc.collect()
    gc.disable()
    try:
        pipe.checkpoints.save(tmp_path, wait=wait)
        thread = None if wait else weakref.ref(pipe.checkpoints._writing)
        if thread is not None:
            thread().join()
        assert kept and not any(copy() is not None for copy in kept)
        pipe.close()
        assert thread is None or thread() is None
    finally:
        gc.enable()


class Versioned(nn.Linear):
    """As torchvision's MNASNet, which refuses numbers of which it does not know the version."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, about, *rest):
        if about.get("version") not in (1, 2):
            raise ValueError(f"version should be set to 1 or 2 instead of {about.get('version')}")
        super()._load_from_state_dict(state, prefix, about, *rest)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Versioned(8, 8), nn.Linear(8, 8)])
        self.head = Versioned(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("model", [Body, lambda: nn.Sequential(nn.Linear(8, 8), Versioned(8, 8))])
def test_a_model_that_asks_for_its_version_takes_up_what_was_trained(tmp_path, model):
    """`state_dict` was a plain dict, without the versions of modules that torch's has: mnasnet0_5 refused it."""
    torch.manual_seed(0)
    made, batch = model(), (torch.randn(4, 8), torch.randn(4, 8))
    with Pipeline(
        copy.deepcopy(made), nn.functional.mse_loss, num_workers=2, num_microbatches=2,
        training=Training(partial(torch.optim.SGD, lr=0.1)),
    ) as pipe:  # fmt: skip
        pipe.step(batch)
        state = pipe.weights.state_dict()
        assert dict(state._metadata) == dict(made.state_dict()._metadata)
        made.load_state_dict(state)
        torch.save(state, tmp_path / "w.pt")
        made.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
        pipe.weights.save(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert json.loads(file.metadata()["versions"]) == dict(state._metadata)
