"""A plan that is kept beside its model; what several workers measured."""

import json
from dataclasses import replace

import pytest
from processes import python
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.commands.plan import kept_plan
from rpc_pipe.dependency import B, F, G, I, R, U, W
from rpc_pipe.launching.report import Reporter
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.measuring.joint_profile import around, merged, with_moves
from rpc_pipe.planning.plan import read_plan
from rpc_pipe.planning.profile import LayerCost, Profile, as_json, from_json
from rpc_pipe.planning.simulator import Link, simulate
from rpc_pipe.planning.specs import make_spec

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss
"""


def profile(*times, workers=0):
    blocks = [LayerCost({F: t, I: t, W: t, B: 2 * t, R: t, U: 0}, Size(weights=8), f"{i}") for i, t in enumerate(times)]
    return Profile({1: blocks}, {F: 0.1, B: 0.1, I: 0.1, W: 0.1, R: 0.1}, workers=workers)


def test_a_stage_takes_nothing_less_than_nothing():
    """Of a runtime that was found to take nothing more was taken away than a slow worker had: its profile could not be
    read."""
    assert around({W: 0.14, R: 0.2}, {W: 0.0}) == {W: 0.0, R: 0.2}
    assert around({F: 0.25}, {F: 0.1, U: 0.3}) == pytest.approx({F: 0.2, U: 0.3})


def test_replicas_compute_less_while_their_gradients_move():
    """Payloads of megabytes were taken to move beside computing, on as many cores as workers: plans with replicas took
    up to 7 % longer than said."""
    cost = LayerCost({F: 1.0, G: 2.0}, Size(gradients=1000))
    moved = with_moves(Profile({1: [cost], 2: [cost]}), 0.5)
    assert [costs[0].times for costs in moved.measured.values()] == [{F: 1.0, G: 502.0}] * 2


def test_what_workers_measured_at_once_is_one_profile_with_speeds_and_links():
    fast, slow = profile(1, 2, workers=2), profile(2, 4, workers=2)
    slow = replace(slow, per_stage={kind: 2 * took for kind, took in slow.per_stage.items()})
    links = {(0, 1): Link(0.2, 1e6), (1, 0): Link(0.2, 1e6)}
    found = merged([fast, slow], links)
    assert [cost.times[F] for cost in found.measured[1]] == [1, 2]
    assert [worker["speed"] for worker in found.topology["workers"]] == [1, 0.5]
    assert found.topology["link"] == {"latency_ms": 0.2, "bandwidth": "1000MB"} and "links" not in found.topology
    assert from_json(json.loads(json.dumps(as_json(found))), "here") == found
    alike = merged([fast, profile(1.04, 2.0)], {**links, (1, 0): Link(20, 1e4)})
    assert [worker["speed"] for worker in alike.topology["workers"]] == [1, 1]
    assert set(alike.topology["links"]) == {"0-1", "1-0"}
    usual, disturbed = profile(1, 1, 1, workers=2), profile(1, 1, 3, workers=2)
    assert [worker["speed"] for worker in merged([disturbed, usual], links).topology["workers"]] == [1, 1]


def test_a_step_that_follows_another_is_as_long_as_the_longest_part_of_a_worker():
    spec = make_spec("zb-v", 4, 8)
    found = simulate(spec, lambda action: 1.0 if action.kind in (F, I, W) else 2.0 * (action.kind is B))
    in_a_run = simulate(spec, lambda a: 1.0 if a.kind in (F, I, W) else 2.0 * (a.kind is B), steps=4).step_time
    assert found.makespan > found.span >= in_a_run and found.steady_bubble < found.bubble


def test_run_plan_auto_measures_plans_and_trains(tmp_path):
    model = tmp_path / "my_model.py"
    model.write_text(MODEL)
    said = ["--model", f"{model}:make", "--workers", "2"]
    soon = "import sys; from rpc_pipe.commands import main, plan; plan._AUTO_SECONDS = 0.2; sys.exit(main.main())"
    done = python("-c", soon, "run", "--plan", "auto", *said, "--steps", 4)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert "measuring with 2 workers at once" in done.stderr and "planned: " in out and "step 4 of 4" in out
    folder = tmp_path / ".rpc_pipe"
    kept = json.loads(next(folder.glob("profile-*.json")).read_text())
    assert kept["workers"] == 2 and kept["topology"]["link"]["latency_ms"] > 0 and len(kept["topology"]["workers"]) == 2
    assert sum(read_plan(next(folder.glob("plan-*.json"))).cut) == 4


def test_a_plan_is_kept_until_it_would_be_another(tmp_path, capsys, monkeypatch):
    """A changed model or limit is planned anew, and so is a plan that is damaged."""
    monkeypatch.setattr("rpc_pipe.commands.plan._AUTO_SECONDS", 0.05)
    model = tmp_path / "my_model.py"
    model.write_text(MODEL)
    typed = {"model": f"{model}:make", "workers": 2, "alone": True}

    def word(**more):
        path, line = kept_plan({**typed, **more}, Reporter(False))
        return line.split(":")[0], path

    assert word()[0] == "planned"
    kind, path = word()
    assert kind == "plan kept" and read_plan(path).num_workers == 2
    assert word(memory={"limit": 1e9})[0] == "planned" and word(memory={"limit": 1e9})[0] == "plan kept"
    for damaged in ("{", "[]", '{"plans": 5}'):
        path.write_text(damaged)
        assert word()[0] == "planned"
    profile_path = next(path.parent.glob("profile-*.json"))
    edited = json.loads(profile_path.read_text())
    for costs in edited["rows"].values():
        costs[0]["ms"] = {kind: 9 * ms for kind, ms in costs[0]["ms"].items()}
    profile_path.write_text(json.dumps(edited))
    assert word()[0] == "planned"
    with refused("plan"):
        word(memory={"limit": 1.0})


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "--plan", "auto"], "--plan auto: needs --model"),
        (["run", "--memory", "8GB"], "--memory limit=8000000000.0: is for --plan auto"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, said, capfd):
    assert main(arguments) == 2
    assert said in " ".join(capfd.readouterr().err.split())
