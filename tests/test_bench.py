"""The benchmark against other systems: that it compares what is comparable, and says so where it is not."""

import json

import pytest
import torch
from processes import ROOT, python

from bench import devices, group, systems
from bench.models import balanced, bert, ragged, resnet
from bench.scenarios import emulated, limit_ms, predicted_ms
from bench.systems import absent, reference
from bench.vs_pippy import _row, compare
from rpc_pipe.dependency import F


def test_systems_take_turns_and_agree_with_one_process_before_they_are_timed():
    script = """
import json
import subprocess
import sys
from pathlib import Path
from bench.scenarios import emulated
from bench.vs_pippy import compare, run
systems = [("rpc-pipe", "zb-h1"), ("torch", "1F1B")]
rows = run(emulated(2, 3, {"F": 1, "I": 1, "W": 1}, 2, systems, scenario="test"), 2, None)
compare(rows)
print(json.dumps(rows))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    ours, peer = json.loads(done.stdout)
    assert "failure" not in ours and "failure" not in peer, (ours, peer)
    assert ours["gradient_error"] == 0
    assert ours["limit_ms"] <= peer["limit_ms"] < peer["median_ms"]
    assert list(ours["faster_than"]) == ["torch 1F1B"]
    assert {"scenario", "system", "schedule", "workers", "microbatches", "peak_rss_mb", "peak_activations"} <= set(ours)


def test_steps_are_timed_without_drawing_their_batch():
    """Each step drew the same numbers anew: 30 of the 108 ms that a step of payloads of 1 MiB took by ZeroMQ."""
    workload = emulated(2, 2, {"F": 0, "B": 0}, 2, [("rpc-pipe", "1f1b")], scenario="").jobs[0].workload
    assert workload.batch(1) is workload.batch(0)
    inputs = [x for x, _ in workload.batch(0)]
    assert systems.whole(*inputs) is systems.whole(*inputs)


def test_a_system_with_other_gradients_is_not_compared():
    contest = emulated(1, 2, {"F": 1, "B": 1}, 1, [("rpc-pipe", "gpipe"), ("torch", "GPipe")], scenario="test")
    outcome = group.Outcome([2.0, 2.0], error=0.5, peak_rss_mb=1)
    rows = [_row(contest, job, [[outcome]]) for job in contest.jobs]
    compare(rows)
    assert "not comparable" in rows[0]["failure"]
    assert "faster_than" not in rows[0]


def test_a_worker_that_dies_is_a_row_that_says_so(tmp_path):
    contest = emulated(2, 2, {"F": 1, "B": 1}, 1, [("rpc-pipe", "gpipe")], scenario="test")
    outcomes = group.outcomes(contest.jobs[0], 0, tmp_path)
    assert all("did not end" in outcome.failure for outcome in outcomes)


@pytest.mark.parametrize("jitter", [0, 1])
def test_the_limit_has_the_times_that_the_devices_take(jitter):
    contest = emulated(2, 4, {"F": 2, "B": 4}, 1, [("rpc-pipe", "1f1b")], jitter=jitter, scenario="test")
    limit, activations = limit_ms(contest.jobs[0], contest.cost(contest.jobs[0]))
    assert activations == 2
    assert limit == 30 if not jitter else 30 < limit < 60
    first = contest.jobs[0].workload.stage(0, 2)
    cost = contest.cost(contest.jobs[0])
    assert [1e3 * s for s in first._times[0].of] == [cost(F(0, m)) for m in range(4)]


@pytest.mark.parametrize(
    ("weights", "count", "sizes"), [([1, 1, 1, 1], 2, [2, 2]), ([5, 1, 1, 1], 2, [1, 3]), ([1, 2, 3], 3, [1, 1, 1])]
)
def test_the_cut_makes_the_heaviest_stage_light(weights, count, sizes):
    assert balanced(weights, count) == sizes


@pytest.mark.parametrize("make", [bert, resnet, ragged])
def test_models_are_the_same_however_they_are_cut(make):
    model = make(1)
    whole = model.workload(lambda count: balanced([1] * len(model.layers), count))
    one, two = reference(whole, 1), reference(whole, 2)
    assert [g.shape for g in one[0]] == [g.shape for stage in two.values() for g in stage]
    assert all(torch.equal(a, b) for a, b in zip(one[0], [*two[0], *two[1]], strict=True))


def test_lines_are_padded_to_their_own_longest_or_to_one_length():
    model = ragged(4)
    own, one = model.batch(0), model.padded(0)
    assert len({x.shape[1] for x, _ in one}) == 1
    assert sum(x.numel() for x, _ in own) < 0.7 * sum(x.numel() for x, _ in one)
    assert sum(int((y >= 0).sum()) for _, y in own) == sum(int((y >= 0).sum()) for _, y in one)


def test_a_device_takes_as_long_as_it_is_told(monkeypatch):
    slept = []
    monkeypatch.setattr(devices, "_oversleep", {0.001: 0.0001, 0.01: 0.0002})
    monkeypatch.setattr(devices.time, "sleep", slept.append)
    devices.work(0.01)
    with devices.instantly():
        devices.work(0.01)
    devices.work(0)
    assert slept == [pytest.approx(0.0098)]


def test_an_absent_peer_is_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    assert "pip install torchpippy==0.1.1" in absent("pippy")
    contest = emulated(2, 2, {"F": 1, "B": 1}, 1, [("rpc-pipe", "1f1b"), ("pippy", "1F1B")], scenario="test")
    assert [job.system for job in contest.turns(2)] == ["rpc-pipe", "rpc-pipe"]


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe"])
def test_bare_sockets_compute_what_one_process_does(schedule):
    script = f"""
import json
import subprocess
import sys
from pathlib import Path
from bench.scenarios import emulated
from bench.vs_pippy import run
contest = emulated(3, 4, {{"F": 1, "B": 2}}, 2, [("bare sockets", "{schedule}")], scenario="test")
print(json.dumps(run(contest, 1, None)))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert "failure" not in row, row
    assert row["gradient_error"] < 1e-6


def test_between_hosts_latency_is_predicted():
    contest = emulated(4, 16, {"F": 10, "B": 20}, 1, [("rpc-pipe", "eager-1f1b")], scenario="test", travel_ms=10)
    job = contest.jobs[0]
    assert predicted_ms(job, contest.cost(job), 0) == limit_ms(job, contest.cost(job))[0] == 570
    assert predicted_ms(job, contest.cost(job), contest.travel_ms) == 590, "the way there and back of the first batch"


def test_the_way_of_a_hop_is_measured():
    """The places that it wraps had other names, and it ended in a FileNotFoundError."""
    ended = python(ROOT / "bench" / "hops.py", "--workers", 2, "--ms", 1)
    assert ended.returncode == 0 and "rpc-pipe: packed, outbox" in ended.stdout, ended.stderr


def test_replicas_are_compared_with_peers_that_train_the_same():
    script = """
import json
from bench.data_parallel import emulated, rows_of
print(json.dumps(rows_of(emulated(steps=2, speed=40), 1)))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["system"].split()[-1] for row in rows] == ["loop", "DDP", "loop", "FSDP2", "loop"]
    assert all("failure" not in row and row["gradient_error"] < 1e-6 for row in rows), rows
    assert list(rows[0]["ratios"]) == [
        f"rpc-pipe 2 x 2{against}"
        for against in (
            " against torch + DDP 2 x 2",
            " against torch + FSDP2 2 x 2",
            ", zero 1 against torch + DDP 2 x 2",
            ", zero 1 against torch + FSDP2 2 x 2",
            " against rpc-pipe in a loop one pipeline",
        )
    ]
    assert ["plan_ms" in row for row in rows] == [True, False, False, False, True]
