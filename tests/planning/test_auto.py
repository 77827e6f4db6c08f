"""A plan that is kept beside its model, and made anew when a run shows a better one; what several workers measured."""

import json
from dataclasses import replace

import pytest
from processes import rpc_pipe
from refusals import refused

from rpc_pipe.commands.auto import Auto, let_note
from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, F, G, I, R, U, W
from rpc_pipe.planning.correcting import MeasuredRun, corrected, measured_run, predicted_ms, spec_of
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.json_fields import from_json_value, to_json_value
from rpc_pipe.planning.measuring.joint_profile import around, merged, with_moves
from rpc_pipe.planning.plan import Plan, read_plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.profile_file import as_json, from_json
from rpc_pipe.planning.search import PlanRequest
from rpc_pipe.planning.simulator import Link, simulate

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    return nn.Sequential(*layers), (torch.randn(8, 8), torch.randn(8, 8)), nn.functional.mse_loss
"""


def profile(*times, workers=0):
    blocks = [LayerCost({F: t, I: t, W: t, B: 2 * t, R: t, U: 0}, Size(weights=8), f"{i}") for i, t in enumerate(times)]
    return Profile({1: blocks}, {F: 0.1, B: 0.1, I: 0.1, W: 0.1, R: 0.1}, workers=workers)


def test_a_stage_takes_nothing_less_than_nothing():
    """Of a runtime that was found to take nothing more was taken away than a slow worker had: its profile could not be
    read."""
    assert around({W: 0.14, R: 0.2}, {W: 0.0}) == {W: 0.0, R: 0.2}
    assert around({F: 0.25}, {F: 0.1, U: 0.3}) == pytest.approx({F: 0.2, U: 0.3})


def request(*times):
    return PlanRequest(profile(*times), Machines(2), 4, (4,), recompute=False, schedules=("1f1b",))


def ran(asked, plan, truth):
    """Return what a run of a plan takes on machines where the blocks take what `truth` says."""
    spec, chain = spec_of(plan, 2), replace(asked, profile=truth).chain(plan.num_microbatches)
    ends = chain.ends(plan.cut)
    return measured_run(
        plan, spec, lambda a: chain.time(a.kind, ends[a.stage], ends[a.stage + 1]), 1.0, "the cut is uneven"
    )


def test_a_profile_is_corrected_by_what_a_run_took():
    asked, truth = request(1, 1, 1, 1), profile(1, 1, 2, 2)
    plan = Plan("1f1b", {}, (2, 2), 4, num_workers=2)
    found, off = corrected(asked, ran(asked, plan, truth))
    assert [stage for stage, _ in off] == [1] and off[0][1] == pytest.approx(2, rel=0.1)
    assert [cost.times[F] for cost in found.measured[1]] == pytest.approx([1, 1, 2, 2])
    assert [cost.times[B] for cost in found.measured[1]] == pytest.approx([2, 2, 4, 4])
    assert predicted_ms(replace(asked, profile=found), plan) == pytest.approx(predicted_ms(
        replace(asked, profile=truth), plan))  # fmt: skip


def test_of_a_backward_in_two_parts_the_first_stage_has_noted_w_alone():
    asked, truth = request(1, 1, 1, 1), profile(2, 2, 2, 2)
    plan = Plan("zb-h1", {}, (2, 2), 4, num_workers=2)
    noted = ran(asked, plan, truth)
    assert noted.stages[0][I] == 0.1 and noted.stages[0][W] == 8.1
    found, off = corrected(asked, noted)
    assert [stage for stage, _ in off] == [0, 1]
    for cost, true in zip(found.measured[1], truth.measured[1], strict=True):
        assert cost.times == pytest.approx(true.times)


def test_the_parts_of_a_backward_are_corrected_alike():
    asked, plan = request(1, 1, 1, 1), Plan("zb-h1", {}, (2, 2), 4, num_workers=2)
    noted = ran(asked, plan, asked.profile)
    stages = (noted.stages[0], {**noted.stages[1], I: 5.1, W: 3.1})  # 2.1 each were predicted
    found, off = corrected(asked, replace(noted, stages=stages))
    assert [stage for stage, _ in off] == [1]
    assert found.measured[1][2].times == pytest.approx({**asked.profile.measured[1][2].times, I: 2, W: 2, B: 4})


def test_what_did_as_predicted_stays_as_it_was():
    asked = request(1, 2, 1, 2)
    plan = Plan("zb-h1", {}, (2, 2), 4, num_workers=2)
    found, off = corrected(asked, ran(asked, plan, profile(1.02, 2, 1, 2)))
    assert off == [] and found.measured == asked.profile.measured


def test_an_update_that_sums_the_gradients_of_replicas_says_nothing_of_its_blocks():
    """Where replicas sum their gradients an update took that much longer, and the blocks' updates were taken to be so:
    the next plan had slow updates on every schedule."""
    blocks = [replace(cost, times={**cost.times, U: 1.0}) for cost in profile(1, 1, 1, 1).measured[1]]
    asked = replace(request(1), profile=replace(profile(1), measured={1: blocks}))
    plan = Plan("chimera", {}, (2, 2), 4, num_workers=2)
    noted = ran(asked, plan, profile(2, 2, 2, 2))
    stages = tuple({**times, U: 5.0} for times in noted.stages)
    found, off = corrected(asked, replace(noted, stages=stages))
    assert [stage for stage, _ in off] == [0, 1]
    assert [cost.times[F] for cost in found.measured[1]] == pytest.approx([2, 2, 2, 2])
    assert [cost.times[U] for cost in found.measured[1]] == [1.0] * 4


def test_replicas_compute_less_while_their_gradients_move():
    """Payloads of megabytes were taken to move beside computing, on as many cores as workers: plans with replicas took
    up to 7 % longer than said."""
    cost = LayerCost({F: 1.0, G: 2.0}, Size(gradients=1000))
    moved = with_moves(Profile({1: [cost], 2: [cost]}), 0.5)
    assert [costs[0].times for costs in moved.measured.values()] == [{F: 1.0, G: 502.0}] * 2


def test_what_was_noted_is_read_as_it_was_written():
    plan = Plan("1f1b", {}, (2, 2), 4, num_workers=2)
    noted = MeasuredRun(plan, 12.5, ({F: 1.0, B: 2.0}, {F: 1.5, B: 2.5}), "a slow link")
    assert from_json_value(MeasuredRun, json.loads(json.dumps(to_json_value(noted)))) == noted


def test_a_plan_is_kept_until_a_run_shows_a_better_one(tmp_path):
    asked, truth = request(1, 1, 1, 1), profile(1, 1, 1, 4)
    auto = Auto(tmp_path / "profile-abc.json")
    assert auto.settle(asked, {})[1].startswith("planned: 1f1b, 4 microbatches, cut 2,2")
    assert "plan kept, as no run has been noted" in auto.settle(asked, {})[1]
    first = read_plan(auto.plan_path)
    auto.note_path.write_text(json.dumps(to_json_value(ran(asked, first, asked.profile))))
    assert "all stages took what was predicted" in auto.settle(asked, {})[1]
    assert not auto.note_path.exists()
    auto.note_path.write_text(json.dumps(to_json_value(ran(asked, first, truth))))
    found, line = auto.settle(asked, {})
    assert "planned again: 1f1b" in line and "stage 1 took 2" in line and "the cut is uneven" in line
    assert read_plan(auto.plan_path).cut == (3, 1)
    # The cached profile says what the run has shown.
    assert json.loads(auto.profile_path.read_text()) == as_json(found.profile)
    # Something else was typed: another plan.
    assert auto.settle(found, {"microbatches": [4]})[1].startswith("planned: ")


def test_a_plan_of_other_files_is_not_noted(tmp_path, monkeypatch):
    monkeypatch.delenv("RPC_PIPE_PLAN", raising=False)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plans": [Plan("1f1b", {}, (1,), 1).as_json()]}))
    let_note(str(path))
    let_note(str(tmp_path / "nowhere"))
    import os

    assert "RPC_PIPE_PLAN" not in os.environ


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
    spec = spec_of(Plan("zb-v", {}, (1,) * 8, 8), 4)
    found = simulate(spec, lambda action: 1.0 if action.kind in (F, I, W) else 2.0 * (action.kind is B))
    in_a_run = simulate(spec, lambda a: 1.0 if a.kind in (F, I, W) else 2.0 * (a.kind is B), steps=4).step_time
    assert found.makespan > found.span >= in_a_run and found.steady_bubble < found.bubble


def test_run_plan_auto_measures_plans_trains_and_notes(tmp_path):
    model = tmp_path / "my_model.py"
    model.write_text(MODEL)
    said = [f"{model}:make", "--workers", "2"]
    done = rpc_pipe("run", "--plan", "auto", "--model", *said, "--steps", 4)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert "measuring with 2 workers at once" in done.stderr and "planned: " in out and "step 4 of 4" in out
    folder = tmp_path / ".rpc_pipe"
    kept = json.loads(next(folder.glob("profile-*.json")).read_text())
    assert kept["workers"] == 2 and kept["topology"]["link"]["latency_ms"] > 0 and len(kept["topology"]["workers"]) == 2
    noted = json.loads(next(folder.glob("ran-*.json")).read_text())
    assert noted["step_ms"] > 0 and all(times["F"] > 0 for times in noted["stages_ms"])
    done = rpc_pipe("plan", *said, "--auto")
    out = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert ("plan kept" in out or "planned again" in out) and "in the last run" in out
    assert not list(folder.glob("ran-*.json"))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "--plan", "auto"], "--plan auto: needs --model"),
        (["run", "--memory", "8GB"], "--memory 8e+09: is for --plan auto"),
        (["plan", "--auto", "--profile", "nowhere.json"], "--auto: needs path/to/file.py:make"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, said, capfd):
    assert main(arguments) == 2
    assert said in " ".join(capfd.readouterr().err.split())


def test_nothing_fits_before_a_run(tmp_path):
    asked = replace(request(1, 1, 1, 1), machines=Machines(2, memory=(1, 1)))
    with refused("plan"):
        Auto(tmp_path / "profile-abc.json").settle(asked, {})


def test_a_plan_cannot_have_any_file_written_over(tmp_path, monkeypatch):
    """A run with a plan of somebody else's wrote what it took to whatever file that named as its note."""
    monkeypatch.setattr("os.environ", {})
    for name, noted in (("mine.json", False), ("ran-new.json", True)):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"plans": [Plan("1f1b", {}, (1,), 1).as_json()], "note": str(tmp_path / name)}))
        let_note(str(path))
        assert ("RPC_PIPE_PLAN" in __import__("os").environ) == noted


def test_a_kept_plan_that_is_damaged_is_made_anew(tmp_path):
    auto = Auto(tmp_path / "profile-abc.json")
    for damaged in ("{", "[]", '{"plans": 5}'):
        auto.plan_path.write_text(damaged)
        assert auto.settle(request(1, 1, 1, 1), {})[1].startswith("planned: ")
    auto.note_path.write_text('{"plan": {}}')
    assert "no run has been noted" in auto.settle(request(1, 1, 1, 1), {})[1]
