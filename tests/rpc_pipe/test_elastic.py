"""A worker of an elastic job dies, and the job goes on: with the weights of the undisturbed run, bit for bit."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, rpc_pipe
from small_pipeline import X, Y, pipeline
from torch import nn

from rpc_pipe.dependency import StageLost
from rpc_pipe.elastic.recovery import Accumulated
from rpc_pipe.launching.epochs import CAUGHT_UP, CUT, READY, RESTS, RESUMED, Epochs
from rpc_pipe.workers.compute.modules.buffer_mirror import BufferMirror

MORTAL = ROOT / "tests" / "mortal.py"


def trained(folder, how, *kills, of=2, more=(), steps=8, **env):
    """Return what a job of `of` stages x `of` replicas ends with: its process, weights and losses."""
    folder.mkdir(exist_ok=True)
    typed = ["--transport", "zmq", "--elastic", *more]
    typed += [] if "--replicas" in more else ["--workers", of * of, "--replicas", of]
    env |= {"TMPDIR": str(folder), "RPC_PIPE_LOGS": "off"}
    done = rpc_pipe("run", MORTAL, *typed, "--", folder, how, steps, of, *kills, **env)
    files = [folder / "weights.safetensors", folder / "losses"]
    return done, [file.read_bytes() for file in files if file.exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What jobs without a death end with, by how they train."""
    return {how: trained(tmp_path_factory.mktemp(how), how)[1] for how in ("step", "train")}


@pytest.mark.parametrize(
    "kills",
    [
        ["1:3:F"],  # the step is undone
        ["2:3:U"],  # the step stands: another worker may have updated
        ["0:3:B", "3:3:meet"],  # another worker dies while the workers meet anew
    ],
    ids=" ".join,
)
def test_a_death_costs_a_step_and_no_bit(kills, undisturbed, tmp_path):
    done, made = trained(tmp_path, "step", *kills)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is gone (SIGKILL): epoch") == len(kills)
    assert f"8 steps on {4 - len(kills)} workers" in done.stdout, "figures are of the steps since the last death"
    assert made == undisturbed["step"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("rpc-pipe-")]


@pytest.mark.parametrize("kills", [["3:1:evaluate", "0:7:predict"], ["0:4:write", "2:6:G"]], ids=" ".join)
def test_a_stream_begins_again_at_the_repeated_step(kills, undisturbed, tmp_path):
    """Within its loop workers evaluate, predict and save, and one dies in the middle of that.

    An evaluation that breaks off in the first steps left modules in evaluation mode: undone steps were trained again
    without dropout.
    """
    done, made = trained(tmp_path, "train", *kills)
    assert done.returncode == 0, done.stderr
    assert made == undisturbed["train"]


def test_a_death_while_all_make_their_pipelines_costs_no_option(undisturbed, tmp_path):
    """The survivors went on by the next epoch, and forgot what was typed: no checkpoint was written."""
    typed = ["--checkpoint-every", "4", "--checkpoint-folder", tmp_path / "series"]
    done, made = trained(tmp_path, "step", "1:0:begin", more=typed)
    assert done.returncode == 0 and "epoch 1 without [1]" in done.stdout, done.stderr
    assert made == undisturbed["step"]
    assert sorted(path.name for path in (tmp_path / "series").glob("step-*")) == ["step-00000004", "step-00000008"]


def test_gradients_of_steps_before_the_update_are_computed_once_more(tmp_path):
    whole = trained(tmp_path / "whole", "step", steps=7, ACCUMULATE="3")[1]
    done, made = trained(tmp_path / "again", "step", "2:5:B", steps=7, ACCUMULATE="3")
    assert done.returncode == 0, done.stderr
    assert made == whole and "epoch 1 without [2]" in done.stdout


def test_running_statistics_of_a_dead_replica_go_on(tmp_path):
    """Batch normalisation was refused: the statistics of a replica were on its worker alone."""
    whole = trained(tmp_path / "whole", "step", MODEL="conv")[1]
    done, made = trained(tmp_path / "again", "step", "1:3:B", "2:5:U", MODEL="conv")
    assert done.returncode == 0, done.stderr
    assert made == whole and "epoch 2 without [1, 2]" in done.stdout


def test_each_replica_has_the_buffers_of_all_after_a_step():
    layers = [partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4), partial(nn.Linear, 4, 3)]
    with pipeline(layers, num_workers=2, replicas=2) as pipe:
        shards = {place: shard for actor in pipe.actors for place, shard in actor.shards.items()}
        for (_, route), shard in shards.items():
            shard.mirror = shard.updating.pieces.mirror = BufferMirror(shard, route)
        pipe.step((X, Y))
        now = {route: dict(shard.slice.own[1].named_buffers()) for (stage, route), shard in shards.items() if not stage}
        assert not torch.equal(now[0]["running_mean"], now[1]["running_mean"])
        for place in (0, 0), (0, 1):
            held = shards[place].mirror.held
            assert all(torch.equal(held[route][f"1 {name}"], now[route][name]) for route in now for name in now[route])
            assert not shards[place].mirror.is_stale
        now[0]["running_mean"].zero_()  # by hand, which no other worker knows
        assert shards[0, 0].mirror.is_stale


def test_a_step_that_is_undone_and_repeated_shows_no_buffer_that_stays():
    """Its forwards end with the numbers of before, so running statistics seemed to stay as they are."""
    norm = nn.BatchNorm1d(2)
    mirror = BufferMirror(SimpleNamespace(slice=SimpleNamespace(own=[norm]), num_updates=0), 0)
    for _ in range(4):  # batch normalisation does not raise versions
        assert len(mirror.give()) == 3
        mirror.forget()
    for _ in range(4):
        mirror.give()
        norm(torch.randn(3, 2))
        mirror.commit()
    assert len(mirror.changing) == 3 and not mirror.changes_more


def test_running_statistics_between_two_updates_die_with_a_replica():
    layers = [partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4), partial(nn.Linear, 4, 3)]
    with pipeline(layers, num_workers=2, replicas=2, accumulate=2) as pipe:
        shards = {place: shard for actor in pipe.actors for place, shard in actor.shards.items()}
        for (_, route), shard in shards.items():
            shard.mirror = shard.updating.pieces.mirror = BufferMirror(shard, route)
        stale = []
        for _ in range(4):
            pipe.step((X, Y))
            stale.append(shards[0, 0].mirror.is_stale)
        assert stale == [True, False, True, False]


def test_a_batch_of_accumulated_gradients_must_be_as_it_was():
    """A script that reads each batch into the same memory would have trained on the newest one twice."""
    kept = Accumulated(lambda step: step % 3 == 2)
    for step in range(5):
        kept.begin(step, SimpleNamespace(now=lambda: "written over", described="as it was"))
    with pytest.raises(StageLost):
        kept.compute(SimpleNamespace(step=5), make=None)
    done = SimpleNamespace(step=3, shards={})
    kept.compute(done, make=None)  # behind an update there is nothing to compute
    assert done.step == 3


def test_a_newcomer_takes_the_place_of_a_dead_worker(tmp_path):
    """It makes the calls of its script once more, evaluations too, and has the results of then.

    Worker 0 writes the losses at the end: the newcomer does, with the losses of before it came.
    """
    whole = trained(tmp_path / "whole", "step", steps=30)[1]
    done, made = trained(tmp_path / "again", "step", "0:4:G", more=["--rejoin"], steps=30, WAITS="long")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 0 is back: epoch 2\n" in done.stdout and "no step repeated" in done.stdout
    assert made == whole


def test_a_worker_that_is_asked_to_go_completes_its_step(undisturbed, tmp_path):
    done, made = trained(tmp_path, "train", "0:3:evict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 0 goes (SIGTERM): epoch 1 without [0]" in done.stdout and "no step repeated" in done.stdout
    assert made == undisturbed["train"]


def test_the_last_worker_of_a_stage_stops_all_when_it_is_asked_to_go(tmp_path):
    """The stage would have been gone, and the job failed with its steps since the last checkpoint."""
    done, made = trained(tmp_path, "train", "0:1:evict", "1:3:evict", steps=200)
    assert done.returncode == 0 and made, done.stdout + done.stderr
    assert "all stop after a step: epoch 2 without [0]" in done.stdout
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("rpc-pipe-")]


def test_a_stage_that_has_lost_all_its_workers_is_named(tmp_path):
    done, made = trained(tmp_path, "step", "0:3:B", "1:5:B")
    assert done.returncode == 1 and not made
    assert "stage 0 has no live replica" in done.stdout


@pytest.mark.parametrize(
    ("typed", "subject"),
    [
        (["--transport", "rpc"], "elastic"),
        (["--replicas", "1"], "replicas"),
        (["--zero", "1"], "zero"),
        (["--schedule", "pipedream-2bw"], "schedule"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_go_on_is_refused_at_the_start(typed, subject, tmp_path):
    """The option comes first, as in all refusals: one began with "--elastic needs replicas >= 2 (got 1)"."""
    usual = {"--transport": "zmq", "--replicas": "2"} | dict([typed])
    options = [each for pair in usual.items() for each in pair]
    done = rpc_pipe("run", MORTAL, "--workers", 4, "--elastic", *options, "--", tmp_path, "step", 2, 2)
    assert done.returncode == 2 and re.match(rf"error: (--)?{subject}\b", done.stderr), done.stderr


def test_one_of_two_workers_that_cannot_talk_is_killed_and_the_rest_goes_on():
    """Such a job ended after 10 s, although the launcher saw both processes."""
    killed, told = [], []
    processes = [SimpleNamespace(rank=rank, kill=partial(killed.append, rank), order=bool) for rank in range(4)]
    epochs = Epochs(4, processes, lambda text, warning: told.append(text))
    for rank in range(4):
        epochs.takes(rank, {"kind": READY, "stages": [rank // 2]})
    for rank, peer in (1, 3), (3, 1):  # both notice it
        assert epochs.takes(rank, {"kind": CUT, "peer": peer})
    assert killed == [3]
    assert epochs.survives([3], -9, dict.fromkeys(range(4), READY))
    assert epochs.takes(0, {"kind": CUT, "peer": 3}) and epochs.takes(0, {"kind": CUT, "peer": 2})
    assert killed == [3, 3, 0], "the death of 3 ends what it has started; without 2 a stage would be lost"


def test_a_worker_that_has_ended_by_an_error_costs_no_other_one():
    killed = []
    processes = [SimpleNamespace(rank=rank, kill=partial(killed.append, rank), order=bool) for rank in range(4)]
    epochs = Epochs(4, processes, lambda text, warning: None)
    assert not epochs.survives([3], 1, dict.fromkeys(range(4), READY))
    assert epochs.takes(2, {"kind": CUT, "peer": 3}) and not killed


def test_newcomers_that_die_at_once_come_more_and_more_seldom(monkeypatch):
    """Each came, died in its first step, as out of memory, and cost all a repeated step: for ever."""
    now, started, told = [0.0], [], []
    monkeypatch.setattr("rpc_pipe.launching.epochs.time.monotonic", lambda: now[0])
    processes = [SimpleNamespace(rank=rank, kill=bool, order=bool) for rank in range(2)]
    epochs = Epochs(2, processes, lambda text, warning: told.append(text), lambda rank: not started.append(now[0]))
    for rank in range(2):
        epochs.takes(rank, {"kind": READY, "stages": [0]})
    for step in range(10, 17):
        assert epochs.survives([1], -9, dict.fromkeys(range(2), READY))
        epochs.takes(0, {"kind": RESUMED, "step": step})
        for _ in range(100):
            now[0] += 1
            epochs.tick()
        epochs.takes(1, {"kind": CAUGHT_UP})
        epochs.takes(0, {"kind": RESTS, "goes": ""})
        epochs.takes(0, {"kind": RESUMED, "step": step})
        if "stays empty" in told[-1]:
            break
    pauses = [int(at) % 100 for at in started]
    assert pauses == sorted(pauses) and len(started) == 5 and pauses[-1] > 8
