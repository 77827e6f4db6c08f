"""Times of microbatches by their rows and length, from a profile."""

import json
import shutil

import pytest
import torch
from torch import nn

from rpc_pipe import ConfigError, Pipeline, SplitBatch
from rpc_pipe.commands.main import main
from rpc_pipe.planning.measuring.profiling import fitted
from rpc_pipe.planning.unequal import LengthCost, mountain, read_cost

MODEL = """
import torch
from torch import nn

def make():
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)]
    return layers, (torch.ones(2, 8, 6), torch.ones(2, 8, 4)), nn.functional.mse_loss
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "model.py").write_text(MODEL)
    file = folder / "profile.json"
    command = ["profile", f"{folder}/model.py:make", "--profile", str(file), "--repeats", "1"]
    assert main([*command, "--lengths", "4,16,64"]) == 0
    assert main([*command, "--lengths", "4,16"]) == 2
    return file


@pytest.fixture
def measured(profiled, tmp_path):
    """Return a profile of the test's, which it may edit."""
    return shutil.copy(profiled, tmp_path / "profile.json")


def test_terms_are_fitted_and_none_is_below_0():
    points = [(1.0, length, length**2) for length in (1, 2, 5, 9)]
    assert fitted(points, [3 + 2 * x + 5 * xx for _, x, xx in points]) == pytest.approx([3, 2, 5])
    assert min(fitted(points, [10, 8, 3, 1])) == 0


def with_terms(measured, **terms):
    """Return a profile whose first block alone has times."""
    content = json.loads(measured.read_text())
    nothing = {name: {"F": 0, "B": 0} for name in ("fixed", "token", "attention")}
    blocks = [{**nothing, **{name: {"F": value, "B": value} for name, value in terms.items()}}, nothing, nothing]
    return {**content, "by_length": blocks}


def test_a_profile_predicts_seconds(measured):
    assert read_cost(measured).seconds(2, 64) > 0
    found = read_cost(with_terms(measured, fixed=1, token=2, attention=3))
    assert found == LengthCost(2e-3, pytest.approx(4e-6), pytest.approx(6e-9))
    assert found.seconds(2, 1000) == pytest.approx(2e-3 + 8e-3 + 12e-3)


def test_an_order_follows_the_profile(measured):
    """The longest rows take most where attention costs, and the most tokens where it does not."""
    sizes = [(9, 4), (5, 6), (8, 5), (6, 6)]
    batch = SplitBatch((torch.ones(*size, 6), torch.ones(*size, 4)) for size in sizes)
    seen = []
    for profile in (None, with_terms(measured, attention=1)):
        layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
        with Pipeline(
            layers, nn.functional.mse_loss, num_microbatches=4, num_workers=2, microbatch_order="balanced",
            microbatch_cost=profile,
        ) as pipe:  # fmt: skip
            seen.append(list(pipe._session.cut(batch).order))
    tokens, squares = [36, 30, 40, 36], [144, 180, 200, 216]
    assert seen == [mountain(tokens), mountain(squares)] and seen[0] != seen[1]


def test_simulated_times_follow_the_profile(measured, capsys):
    command = ["simulate", "--workers", "2", "--microbatches", "3", "--lengths", "10,40,20", "--json"]
    spans = []
    for more in ([], ["--length-cost", str(measured)]):
        assert main([*command, *more]) == 0
        spans.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert spans[0] != spans[1]


def test_each_stage_follows_the_lengths_in_its_own_way(measured, tmp_path, capsys):
    """One factor was taken for all stages: a stage without attention was as late as one with it."""
    kinds = dict.fromkeys("FBIWR", 1)
    nothing = dict.fromkeys("FBIWR", 0)
    attends = {"fixed": nothing, "token": nothing, "attention": kinds}
    plain = {"fixed": kinds, "token": nothing, "attention": nothing}
    file = tmp_path / "edited.json"
    file.write_text(json.dumps({**json.loads(measured.read_text()), "by_length": [attends, plain, plain]}))
    command = ["simulate", "--workers", "3", "--microbatches", "2", "--lengths", "1,3", "--length-cost", str(file)]
    assert main([*command, "--json", "--cost", "F=5,B=10"]) == 0
    # The first stage takes 1 and 9 tenths of two forwards and backwards; each other stage half of both.
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(1 + 5 + (5 + 10) * 2 + 10 + 18)


@pytest.mark.parametrize("members", [[], ["--members", "2", "--shard", "tp"]])
def test_a_plan_is_made_for_the_lengths_of_rows(measured, capsys, members):
    command = ["plan", "--profile", str(measured), "--workers", "2", "--batch", "8", "--json", "--lengths", "4,64,16,8"]
    command[1:1] = ["--seconds", "0.3"]
    if members:
        assert main([*command, *members]) == 2  # the model has no tp_plan
        assert main([*command, "--members", "2", "--shard", "fsdp"]) == 2
        assert main([*command, "--microbatches", "2"]) == 2
        measured.write_text(json.dumps({**json.loads(measured.read_text()), "by_length": []}))
        assert main(command) == 2
        return
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"] == [4, 64, 16, 8] and found["plans"][0]["num_microbatches"] == 4
    assert main([*command[:-2], "--microbatches", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["predicted_ms"] != found["plans"][0]["predicted_ms"]


def test_times_by_length_stay_when_other_rows_are_measured(profiled, measured, capsys):
    command = ["plan", f"{profiled.parent}/model.py:make", "--profile", str(measured), "--alone", "--repeats", "1"]
    assert main([*command, "--workers", "1", "--batch", "16", "--lengths", "4,64", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["measured"]["by_length"]) == 3


def test_a_profile_without_lengths_is_refused(measured):
    content = {**json.loads(measured.read_text()), "by_length": []}
    for wrong in (content, with_terms(measured, fixed=float("nan")), "nowhere.json", 3):
        with pytest.raises(ConfigError):
            Pipeline([nn.Identity], num_microbatches=2, microbatch_order="balanced", microbatch_cost=wrong)


def test_a_cost_of_lengths_without_lengths_is_refused(capsys):
    """`simulate --length-cost nofile.json` took no notice of it, and simulated equal microbatches."""
    assert main(["simulate", "--workers", "2", "--length-cost", "nofile.json"]) == 2
    assert "--length-cost" in capsys.readouterr().err
