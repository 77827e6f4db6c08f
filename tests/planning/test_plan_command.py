"""`rpc-pipe plan` and `profile`: what they print, write and refuse, and that a plan is run as it says."""

import json
import re
from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe.boards import own_boards
from rpc_pipe.commands.main import main
from rpc_pipe.drawing.plans import front_svg
from rpc_pipe.model.user_model import UserModel, load_user_model, resize_batch, rows_of
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.measuring.profiling import profile_model
from rpc_pipe.planning.plan import Plan, read_plan
from rpc_pipe.planning.profile import from_json
from rpc_pipe.tracing.run_summary import figures, sentence

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    return nn.Sequential(*layers), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, scale):
        return x + scale * self.inner(x)

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, labels):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, 0.5)
        scores = x @ self.tokens.weight.T
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}

def whole():
    ids = torch.randint(16, (4, 5))
    return Whole(), {"ids": ids, "labels": ids}

def nothing():
    return 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return str(path)


def told(capsys, *arguments):
    code = main(list(arguments))
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name, blocks", [("make", 6), ("whole", 4)])
def test_a_model_is_planned_and_what_was_measured_is_kept(model, capsys, name, blocks, tmp_path):
    arguments = [
        "plan",
        f"{model}:{name}",
        "--alone",
        "--workers",
        "2",
        "--batch",
        "8",
        "--microbatches",
        "4",
        "--seconds",
        "0.3",
        "--json",
    ]
    code, found = told(capsys, *arguments, "--svg", str(tmp_path / "front.svg"))
    assert code == 0
    best = found["plans"][0]
    assert {"schedule", "parameters", "cut", "num_microbatches", "recompute", "predicted_ms", "predicted_memory_mb",
            "bubble"} <= best.keys()  # fmt: skip
    assert sum(best["cut"]) == blocks and best["predicted_ms"] > 0
    times = [plan["predicted_ms"] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["measured"]["num_blocks"] == blocks
    assert (tmp_path / "front.svg").read_text().startswith("<svg")
    # What was measured is read again, as it was edited.
    kept = next((tmp_path / ".rpc_pipe").glob("profile-*.json"))
    edited = json.loads(kept.read_text())
    for costs in edited["rows"].values():
        costs[0]["ms"] = dict.fromkeys("FBIWRU", 1000.0)
    kept.write_text(json.dumps(edited))
    _, again = told(capsys, *arguments)
    assert again["plans"][0]["predicted_ms"] > 1000


def test_a_plan_is_run_as_it_says(model, capsys, tmp_path):
    out = tmp_path / "plan.json"
    sizes = ["--workers", "2", "--batch", "8", "--microbatches", "4", "--seconds", "0.3"]
    main(["plan", f"{model}:make", "--alone", *sizes, "--output", str(out)])
    drawn = capsys.readouterr().out
    assert "time against memory" in drawn and "…" not in drawn
    plan = read_plan(out)
    made = load_user_model(f"{model}:make")
    with Pipeline(made.model, made.loss_fn, plan=out) as pipe:
        assert pipe.num_workers == 2 and pipe.spec.num_microbatches == plan.num_microbatches
        assert [len(layers) for layers in pipe.partition.ranges] == list(plan.cut)
        own_boards.record(pipe)
        pipe.step(resize_batch(made.batch, 8))
        found = figures(own_boards.collect())
        assert found["predicted_ms"] == plan.predicted_ms and "by the plan)" in sentence(found)
    with refused("plan"):
        Pipeline(made.model, made.loss_fn, plan=plan, num_microbatches=2)
    with refused("num_workers"):
        Pipeline(made.model, made.loss_fn, plan=plan, num_workers=3)


def test_a_plan_says_how_many_replicas_there_are(model, capsys, tmp_path):
    out = tmp_path / "plan.json"
    asked = ["--workers", "8", "--replicas", "4,8", "--batch", "8", "--microbatches", "8", "--schedule", "gpipe"]
    asked += ["--zero", "1", "--bucket", "5", "--spread", "stages"]
    assert main(["plan", f"{model}:make", "--alone", *asked, "--seconds", "0.3", "--output", str(out)]) == 0
    assert "gpipe replicas=" in capsys.readouterr().out
    made, plan = load_user_model(f"{model}:make"), read_plan(out)
    with Pipeline(made.model, made.loss_fn, plan=out) as pipe:
        assert (
            pipe.num_workers == 8 and pipe.spec.num_routes == plan.parameters["replicas"] and pipe.spec.parallelism.zero
        )
        assert (pipe.spec.parallelism.spread, pipe.spec.parallelism.bucket) == ("stages", 5)
        assert pipe.spec.num_stages * pipe.spec.num_routes == 8
        pipe.step(resize_batch(made.batch, 8))


def test_a_plan_of_another_model_is_said_to_be_one(model, caplog, tmp_path):
    """It said nothing of the model, so that one of another with as many blocks ran without a word."""
    out = tmp_path / "plan.json"
    main(["plan", f"{model}:make", "--alone", "--workers", "2", "--seconds", "0.3", "--output", str(out)])
    made = load_user_model(f"{model}:make")
    with Pipeline(made.model, made.loss_fn, plan=out, training=Training()) as pipe:
        pipe.step(made.batch)
    assert not caplog.messages, "the model that was planned, though a Sequential has buffers nowhere"
    old = read_plan(out)
    layers = [nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 8)]
    with Pipeline(layers, made.loss_fn, plan=replace(old, model="", weights_by_stage=()), training=Training()) as pipe:
        pipe.step(made.batch)
    assert not caplog.messages, "an old file"
    with Pipeline(layers, made.loss_fn, plan=out, training=Training()) as pipe:
        pipe.step(made.batch)
    assert re.fullmatch(
        r"the plan was made for another model, Sequential, whose stage \d has 0.00\d+ MB of weights; that of this one, "
        r"list, has 0.00\d+ MB: rpc-pipe plan makes one for it", *caplog.messages
    )  # fmt: skip


def test_recomputed_stages_train_the_same_numbers():
    def train(recompute):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)]
        plan = Plan("zb-h1", {}, (2, 2), 4, recompute)
        with Pipeline(layers, nn.functional.mse_loss, plan=plan, num_workers=2, training=Training(sgd)) as pipe:
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            return [pipe.step((x, y)) for _ in range(3)], pipe.weights.state_dict()

    def sgd(named):
        return torch.optim.SGD(named, lr=0.1)

    losses, state = train(())
    for recompute in ((0,), (0, 1)):
        again, found = train(recompute)
        assert again == losses
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_nothing_fits_and_what_would(model, capsys):
    arguments = [
        "plan",
        f"{model}:make",
        "--alone",
        "--batch",
        "8",
        "--microbatches",
        "8",
        "--memory",
        "2kB",
        "--schedule",
        "1f1b",
    ]
    code, found = told(capsys, *arguments, "--json")
    assert code == 1 and found["plans"] == [] and found["excess_mb"] > 0
    assert any("workers" in each["change"] for each in found["advice"])
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "nothing fits: the least is" in text and "would fit: " in text


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["{model}:nothing"], "returned a int; must be model, batch"),
        (["{model}:other"], "has no function 'other'; it has"),
        (["{model}"], "must be path/to/file.py:make"),
        (["nowhere.py:make"], "there is no file nowhere.py"),
        ([], "needs path/to/file.py:make"),
        (["{model}:make", "--workers", "9"], "the model has 6 blocks"),
        (["{model}:make", "--microbatches", "9"], "at most 4"),
        (["{model}:make", "--schedule", "1f1c"], "did you mean '1f1b'"),
        (["{model}:make", "--memory", "8 apples"], "must be a number"),
        (["{model}:make", "--replicas", "1,3", "--workers", "4"], "replicas 3: must divide 4 workers"),
        (["{model}:make", "--zero", "1"], "zero 1: is of replicas, and there is one; take replicas 2"),
        (["{model}:make", "--replicas", "2", "--bucket", "0"], "bucket 0: must be a size in MiB above 0; take 25"),
        (["{model}:make", "--replicas", "2", "--microbatches", "1"], "replicas 2: needs as many microbatches (got 1)"),
        (["{model}:make", "--memory", "0"], "--memory 0: must be above 0"),
        (["{model}:make", "--memory", "40"], "--memory 40: is 40 bytes; write a unit, such as 40GB"),
        (["{model}:make", "--memory", "-1GB"], "--memory: needs a value (BYTES)"),
        (["{model}:make", "--schedule", "pipedream"], "trains other numbers"),
        (["--profile", "{model}", "--batch", "4"], "cannot be read"),
        (["{model}:make", "--topology", "{topology}"], "speed 0: must be above 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(model, capfd, tmp_path, arguments, said):
    topology = tmp_path / "topology.json"
    topology.write_text('{"workers": [{"speed": 0}]}')
    typed = [argument.format(model=model, topology=topology) for argument in arguments]
    assert main(["plan", *typed, "--alone"]) == 2
    error = capfd.readouterr().err
    assert said in " ".join(error.split()) and "Traceback" not in error


def test_unequal_workers_and_links_from_a_file(model, capsys, tmp_path):
    topology = tmp_path / "topology.json"
    topology.write_text(
        json.dumps(
            {
                "workers": [{"speed": 1, "memory": "1GB"}, {"speed": 0.25}],
                "links": {"0-1": {"latency_ms": 3, "bandwidth": "1MB"}},
            }
        )
    )
    profile = tmp_path / "profile.json"
    block = {"name": "b", "ms": {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1}, "bytes": {"outputs": 1000, "inputs": 1000}}
    profile.write_text(json.dumps({"rows": {"1": [block] * 10}}))
    arguments = ["--profile", str(profile), "--topology", str(topology), "--batch", "8", "--schedule", "1f1b", "--json"]
    _, found = told(capsys, "plan", *arguments, "--microbatches", "8", "--no-searched")
    assert found["plans"][0]["cut"] == [9, 1]
    assert any("links" in each["change"] for each in found["advice"])


def test_a_profile_of_other_workers_is_said_to_be_one(capsys, tmp_path):
    """Times that four busy workers took were taken for those of two without a word."""
    profile = tmp_path / "profile.json"
    block = {"name": "b", "ms": {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1}, "bytes": {}}
    speeds = {"workers": [{"speed": 1}] * 3 + [{"speed": 0.5}], "link": {"latency_ms": 7}}
    profile.write_text(json.dumps({"rows": {"1": [block] * 5}, "workers": 4, "topology": speeds}))
    asked = ["plan", "--profile", str(profile), "--batch", "4", "--schedule", "1f1b", "--no-searched", "--json"]
    asked += ["--microbatches", "4", "--workers"]
    for count, more in ((2, ()), (2, ("--link", "1")), (4, ())):
        assert main([*asked, str(count), *more]) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert ("measured while 4 workers were busy" in said) is (count == 2)


def test_a_link_is_typed_for_a_plan_as_for_a_simulation(capsys, tmp_path):
    """`plan --link 0-1=5` and `simulate --link 5` were refused: each command read the form of the other alone."""
    profile = tmp_path / "profile.json"
    block = {"name": "b", "ms": {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1}, "bytes": {}}
    profile.write_text(json.dumps({"rows": {"1": [block] * 4}}))
    arguments = ["--profile", str(profile), "--batch", "4", "--schedule", "gpipe", "--microbatches", "4"]
    asked = ["plan", *arguments, "--no-searched", "--workers", "2", "--json", "--link"]
    times = {}
    for link in ("5", "0-1=5,1-0=5", "0,0-1=5", "0"):
        assert main([*asked, link]) == 0
        planned = json.loads(capsys.readouterr().out)["plans"][0]["predicted_ms"]
        assert main(["simulate", "--schedule", "gpipe", "--microbatches", "4", "--link", link, "--json"]) == 0
        times[link] = planned, json.loads(capsys.readouterr().out)["makespan"]
    both, each, one, none = times.values()
    assert each == both and [none[i] + 5 for i in (0, 1)] == list(one) and [one[i] + 5 for i in (0, 1)] == list(both)


def test_a_profile_says_what_blocks_take_and_hold(model, capsys):
    code, found = told(capsys, "profile", f"{model}:whole", "--rows", "2,4", "--repeats", "1", "--json")
    assert code == 0 and set(found["rows"]) == {"2", "4"}
    profile = from_json(found, "here")
    assert profile.measured[4][1].size.outputs == 4 * 5 * 8 * 4
    # The embedding is used by the first block and by the loss: apart it is held twice.
    assert [(tie.first, tie.last, tie.weights) for tie in profile.ties] == [(0, 3, 16 * 8 * 4)]
    main(["profile", f"{model}:whole", "--repeats", "1"])
    drawn = capsys.readouterr().out
    assert "blocks.0" in drawn and "…" not in drawn, "no number is cut off in 80 columns"


def test_a_model_is_estimated_without_running_it():
    layers = [nn.Linear(256, 256) for _ in range(3)]
    made = UserModel(layers, (torch.randn(4, 256), torch.randn(4, 256)), nn.functional.mse_loss)
    found = profile_model(made, [64], estimate=True).measured[64]
    assert [cost.size.weights for cost in found] == [4 * (256 * 256 + 256)] * 3
    assert found[1].size.outputs == 64 * 256 * 4 and found[1].size.optimizer == pytest.approx(
        2 * found[1].size.weights, rel=0.01
    )


def test_a_batch_is_made_larger_or_smaller_by_its_rows():
    batch = {"ids": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0)}
    assert rows_of(batch) == 3
    assert resize_batch(batch, 4)["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert resize_batch(batch, 2)["scale"] == 2


def test_the_picture_has_scales_and_no_name_upon_another():
    """Two dozen names stood on each other, and neither axis said how much."""
    front = [
        Plan("interleaved", {}, (1, 1), 4, predicted_ms=900 - 20 * at, predicted_memory=(9 + at) * 1e6)
        for at in range(24)
    ]
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">interleaved', picture := front_svg(front, "two"))
    boxes = sorted((float(x), float(y)) for x, y in names)
    assert 3 <= len(boxes) < 24 and boxes[-1][0] + 70 < 640
    for at, (x, y) in enumerate(boxes):
        assert all(abs(x - other) > 70 or abs(y - line) > 12 for other, line in boxes[:at])
    assert ">800</text>" in picture and ">30 MB</text>" in picture


def test_progress_is_shown_on_stderr(model, capsys):
    """`plan` and `profile` showed nothing for half a minute where stdout was no terminal."""
    asked = ["--workers", "2", "--batch", "8", "--seconds", "0.3", "--json"]
    assert main(["plan", f"{model}:make", "--alone", *asked]) == 0
    out, lines = capsys.readouterr()
    assert json.loads(out) and "loading" not in out
    assert lines.startswith(f"loading {model}:make")
    assert re.search(r"^measuring 6 blocks, \d rows a microbatch: ", lines, re.M)
    assert re.search(r"^searching \d+ variants of \d+ schedules: ", lines, re.M)


def test_a_plan_is_verified_as_it_is_run(model, capsys, tmp_path):
    """`verify` had no --plan, so schedule, cut and microbatches had to be typed from the plan's file."""
    out = tmp_path / "plan.json"
    sizes = ["--workers", "2", "--batch", "8", "--microbatches", "4", "--seconds", "0.3"]
    assert main(["plan", f"{model}:make", "--alone", *sizes, "--no-searched", "--output", str(out)]) == 0
    arguments = ["verify", f"{model}:make", "--plan", str(out), "--transport", "local", "--steps", "2"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert f"{read_plan(out).schedule} on 2 workers" in capsys.readouterr().out
    assert main([*arguments, "--microbatches", "2"]) == 2
    assert "--microbatches 2" in capsys.readouterr().err
