"""Other numbers of stages and replicas for the workers that are left of an elastic job, or have come."""

import ast
from functools import partial

import pytest
import torch
from processes import rpc_pipe
from small_pipeline import pipeline
from test_elastic import MORTAL, trained
from test_elastic_hosts import Worker
from torch import nn

from rpc_pipe.checkpoints.newcomer import move
from rpc_pipe.commands.main import main
from rpc_pipe.dependency import Reductions, check, entries
from rpc_pipe.dependency.relocating import renumbered, reshaped
from rpc_pipe.elastic.heir import shapes
from rpc_pipe.launching import epochs
from rpc_pipe.planning.pricing import predicted_ms
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.compute.modules.buffer_mirror import BufferMirror


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb-v"])
def test_workers_keep_their_numbers_in_another_shape(name):
    first = reshaped(make_spec(name, 8, 16, {"replicas": 2}), 4, 2)
    at = [1, 3, 4, 6]
    spec = renumbered(first, at, range(8))
    reductions = Reductions(weight=True, norms=True, commits=True)
    assert [*spec.workers] == at
    for number, worker in enumerate(at):
        check(spec, worker)
        assert spec.hosted(worker) == first.hosted(number)
        pairs = zip(
            entries(spec, worker, reductions=reductions), entries(first, number, reductions=reductions), strict=True
        )
        for own, other in pairs:
            assert own.action == other.action and [*own.consumers] == [at[each] for each in other.consumers]


def test_other_stages_on_fewer_workers_train_the_same_bits(tmp_path):
    """Of the three live workers two have a place in one stage x two replicas, with the optimizer's state of before."""
    whole = trained(tmp_path / "whole", "step", steps=16)[1]
    env = {"WAITS": "shape", "RPC_PIPE_RESHAPE_AFTER": "0.1"}
    done, made = trained(tmp_path / "again", "step", "1:3:B", more=["2:2"], steps=16, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 stages x 2 replicas become 1 stage x 2 replicas on 2 of 3 live workers" in done.stdout
    assert "predicted of a step: 1 stage x 2 replicas" in done.stdout
    assert "worker 3 goes (it has no place)" in done.stdout and made == whole
    assert not [path.name for path in (tmp_path / "again").iterdir() if path.name.startswith("rpc-pipe-")]


def test_a_newcomer_brings_the_first_shape_back(tmp_path):
    """With three replicas gradients are summed in another order, so losses are those of one process within rounding."""
    rpc_pipe("run", MORTAL, "--workers", 1, "--", tmp_path, "step", 30, 2, RPC_PIPE_LOGS="off")
    alone = ast.literal_eval((tmp_path / "losses").read_text())[0]
    env = {"WAITS": "back", "RPC_PIPE_RESHAPE_AFTER": "0.1"}
    done, made = trained(tmp_path / "again", "step", "1:3:B", more=["3:4", "--rejoin"], steps=30, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 stages x 2 replicas become 1 stage x 3 replicas" in done.stdout
    assert "1 stage x 3 replicas become 2 stages x 2 replicas" in done.stdout
    assert ast.literal_eval(made[1].decode())[0] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipev"])
def test_two_shards_of_a_worker_take_a_state_each(schedule):
    """A weight that two stages share had one state for both, and each update of a step changed it."""

    def made():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[-1].weight = layers[0].weight
        options = {"optimizer": partial(torch.optim.AdamW, lr=0.1), "num_workers": 1, "schedule": schedule}
        return pipeline(layers, nn.functional.mse_loss, **options, ema_decay=0.9)

    x = torch.randn(8, 4)
    with made() as before, made() as after:
        before.step((x, x))
        for pipe in before, after:
            for (_, route), shard in pipe.actors[0].shards.items():
                shard.mirror = BufferMirror(shard, route)
        taken = after.actors[0].shards
        move(before.actors[0], {stage for stage, _ in taken}, taken, before.spec.num_routes)
        for _ in range(2):
            before.step((x, x)), after.step((x, x))
        here, there = before.weights.state_dict(), after.weights.state_dict()
        assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    ("live", "bounds", "shape"),
    [
        (8, (2, 8), (4, 2)),
        (7, (4, 8), (3, 2)),  # 1 x 7 has more workers, and a stage that the least workers never have
        (7, (2, 8), (1, 7)),
        (5, (4, 8), (2, 2)),
        (3, (4, 8), None),
        (6, (2, 4), (2, 2)),
    ],
)
def test_a_shape_has_most_workers_and_two_replicas(live, bounds, shape):
    found = shapes(make_spec("1f1b", 8, 16, {"replicas": 2}), *bounds, num_layers=9)
    best = next((each for each in found if each.num_workers <= live), None)
    assert shape == (best and (best.num_stages, best.parallelism.replicas))


def test_workers_without_a_place_wait_until_there_is_one(monkeypatch):
    """Where each newcomer had begun an epoch, and gone again, all would have rested for ever."""
    monkeypatch.setenv("RPC_PIPE_RESHAPE_AFTER", "1e-9")
    workers = [Worker(rank) for rank in range(4)]
    launcher = epochs.Epochs(4, workers, lambda text, warning: None, lambda rank: True)
    for rank in range(4):
        launcher.takes(rank, {"kind": epochs.READY, "stages": [rank // 2], "places": [0, 0, 2, 2, 2]})

    def rest(*ranks, goes=()):
        for rank in ranks:
            launcher.takes(rank, {"kind": epochs.RESTS, "goes": "no place" * (rank in goes)})

    assert launcher.survives([1], -9, dict.fromkeys(range(4), "ready"))
    launcher.tick()
    launcher.tick()
    assert [b"p" in worker.orders for worker in workers] == [True, False, True, True]
    rest(0, 2, 3)
    assert workers[0].rosters[-1] == [2, [1], True, 2]
    rest(0, 2, 3, goes=[3])
    assert workers[0].rosters[-1] == workers[3].rosters[-1] == [3, [1, 3], True, 0]
    assert launcher.survives([3], 0, {})  # a newcomer comes in its place, too
    before = [*workers[0].orders]
    for rank in (1, 3):
        launcher.takes(rank, {"kind": epochs.CAUGHT_UP})
    launcher.tick()
    assert workers[0].orders == before
    assert launcher.survives([2], -9, dict.fromkeys(range(4), "ready"))
    launcher.takes(0, {"kind": epochs.RESUMED, "step": 5})
    rest(0)
    assert workers[0].rosters[-1] == [5, [2], True, 2]


@pytest.mark.parametrize("places", [4, 0], ids=["back", "stayed"])
def test_a_newcomer_comes_where_the_first_shape_is_back_or_has_stayed(places, monkeypatch):
    """It lacks what a change has moved: it began an epoch without a place, went, and the next one came, for ever.

    So did those of a job whose forwards allow no change.
    """
    monkeypatch.setenv("RPC_PIPE_RESHAPE_AFTER", "1e-9")
    workers = [Worker(rank) for rank in range(4)]
    launcher = epochs.Epochs(4, workers, lambda text, warning: None, lambda rank: True)
    for rank in range(4):
        launcher.takes(rank, {"kind": epochs.READY, "stages": [rank // 2], "places": [0, 0, 2, 2, 4]})

    def rest():
        for rank in 0, 2, 3:
            launcher.takes(rank, {"kind": epochs.RESTS, "goes": ""})
        _, gone, _, asked = workers[0].rosters[-1]
        if asked:
            launcher.takes(0, {"kind": epochs.SHAPE, "text": "", "live": 4 - len(gone), "placed": min(places, asked)})

    assert launcher.survives([1], -9, dict.fromkeys(range(4), "ready"))
    launcher.tick()
    launcher.tick()
    rest()
    assert workers[0].rosters[-1] == [2, [1], True, 2]
    for _ in range(2):
        launcher.takes(1, {"kind": epochs.CAUGHT_UP})
        rest()
        assert workers[0].rosters[-1][1:] == [[], True, places], "its state comes by a change, if there was one"
        assert launcher.survives([1], -9, dict.fromkeys(range(4), "ready"))


@pytest.mark.parametrize(("gradients", "best"), [(100, "1 x 6"), (100_000, "3 x 2")])
def test_the_times_of_last_steps_choose_among_shapes(gradients, best):
    """A forward takes 1 ms, and 1000 bytes 1 ms: one stage has no bubble, but all its gradients travel."""
    own = [
        (f"{stage}{kind}0", 10 * stage * 10**6, (10 * stage + took) * 10**6)
        for stage in range(4)
        for kind, took in (("F", 1), ("B", 2), ("U", 1))
    ]
    arrivals = [("0F0", 0, 1000, 2 * 10**6), ("0B0", 0, 10, 201 * 10**4)]
    spec = make_spec("1f1b", 8, 12, {"replicas": 2})
    possible = [each for each in shapes(spec, 2, 6, num_layers=12) if each.num_workers == 6]
    steps, sizes = {0: [(1, own, [])], 2: [(1, [], arrivals)]}, dict.fromkeys(range(4), gradients / 4)
    found = predicted_ms(steps, sizes, [3] * 4, possible)
    chosen = possible[found.index(min(found))]
    assert f"{chosen.num_stages} x {chosen.parallelism.replicas}" == best
    assert predicted_ms({0: [(1, own[:-3], [])]}, sizes, [3] * 4, possible) == [], "the last stage is unknown"


@pytest.mark.parametrize(
    ("typed", "right"), [("5:3", "3:5"), ("1:4", "2:4"), ("two:4", "2:4"), ("4", "2:4"), ("2:9", "2:8")]
)
def test_two_numbers_of_workers_are_read(typed, right, capsys, monkeypatch):
    for name in ("RPC_PIPE_TRANSPORT", "RPC_PIPE_ELASTIC"):
        monkeypatch.setenv(name, "off")  # and afterwards as before
    code = main(["run", str(MORTAL), "--workers", "8", "--transport", "zmq", "--elastic", typed])
    said = capsys.readouterr().err
    assert code == 2 and f"--elastic {typed}: " in said and right in said
