"""Simulations and plans count members of a worker: parts of bytes, gathers beside compute, fewer workers."""

import json
from dataclasses import replace

import pytest

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, ConfigError, F, I, R, U, W
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.grouping import ALONE, Grouping
from rpc_pipe.planning.plan import read_plan
from rpc_pipe.planning.profile import LayerCost, Machines, Profile, as_json
from rpc_pipe.planning.search import PlanRequest, search
from rpc_pipe.planning.simulator import Link

BLOCK = LayerCost(
    {F: 10, B: 20, I: 10, W: 10, R: 10, U: 4}, Size(100, 100, 200, activations=8, inputs=40, outputs=40),
    divided={"fsdp": 80, "tp": 60, "outputs": 1, "inputs": 2},
)  # fmt: skip
WAY = Link(1, 10)


def test_fsdp_holds_parts_and_whole_gradients_until_members_add_them_up():
    cost = Grouping(2, "fsdp", "step", WAY).cost(BLOCK)
    assert cost.size.weights == 60 and cost.size.elsewhere == 40
    assert cost.size.optimizer == 120
    assert cost.size.gradients + cost.size.unsummed == 100
    assert cost.size.working == 160, "a gathered block, and its whole gradients"
    assert cost.size.activations == BLOCK.size.activations
    assert (cost.times[F], cost.times[B], cost.times[W]) == (15, 25, 10), "80 bytes gathered: 1 + 80 / 2 / 10"
    assert cost.times[U] == 4 * 0.6 + 5 + 2 * (1 + 20 / 10), "and 20 bytes that lie around blocks added up"


def test_fsdp_that_sums_each_microbatch_holds_parts_of_gradients():
    cost = Grouping(2, "fsdp", "microbatch", WAY).cost(BLOCK)
    assert cost.size.gradients == 60 and not cost.size.unsummed
    assert cost.times[B] == 20 + 5 + 5 + 6 and cost.times[U] == 4 * 0.6


def test_layers_that_are_gathered_once_a_step_stay_whole_beside_each_other():
    cost = Grouping(2, "fsdp-kept", "step", WAY).cost(BLOCK)
    assert cost.size.unsummed == 40 + 80 and cost.size.working == 80
    assert (cost.times[F], cost.times[B]) == (10, 20) and cost.times[U] == 4 * 0.6 + 5 + 5 + 2 * (1 + 20 / 10)


def test_tp_divides_the_compute_of_planned_layers_and_adds_up_outputs():
    cost = Grouping(2, "tp", link=WAY).cost(BLOCK)
    assert cost.size.weights == 70 and cost.size.activations == 8
    assert cost.times[F] == 10 * (1 - 60 / 80 / 2) + 2 * (1 + 40 / 2 / 10)
    assert cost.times[B] == 20 * (1 - 60 / 80 / 2) + 4 * (1 + 40 / 2 / 10)


def test_a_plan_divides_a_model_of_fewer_blocks_than_processes_among_members():
    """Two blocks make two stages at most: only workers of two members use four processes."""
    profile = Profile({1: [replace(BLOCK, divided={})] * 2})
    shared = Grouping(2, "fsdp", "microbatch", WAY)
    asked = PlanRequest(profile, Machines(4), 8, (4, 8), schedules=("1f1b",), groupings=(ALONE, shared))
    plans = search(asked).plans
    assert {plan.members for plan in plans} == {2}
    best = plans[0]
    assert (best.num_workers, best.shard, best.reduce, len(best.memory_by_worker)) == (4, "fsdp", "microbatch", 2)
    assert best.weights_by_stage == (100, 100), "of whole stages, by which a run knows the model"
    assert best.name.startswith("1f1b members=2,fsdp")
    assert read_plan(json.loads(json.dumps(best.as_json()))) == best


def test_several_divisions_are_planned_at_once_by_the_command(tmp_path, capsys):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(as_json(Profile({1: [BLOCK] * 2, 8: [BLOCK] * 2}, batch_rows=8))))
    asked = f"plan --profile {file} --batch 8 --workers 4 --members 1,2 --schedule 1f1b --no-searched --json"
    for count, shard in (("8", "fsdp"), ("1", "tp")):  # a single microbatch cannot be divided among members
        more = ["--shard", "fsdp,tp", "--memory", "1GB,copy=1GB/s", "--microbatches", count]
        assert main([*asked.split(), *more]) == 0
        assert shard in {plan["shard"] for plan in json.loads(capsys.readouterr().out)["plans"]}
    assert main([*asked.split(), "--shard", "fsdp,tq"]) == 2 and "tq: known are" in capsys.readouterr().err


def test_a_worker_is_as_slow_and_small_as_its_worst_process():
    machines = Machines(4, (1, 2, 1, 1), (9.0, 8.0, None, 7.0), links={(0, 2): WAY, (1, 3): WAY}).grouped(2)
    assert (machines.num_workers, machines.slowness, machines.memory) == (2, (2, 1), (8, 7))
    assert machines.links == {(0, 1): WAY} and machines.order == "fixed"


@pytest.mark.parametrize(
    "typed",
    [
        "--workers 8 --members 2",
        "--workers 8 --shard tp",
        "--workers 8 --members 3 --shard tp",
        "--workers 8 --members 2 --shard fsdp --microbatches 9",
        "--workers 8 --members 2 --shard fsdp --order ready",
        "--workers 8 --members 2 --shard fsdp --schedule pipedream",
    ],
)
def test_what_members_cannot_do_is_one_sentence(typed, capsys):
    assert main(["simulate", *typed.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: --") and "\n" not in said


def simulated(typed, capsys):
    assert main(["simulate", *typed.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulate_prices_members(capsys):
    """A plane of fsdp has half of the microbatches; one of tp has all, in half of the time."""
    alone = simulated("--workers 4 --microbatches 8", capsys)
    rows = simulated("--workers 8 --members 2 --shard fsdp --microbatches 16", capsys)
    assert rows["workers"] == 4 and rows["order"] == "fixed" and rows["makespan"] == alone["makespan"]
    gathered = simulated("--workers 8 --members 2 --shard fsdp --microbatches 16 --gather 0.5", capsys)
    assert gathered["makespan"] > rows["makespan"]
    whole = simulated("--workers 8 --members 2 --shard tp --microbatches 8", capsys)
    assert whole["makespan"] == alone["makespan"] / 2


def test_a_model_without_a_plan_is_not_divided_by_it():
    from rpc_pipe.commands.profile import refuse_unplanned

    with pytest.raises(ConfigError):
        refuse_unplanned(Profile({1: [replace(BLOCK, divided={"fsdp": 80})]}), "tp")
    refuse_unplanned(Profile({1: [BLOCK]}), "tp")
