"""Programs that are searched: as good as ours, proven like any other, trained, and written for torch."""

import json
import random
import time

import pytest
import torch
from refusals import refused
from torch import nn

from bench.plan_programs import searched_program
from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, F, I, R, W, check_all
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.plan import read_plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile
from rpc_pipe.planning.program_search import JobShop, best_order, faster_program, improve, listed, split_backwards
from rpc_pipe.planning.search import PlanRequest, search
from rpc_pipe.planning.simulator import Link, simulate, uniform
from rpc_pipe.planning.specs import make_spec

EQUAL = {F: 1.0, I: 1.0, W: 1.0}


def shop(name="zb-v", budget=8.0, seed=0):
    draw = random.Random(seed)
    spec = make_spec(name, 3, 6)
    times = {(s, kind): draw.uniform(1, 3) for s in range(spec.num_stages) for kind in (F, I, W)}
    ones, budgets = [1.0] * spec.num_stages, [budget] * 3
    return JobShop(spec, lambda a: times[a.stage, a.kind], lambda a, x, y: 0.5, ones, ones, budgets)


def as_it_runs(made):
    """Return the order in which the schedule itself runs its actions."""
    spec = made.spec
    return made.from_program(simulate(spec, lambda a: made.time(a) if a.kind in (F, I, W) else 0).orders())


def test_moves_make_an_order_shorter_and_never_break_it():
    whole = make_spec("1f1b", 3, 6)
    spec = listed(split_backwards(simulate(whole, uniform({F: 1, B: 2})).orders()), whole)
    made = JobShop(spec, lambda a: EQUAL[a.kind], lambda a, x, y: 0.5, [1.0] * 3, [1.0] * 3, [4.0] * 3)
    order = as_it_runs(made)
    left = iter(range(2000))
    took, better = improve(made, order, lambda: next(left, None) is not None)
    assert took == made.evaluate(better)[0] < made.evaluate(order)[0]
    assert made.fits(better)
    assert sorted(n for row in better for n in row) == list(range(len(made.actions)))


@pytest.mark.parametrize("seed", (0, 3))
def test_a_program_runs_microbatches_in_order(seed):
    """Plans ran forward 4 of a stage before 3: layers with buffers, and `export` for torch, were then refused."""
    made, left = shop("zb-h1", seed=seed), iter(range(2000))
    took, better = improve(made, as_it_runs(made), lambda: next(left, None) is not None)
    assert took < made.evaluate(as_it_runs(made))[0]
    for kind in F, I, W:
        rows = made.to_program(better)
        assert {tuple(a.microbatch for a in row if a.kind is kind) for row in rows} == {(0, 1, 2, 3, 4, 5)}


def test_an_order_beyond_the_budget_is_no_beginning():
    made = shop(budget=1.0)
    assert best_order(made, [as_it_runs(made)], time.monotonic() + 1) is None


def test_a_step_among_others_takes_a_worker_from_its_own_first_action_to_its_last():
    made = shop()
    order = as_it_runs(made)
    length, ends = made.evaluate(order)
    begins = [ends[row[0]] - made.duration[row[0]] for row in order]
    assert length == max(ends[row[-1]] - begin for row, begin in zip(order, begins, strict=True))
    assert length <= max(ends) and min(begins) == 0 < max(begins)


@pytest.mark.parametrize("budget, name", [(0.5, "v-min"), (0.75, "v-half"), (1.0, "zb-v"), (1.25, "dualpipe")])
def test_a_program_is_at_least_as_good_as_ours_at_equal_activations(budget, name):
    spec = searched_program(4, 8, EQUAL, budget * 4, 1.0)
    check_all(spec)
    chunks = spec.num_stages / 4
    found = simulate(spec, lambda a: EQUAL.get(a.kind, 0) / chunks)
    assert max(found.peak_activations) <= budget * spec.num_stages
    ours = make_spec(name, 4, 8)
    share = ours.num_stages / 4
    times = {kind: 1 / share for kind in (F, I, W, R)} | {B: 2 / share}
    assert found.steady_bubble <= simulate(ours, uniform(times)).steady_bubble + 1e-9


def test_a_program_is_part_of_a_plan_that_is_trained_and_exported(tmp_path, capsys):
    draw = random.Random(2)
    blocks = []
    for i in range(6):
        unit = draw.uniform(1, 4)
        size = Size(weights=8, activations=100, after_inputs=100, inputs=10, outputs=10)
        blocks.append(LayerCost({F: unit, I: unit, W: unit, B: 2 * unit, R: unit}, size, f"{i}"))
    machines = Machines(2, link=Link(0.2), memory=(1200, 1200))
    request = PlanRequest(Profile({1: blocks}), machines, 4, (4,), recompute=False, schedules=("1f1b",))
    result = search(request)
    plan = faster_program(request, result, lambda share: None, 0.4)
    assert plan is not None and plan.predicted_ms < result.plans[0].predicted_ms
    assert max(plan.memory_by_worker) <= 1200
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"plans": [plan.as_json()]}))
    assert read_plan(path) == plan
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(6)]
    batch = torch.randn(4, 4), torch.randn(4, 4)
    with Pipeline(layers, nn.functional.mse_loss, plan=path) as pipe:
        loss = pipe.step(batch)
    whole = nn.functional.mse_loss(nn.Sequential(*layers)(batch[0]), batch[1])
    assert loss == pytest.approx(whole.item(), rel=1e-6)
    assert main(["export", "--schedule", str(path), "--workers", "2", "--microbatches", "4"]) == 0
    assert capsys.readouterr().out.startswith("0F0")


def test_a_program_that_cannot_be_is_refused(tmp_path):
    plan = {"schedule": "searched", "cut": [1], "num_microbatches": 1, "placement": [[0]], "program": ["0F0 0B0"]}
    assert Pipeline([nn.Linear(1, 1)], nn.functional.mse_loss, plan=plan).spec.num_stages == 1
    with refused("plan"):
        Pipeline([nn.Linear(1, 1)], nn.functional.mse_loss, plan={**plan, "placement": [[1]]})
    with refused("plan"):  # routes were blamed
        Pipeline([nn.Linear(1, 1)], nn.functional.mse_loss, plan={**plan, "placement": []})
    with refused("plan"):
        Pipeline([nn.Linear(1, 1)], nn.functional.mse_loss, plan={**plan, "program": ["0F0 0q0"]})
    with refused("plan"):
        read_plan({"schedule": "1f1b"})


def test_without_time_the_best_known_order_stays():
    made = shop()
    known = as_it_runs(made)
    assert best_order(made, [known], time.monotonic()) == (made.evaluate(known)[0], known)


def test_an_order_that_takes_too_long_is_given_up():
    made = shop()
    order = as_it_runs(made)
    took, ends = made.evaluate(order)
    assert made.evaluate(order, took * (1 + 1e-12)) == (took, ends) and made.evaluate(order, took * 0.99) is None


def test_time_is_kept():
    begin = time.monotonic()
    searched_program(4, 8, {F: 1.0, I: 1.3, W: 0.7}, 3.0, 1.0)
    assert time.monotonic() - begin < 20
