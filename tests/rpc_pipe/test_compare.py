"""What a schedule costs in time, bytes and messages, side by side."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.measured_layers import measure_layers
from rpc_pipe.commands.compare import table
from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, F, I, R, W
from rpc_pipe.planning import comparison
from rpc_pipe.planning.comparison import ModelCosts, compare, complete_costs, verdict
from rpc_pipe.planning.footprint import Size, peak_bytes
from rpc_pipe.planning.search import VARIANTS
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.schedules import SCHEDULES

COST = {F: 1, B: 2, I: 1, W: 1, R: 1}


def run(name, P, M, **options):
    return simulate(SCHEDULES[name](num_workers=P, num_microbatches=M), uniform(COST), order="fixed", **options)


def test_a_worker_holds_its_shard_and_the_activations_in_flight():
    size = Size(weights=100, gradients=100, optimizer=200, activations=10)
    assert peak_bytes(run("1f1b", 4, 8), [size] * 4) == (440, 430, 420, 410)
    assert peak_bytes(run("gpipe", 4, 8), [size] * 4) == (480, 480, 480, 480)


def test_between_i_and_w_only_a_part_is_held():
    """ZB-H1's W lags on the later stages: what it reads is held, the rest is free."""
    everything = peak_bytes(run("zb-h1", 4, 8), [Size(activations=10, after_inputs=10)] * 4)
    part = peak_bytes(run("zb-h1", 4, 8), [Size(activations=10, after_inputs=4)] * 4)
    assert everything == (40, 40, 40, 40)
    assert part[0] == 40 and part[3] == 10 + 3 * 4


def test_what_kernels_need_counts_while_they_run():
    """It was added to the fullest moment, whichever stage ran then: a ResNet was told 11.6 % too large."""
    light, busy, heavy = Size(), Size(working=5), Size(activations=10)
    assert peak_bytes(run("interleaved", 2, 2), [light, busy, light, heavy])[1] == 10
    assert peak_bytes(run("interleaved", 2, 2), [light, heavy, light, busy])[1] == 25


def test_recomputing_holds_inputs_and_one_microbatch():
    size = Size(activations=10, inputs=1)
    assert peak_bytes(run("gpipe-recompute", 2, 8), [size] * 2)[1] == 8 + 10 - 1


def test_payloads_are_held_by_both_sides():
    """On worker 1 of two, with time 2 on the way: what has arrived too early; on worker 0: what is on its way."""
    spec = SCHEDULES["gpipe"](num_workers=2, num_microbatches=3)
    result = simulate(spec, lambda a: {F: 1 + 3 * a.stage, B: 1}.get(a.kind, 0), comm=2)
    sender, receiver = peak_bytes(result, [Size(outputs=5), Size(inputs=5)])
    assert sender == 10, "of three forwards one a unit of time, two are on their way at once"
    assert receiver == 10, "while the first runs for 4, the other two wait"


def test_messages_are_payloads_between_workers():
    P, M = 4, 8
    assert run("1f1b", P, M).messages == 2 * M * (P - 1)
    assert run("interleaved", P, M).messages == 2 * M * (2 * P - 1)
    assert run("zb-v", P, M).messages == 2 * M * (2 * P - 2), "at the turn there is none"
    assert run("chimera", P, M).messages == 2 * M * (P - 1) + 4 * P, "and the replicas' gradients and sums"


def test_costs_that_are_not_given_follow_from_the_others():
    assert complete_costs({F: 1, B: 3}) == {F: 1, B: 3, I: 1.5, W: 1.5, R: 1}
    assert complete_costs({F: 1, I: 2, W: 1}) == {F: 1, I: 2, W: 1, B: 3, R: 1}


def test_the_fastest_comes_first_and_what_cannot_be_last():
    rows = compare(ModelCosts(3, [COST]), 6)
    usable = [row for row in rows if not row.refused]
    assert usable == sorted(usable, key=lambda row: (not row.synchronous, row.makespan, row.peak_activations))
    assert {row.schedule for row in rows} == set(SCHEDULES)
    refused = [row for row in rows if row.refused]
    assert rows[-len(refused) :] == refused and {row.schedule for row in refused} == {"dualpipe", "chimera"}
    by_name = {row.name: row for row in rows}
    assert by_name["1f1b"].makespan == by_name["gpipe"].makespan == 3 * (6 + 2)
    assert by_name["zb-h2"].step_time == 3 * 6
    assert "zb-v, 18 a step" in verdict(rows, None)
    assert table(rows, "").row_count == len(rows) - len(refused)


def test_more_copies_of_the_weights_are_marked_and_not_recommended_unweighed():
    """`chimera pairs=2` was called fastest without a word that every worker holds the whole model."""
    rows = compare(ModelCosts(4, [COST]), 4)
    said, whole = verdict(rows, None), {row.name for row in rows if not row.refused and row.replicates}
    assert whole and not any(name in said.partition("not compared")[0] for name in whole)
    assert all(f"{name} (" in said.partition("not compared")[2] for name in whole)
    weighed = verdict(compare(ModelCosts(4, [COST], [Size(weights=10, activations=1)]), 4), None)
    assert "not compared" not in weighed


def test_how_much_is_done_is_told_after_each_schedule():
    """`compare --microbatches 100000` said nothing for minutes."""
    told = []
    compare(ModelCosts(2, [COST]), 2, tell=told.append)
    assert len(told) == len(VARIANTS) and told == sorted(told) and told[-1] == 1


def test_several_processes_price_what_one_prices(monkeypatch):
    """`compare --workers 64 --microbatches 256` had done 64 % after 280 s, on one core."""
    alone = compare(ModelCosts(2, [COST]), 2)
    monkeypatch.setattr(comparison, "_MANY", 0)
    assert compare(ModelCosts(2, [COST]), 2) == alone


def test_what_does_not_fit_is_left_out():
    size = Size(weights=10, activations=10)
    rows = compare(ModelCosts(4, [COST], [size]), 8, limit=50)
    fits = {row.schedule for row in rows if not row.refused}
    assert {"1f1b", "zb-h1", "v-min"} <= fits and not fits & {"gpipe", "zb-h2", "dualpipe"}
    assert all(row.peak_memory <= 50 for row in rows if not row.refused)
    assert "gpipe (needs 90 B)" in verdict(rows, 50)


def test_what_an_action_needs_while_it_runs_is_counted():
    """It was taken in --memory, and left out."""
    of = {
        working: {row.name: row.peak_memory for row in compare(ModelCosts(2, [COST], [size]), 4) if not row.refused}
        for working in (0, 7)
        for size in [Size(weights=10, activations=10, working=working)]
    }
    assert {name: memory + 7 for name, memory in of[0].items()} == of[7]


def test_layers_are_measured_and_cut():
    torch.set_num_threads(1)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)]
    costs = measure_layers(
        layers,
        torch.randn(32, 64),
        target=torch.zeros(32, 4),
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        repeats=2,
    )
    linear = costs[0].size
    assert linear.weights == linear.gradients == 4 * 64 * 65
    assert linear.optimizer >= 2 * linear.gradients
    assert linear.activations == 4 * 32 * 64, "the input, which W reads too, with the gradient of the output"
    assert linear.after_inputs == 2 * linear.activations
    assert costs[1].size.after_inputs == 0 < costs[1].size.activations, "a ReLU has no weights"
    assert costs[-1].size.outputs == 0, "the loss goes nowhere"
    assert all(cost.times[kind] >= 0 for cost in costs for kind in (F, B, I, W, R))
    model = ModelCosts(2, [cost.times for cost in costs], [cost.size for cost in costs], by_layer=True)
    halves = [stage.size for stage in model.stages(2)]
    assert sum(half.weights for half in halves) == sum(cost.size.weights for cost in costs)
    assert (halves[0].inputs, halves[0].outputs, halves[1].inputs) == (4 * 32 * 64,) * 3


def printed(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["compare", "--workers", "4", "--microbatches", "8", "--memory", "activations=64MB,limit=300MB"]
    code, out, _ = printed(capsys, "compare", "--workers", "2", "--microbatches", "4", *asked[5:])
    assert code == 0 and "…" not in out and max(map(len, out.splitlines()[:24])) <= 80
    code, out, _ = printed(capsys, *asked, "--json")
    rows = {(row["schedule"], *row["parameters"].values()): row for row in json.loads(out)}
    assert rows["zb-v",]["makespan"] == 25.5 and rows["zb-v",]["step_time"] == 24
    assert rows["1f1b",]["peak_memory"] == 4 * 64e6 and not rows["1f1b",]["refused"]
    assert rows["gpipe",]["refused"] == "needs 512 MB"


def test_all_schedules_with_replicas(capsys):
    asked = ["compare", "--workers", "4", "--microbatches", "8", "--replicas", "2"]
    code, out, _ = printed(capsys, *asked, "--schedule", "gpipe", "--json")
    rows = {row["schedule"]: row for row in json.loads(out) if row["parameters"] == {"replicas": 2}}
    assert code == 0 and rows["1f1b"]["weight_copies"] == [2] * 4 and not rows["pipedream"]["refused"]
    one = next(
        row for row in compare(ModelCosts(2, [{kind: 2 * t for kind, t in COST.items()}]), 4) if row.name == "gpipe"
    )
    assert rows["gpipe"]["makespan"] == one.makespan, "each replica has half the workers and microbatches"
    assert "fastest when steps follow each other: zb-v" in printed(capsys, *asked)[1]


def test_how_replicas_exchange_is_compared_as_it_is_simulated(capsys):
    """Only `simulate` knew --zero: by `compare` nobody saw what it saves."""
    asked = ["compare", "--workers", "4", "--microbatches", "2", "--replicas", "2"]
    asked += ["--memory", "weights=8MB,optimizer=16MB"]
    zero = ["--zero", "1", "--spread", "stages", "--bucket", "5"]
    rows = [
        next(row for row in json.loads(printed(capsys, *asked, *more, "--json")[1]) if row["schedule"] == "1f1b")
        for more in ([], zero)
    ]
    assert [row["peak_memory"] for row in rows] == [2 * 24e6, 2 * 16e6], "a stage of 2 has two workers' shares"
    assert rows[1]["parameters"] == {"replicas": 2, "zero": 1, "bucket": "5", "spread": "stages"}
    out = printed(capsys, *asked, *zero)[1]
    assert "4 workers, 2 microbatches, replicas 2, zero 1, bucket 5, spread stages" in out
    assert "5,stages" not in out, "said once, not in every row"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("compare", "--workers", "4", "--replicas", "3"), "replicas 3: must divide 4 workers"),
        (("compare", "--zero", "1"), "zero 1: is of replicas, and there is one; take replicas 2, or leave it out"),
        (("compare", "--memory", "activation=3"), "--memory activation: known are weights"),
        (("compare", "--memory", "limit=3GB"), "needs sizes, such as activations=64MB"),
        (("compare", "--memory", "activations=3XB"), "--memory activations=3XB: must be a number of bytes"),
        (("compare", "--workers", "0"), "--workers 0: must be at least 1"),
        (("compare", "--cost", "X=3"), "--cost X=3: kinds are F, B"),
        (("simulate", "--slow", "9=2"), "--slow 9=2: worker 9: workers are 0 to 1"),
        (("simulate", "--link", "0-5=2"), "--link 0-5=2: worker 5: workers are 0 to 1"),
        (("simulate", "--link", "0-1=1/0"), "--link 0-1=1/0: must be above 0"),
        # was an OverflowError where the timeline was drawn
        (("simulate", "--link", "0-1=1/1MB", "--payload", "1e999"), "--payload 1e999: must be a number of bytes"),
        (("simulate", "--stage-cost", "1,2,3"), "--stage-cost 1,2,3: has 3 factors, but there are 2 stages"),
        (("simulate", "--steps", "0"), "--steps 0: must be at least 1"),
        (("simulat",), "simulat: did you mean simulate? known are run, plan,"),
        (("verify", "mine.py:three:", "--transport", "local"), "mine.py:three:"),  # rich made a picture of :three:
        (
            ("simulate", "--schedule", "mine.py"),
            "must name a subclass of Spec, mine.py:ClassName; it has Mine, Other\n",
        ),
    ],
)
def test_wrong_input(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from rpc_pipe import Spec\nclass Mine(Spec): ...\nclass Other(Mine): ...\n")
    code, _, err = printed(capsys, *arguments)
    assert code == 2 and message in err


def test_what_a_stage_costs_is_told_where_a_worker_has_several(capsys):
    """ZB-V looked half as fast as 1F1B: its stages are half as long."""
    _, out, _ = printed(capsys, "simulate", "--schedule", "zb-v", "--workers", "4")
    assert (
        "first step 51, each further step 48" in out
        and "0.5 of a worker's share of the model: --cost F=0.5,B=1, or rpc-pipe compare" in out
    )
    _, out, _ = printed(capsys, "simulate", "--schedule", "zb-v", "--workers", "4", "--cost", "F=0.5,B=1")
    assert "first step 25.5, each further step 24" in out and "a stage costs" not in out


def test_a_narrow_link_is_paid_for(capsys):
    options = [
        "simulate",
        "--cost",
        "F=1,B=1",
        "--microbatches",
        "3",
        "--link",
        "0-1=0/10B",
        "--payload",
        "50B",
        "--json",
    ]
    code, out, _ = printed(capsys, *options)
    assert code == 0 and json.loads(out)["makespan"] == 1 + 3 * 5 + 1 + 2


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m rpc_pipe simulate --workers 16 --microbatches 256 --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == '{"schedule' and done.stderr == ""


def test_pictures_are_written(capsys, tmp_path):
    files = {kind: tmp_path / "new" / f"plan.{kind}" for kind in ("svg", "html", "chrome")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    code, out, _ = printed(capsys, "simulate", "--schedule", "zb-v", "--slow", "1=1.5", "--link", "0-1=2", *options)
    assert code == 0 and "first step" in out
    assert files["svg"].read_text().startswith("<svg") and "zb-v" in files["html"].read_text()
    events = json.loads(files["chrome"].read_text())["traceEvents"]
    assert {"3F0", "0W7"} <= {event["name"] for event in events}
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_arrows_of_several_steps_stay_within_their_steps(capsys, tmp_path):
    """All began a follower in the last step, and those of one action had one name."""
    path = tmp_path / "trace.json"
    code, _, _ = printed(capsys, "simulate", "--microbatches", "2", "--steps", "3", "--chrome", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert code == 0 and len(starts) == 3 * 4 == sum(event["ph"] == "s" for event in events)
    assert starts.keys() == ends.keys()
    step = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 3
    assert all(0 <= ends[each] - at < step for each, at in starts.items())
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1, 2}


def test_a_schedule_of_ones_own_is_compared(tmp_path, capsys):
    """A researcher could simulate and train her schedule, but not see it beside the others."""
    path = tmp_path / "mine.py"
    path.write_text("from rpc_pipe.schedules import OneFOneB\nclass Mine(OneFOneB):\n    extra: int = 1\n")
    asked = ["compare", "--workers", "4", "--json", "--schedule", f"{path}:Mine", "--set", "extra=2"]
    assert main(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    [mine] = [row for row in rows if row["schedule"] == f"{path}:Mine"]
    [theirs] = [row for row in rows if row["schedule"] == "1f1b"]
    assert mine["parameters"] == {"extra": 2} and mine["makespan"] == theirs["makespan"]
    assert len(rows) == len(VARIANTS) + 1
    assert main(["compare", "--set", "extra=2"]) == 2
    assert "name it" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("rpc-pipe 0.")
