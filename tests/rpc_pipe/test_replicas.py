"""Training with replicas of the pipeline: the bits of one process, checkpoints for other numbers, and what is typed."""

import json
from functools import partial

import pytest
import torch
from processes import rpc_pipe
from torch import nn

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import ConfigError
from rpc_pipe.launching import overrides
from rpc_pipe.pipeline import Pipeline

MODEL = """
import torch
from torch import nn


def make():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers), (torch.randn(14, 8), torch.randn(14, 8)), nn.MSELoss()
"""
LAYERS = [partial(nn.Linear, 4, 4), nn.Tanh, partial(nn.Linear, 4, 4), nn.Tanh]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:make"


@pytest.mark.parametrize(
    ("schedule", "workers", "replicas"),
    [("1f1b", 4, 2), ("zb-h1", 6, 3), ("interleaved", 4, 2), ("zb-v", 4, 2), ("chimera", 4, 2), ("gpipe", 4, 4)],
)
def test_replicas_train_the_bits_of_one_process(model, schedule, workers, replicas, capsys):
    typed = ["--schedule", schedule, "--workers", workers, "--replicas", replicas, "--microbatches", 7]
    assert main(["verify", model, *map(str, typed), "--transport", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"]


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_processes_too(model, transport):
    typed = "--schedule zb-h1 --workers 4 --replicas 2 --microbatches 7 --json --transport".split()
    ran = rpc_pipe("verify", model, *typed, transport)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["identical"]


def trained(folder, steps, **options):
    """Train, and return the weights, one loss and the clipped norm."""
    options = {"schedule": "1f1b", "num_workers": 4, "num_microbatches": 7, "seed": 3, **options}
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(14, 4, generator=generator), torch.randn(14, 4, generator=generator)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    with Pipeline(LAYERS, nn.functional.mse_loss, optimizer=adam, max_grad_norm=0.1, **options) as pipe:
        if folder.exists():
            pipe.checkpoints.load(folder)
        loss = [pipe.step(batch) for _ in range(steps)][-1]
        pipe.checkpoints.save(folder)
        return pipe.weights.state_dict(), loss, pipe.grad_norm


def test_a_checkpoint_of_replicas_goes_on_with_the_same_bits(tmp_path):
    whole, loss, norm = trained(tmp_path / "whole", 4, replicas=2)
    trained(tmp_path / "parts", 2, replicas=2)
    again, loss_again, norm_again = trained(tmp_path / "parts", 2, replicas=2)
    assert (loss, norm) == (loss_again, norm_again)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("other", [{"num_workers": 2}, {"replicas": 4}, {"num_workers": 2, "replicas": 2}])
def test_a_checkpoint_of_replicas_goes_on_with_other_stages_and_replicas(tmp_path, other):
    trained(tmp_path / "first", 2, replicas=2)
    _, loss, _ = trained(tmp_path / "first", 2, **other)
    _, expected, _ = trained(tmp_path / "other", 4, num_workers=1)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_what_is_typed_wins_and_replicas_stay_when_the_schedule_is_another():
    told = []
    overrides.install(overrides.Overrides({"schedule": "zb-h1"}, {"replicas": "4"}, told.append, lambda pipe: None))
    try:
        options = {"num_workers": 4, "num_microbatches": 8, "replicas": 2}
        with Pipeline(LAYERS, nn.functional.mse_loss, schedule="gpipe", **options) as pipe:
            assert (pipe.spec.replicas, pipe.spec.num_stages) == (4, 1)
    finally:
        overrides.install(None)
    assert any("replicas=4 replaces the script's replicas=2" in line for line in told)
    assert not any("leaves out" in line for line in told)


def test_workers_that_cannot_be_divided_are_refused_before_anything_starts(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('started')")
    assert main(["run", str(script), "--workers", "5", "--replicas", "2"]) == 2
    assert "replicas 2: 5 workers cannot be divided among them" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="replicas 2: 3 workers cannot be divided"):
        Pipeline(LAYERS, nn.functional.mse_loss, num_workers=3, num_microbatches=4, replicas=2)
