"""What is typed behind `rpc-pipe run train.py` wins over what the script says, and the user is told."""

import json
import sys
from types import SimpleNamespace

import pytest
from processes import python, rpc_pipe, unmerged
from refusals import refused
from safetensors.torch import load_file
from torch import nn

from rpc_pipe.commands.main import main
from rpc_pipe.commands.run import follow_plan
from rpc_pipe.commands.script import TypedOptions, run_script
from rpc_pipe.launching import attaching
from rpc_pipe.pipeline import Pipeline

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 4, 4), nn.Tanh, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 2)]
optimizer = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, num_workers=4, training=Training(optimizer))
x = torch.randn(8, 4)
for _ in range(3):
    pipe.step((x, x[:, :2]))
spec, sizes = pipe.spec, list(map(len, pipe.partition.ranges))
print(f"{type(spec).__name__} {spec.num_microbatches} {pipe.order} {sizes} {sys.argv[1:]}\\n", end="")  # in one piece
"""
ASKED = "--workers 2 --schedule zb-h1 --microbatches 3 --order fixed --split 1,3 --seed 5".split()


@pytest.fixture
def typed():
    """Install what was typed; return what the user is told."""
    told = []

    def install(**options):
        parameters = options.pop("set", {})
        attaching.current = TypedOptions(options, parameters, told.append, None)
        return told

    yield install
    attaching.current = attaching.Overrides()


def make(**said):
    return Pipeline([nn.Linear(2, 2) for _ in range(4)], nn.functional.mse_loss, **{"num_microbatches": 4, **said})


def test_what_is_typed_wins_and_is_told(typed):
    told = typed(schedule="zb-h1", microbatches=3, workers=4, order="fixed", split=[1, 1, 1, 1], seed=7)
    pipe = make(schedule="1f1b", num_workers=2)
    assert (type(pipe.spec).__name__, pipe.spec.num_microbatches, pipe.num_workers) == ("ZBH1", 3, 4)
    assert pipe.order == "fixed" and list(map(len, pipe.partition.ranges)) == [1, 1, 1, 1]
    assert told == [
        "--schedule zb-h1 replaces the script's schedule='1f1b'",
        "--microbatches 3 replaces the script's num_microbatches=4",
        "--workers 4 replaces the script's num_workers=2",
        "--seed 7 replaces the script's seed=0",
    ]
    make(schedule="1f1b", num_workers=2)
    assert len(told) == 4, "once is enough"


def test_parameters_belong_to_their_schedule(typed):
    told = typed(schedule="zb-h1")
    make(schedule="interleaved", schedule_options={"chunks": 2})
    assert told[1:] == ["--schedule zb-h1 leaves out the script's chunks=2"]


def test_a_plan_that_is_typed_decides_alone(typed, tmp_path):
    """Replicas of the script stayed, so the cut was said to be of another model; the order did not come."""
    path = tmp_path / "plan.json"
    path.write_text('{"schedule": "1f1b", "cut": [1, 3], "num_microbatches": 4, "microbatch_order": "balanced"}')
    with refused("--replicas"):
        follow_plan({"plan": str(path), "replicas": 2})
    told = typed(**follow_plan({"plan": str(path), "workers": 2}))
    pipe = make(replicas=2, schedule_options={"recompute": "all"}, num_workers=4)
    assert pipe.spec.num_routes == 1 and list(map(len, pipe.partition.ranges)) == [1, 3]
    assert pipe._session.ordering is not None and "leaves out the script's" in told[-1]


def test_a_parameter_that_is_typed_joins_those_of_the_script(typed):
    told = typed(set={"chunks": "1"})
    pipe = make(schedule="bfs", schedule_options={"chunks": 2, "b_order": "ascending"})
    assert (pipe.spec.chunks, pipe.spec.b_order) == (1, "ascending")
    assert told == ["--set chunks=1 replaces the script's chunks=2"]


def test_nothing_typed_changes_and_tells_nothing(typed):
    told = typed()
    assert make(schedule="gpipe").spec.num_microbatches == 4 and not told


def check(done, folder):
    """The same however the script was started; return its loss."""
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert unmerged(said).count("ZBH1 3 fixed [1, 3] ['--lr', '2']") == 2, said
    assert said.count("--schedule zb-h1 replaces the script's schedule='1f1b'") == 1, said
    assert said.count("--workers 2 replaces the script's num_workers=4") == 1, said
    summary = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (summary["steps"], summary["workers"]) == (3, 2) and summary["loss"] > 0
    weights = load_file(folder / "w.safetensors")
    assert weights["3.weight"].shape == (2, 4)
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {"1F2", "0W2"} <= {event["name"] for event in events}
    assert "this schedule with the measured times: " in (folder / "p.html").read_text()
    return summary["loss"]


def test_a_script_is_overridden_and_leaves_what_was_asked_for(tmp_path):
    """A script that closes its pipeline, as a `with` block does, failed at its end, and left nothing."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    files = ["--save", tmp_path / "w.safetensors", "--trace", tmp_path / "t.json", "--html", tmp_path / "p.html"]
    arguments = ["-m", "rpc_pipe", "run", script, *ASKED, *files, "--json", "--", "--lr", "2"]
    losses = []
    for started in ([], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]):
        losses.append(check(python(*started, *arguments), tmp_path))
        for file in files[1::2]:
            file.unlink()
        script.write_text(f"{SCRIPT}pipe.close()")
    assert losses[0] == losses[1]


def test_an_error_that_the_script_catches_leaves_what_was_asked_for(tmp_path, monkeypatch):
    """A `with` block left by an exception, such as one that stops early, ended the run: the pipeline was closed."""
    script, file = tmp_path / "train.py", tmp_path / "w.safetensors"
    script.write_text(
        f"{SCRIPT}try:\n    with pipe:\n        raise StopIteration\nexcept StopIteration:\n    print('stopped early')"
    )
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    job = SimpleNamespace(worker=0, num_workers=1, newcomer=False)
    run_script(str(script), [], {"script": str(script), "save": str(file), "workers": 1}, {}, job)
    assert load_file(file)["3.weight"].shape == (2, 4)


def test_options_of_the_built_in_gpt_are_refused_with_a_model_as_such(capsys):
    """The message named a script inside the package, and a fix for scripts."""
    assert main(["run", "--model", "my_model.py:make", "--batch", "7"]) == 2
    assert "--batch 7: is an option of the built-in GPT, and my_model.py:make" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lr", "0.1"], "--lr 0.1: is an option of the built-in GPT, but {script} runs"),
        (["--no-beat-bigram"], "--beat-bigram: is an option of the built-in GPT"),
        (["--steps=3"], "--steps 3: is an option of the built-in GPT"),
        (["--epochs", "3"], "after --: rpc-pipe run {script} -- --epochs 3"),
        (["3"], "after --: rpc-pipe run {script} -- 3"),
        (["--schedule", "1f2b"], "did you mean '1f1b'"),
        (["--save", "{script}/w"], "--save {script}/w: {script} is a file, not a folder"),
        (["--save", "."], "--save .: is a folder"),
        (["--save", "w", "--html", "w"], "--html w: --save writes the same file"),
    ],
)
def test_what_cannot_apply_is_refused(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    assert main(["run", str(script), *(text.format(script=script) for text in arguments)]) == 2
    assert message.format(script=script) in capsys.readouterr().err


def test_a_script_without_a_pipeline_cannot_be_told_how_to_make_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    done = rpc_pipe("run", script, "--workers", 1, "--schedule", "gpipe")
    assert done.returncode == 2, done.stdout
    assert f"--schedule gpipe: {script} made no Pipeline" in done.stderr


def test_workers_that_train_apart_are_told_so(tmp_path):
    """A script whose training loop forgot the pipeline ran on every worker, and ended as if it had been one run."""
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    done = rpc_pipe("run", script, "--workers", 2)
    assert done.returncode == 0
    assert f"{script} made no Pipeline: 2 workers ran all of it, each by itself" in done.stdout.replace("\n", "")
