"""Names of weights in modules that torch.compile or checkpoint_wrapper hold: a checkpoint has the plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rpc_pipe import Pipeline, Training
from rpc_pipe.checkpoints import shard_state
from rpc_pipe.model import observed_partition, partition
from rpc_pipe.model.replay import observed_stage
from rpc_pipe.workers.compute.sequences import slices

WRAPPERS: dict[str, Any] = {
    "none": lambda block: block,
    "checkpoint": checkpoint_wrapper,
    "compile": partial(torch.compile, backend="eager"),
}
BATCH = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, -1, 64).view(8, 8)


class Model(nn.Module):
    def __init__(self, wrapper: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)]
        blocks[2][0].weight = blocks[0][0].weight
        self.blocks = nn.ModuleList(WRAPPERS[wrapper](block) for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pipeline(wrapper: str, whole: bool, workers: int) -> Pipeline:
    model, training = Model(wrapper), Training(partial(torch.optim.AdamW, lr=0.01), ema_decay=0.9)
    how: dict[str, Any] = {"training": training, "num_microbatches": 2, "num_workers": workers}
    return Pipeline(model if whole else list(model.blocks), nn.functional.mse_loss, example=BATCH, **how)


@pytest.fixture
def eager() -> Iterator[None]:
    """Compiled blocks run as they are: nothing is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_checkpoint_goes_on_with_and_without_wrappers(whole, is_old, tmp_path, monkeypatch):
    """Optimizer states had a wrapper's name, weights had not: without the wrapper a checkpoint was another model's."""
    right = None
    for before in WRAPPERS:
        with monkeypatch.context() as patch:
            for module in (slices, shard_state, observed_stage, observed_partition, partition) if is_old else ():
                patch.setattr(module, "plain_name", lambda name: name)
            with pipeline(before, whole, 2) as pipe:
                pipe.step(BATCH)
                pipe.checkpoints.save(tmp_path / before)
                pipe.weights.save(tmp_path / f"{before}.safetensors")
                right = right or pipe.step(BATCH)
        if not is_old:
            assert (
                load_file(tmp_path / f"{before}.safetensors").keys() == load_file(tmp_path / "none.safetensors").keys()
            )
    for before, after in ("checkpoint", "none"), ("compile", "checkpoint"), ("none", "compile"):
        with pipeline(after, whole, 3 - whole) as pipe:
            pipe.checkpoints.load(tmp_path / before)
            assert pipe.step(BATCH) == right
