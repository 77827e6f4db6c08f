"""Members along two axes: rows are divided along one of them, and parameters along the other or both."""

import json

import pytest
from processes import start
from test_members import job

SCRIPT = """
import json, os
from functools import cache, partial
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import ConfigError

grid = cache(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def columns(layer, mesh):
    parallelize_module(layer, grid()["columns"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

def both(layer, mesh):
    columns(layer, mesh)
    fully_shard(layer, mesh=grid()["rows"])

def hybrid(layer, mesh):
    fully_shard(layer, mesh=grid())

def silent(layer, mesh):
    fully_shard(layer, mesh=mesh)

def nothing(layer, mesh):
    pass

columns.rows = both.rows = 2
hybrid.rows = nothing.rows = True
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
found, sent = {}, []
exchange = torch.distributed.all_to_all_single
torch.distributed.all_to_all_single = lambda *args, **more: (sent.append(args), exchange(*args, **more))[1]
for shard in (columns, both, hybrid, nothing):
    how = {"members": 4 if "RANK" in os.environ else 1, "shard": shard, "num_microbatches": 4}
    training = Training(partial(torch.optim.SGD, lr=0.5), max_grad_norm=0.05)
    with Pipeline([Block, Block], nn.functional.mse_loss, training=training, **how) as pipe:
        sent.clear()
        found[shard.__name__] = [v for _ in range(3) for v in (pipe.step((x, x.flip(0))), float(pipe.grad_norm))]
if "RANK" in os.environ:
    assert len(sent) == 3, "all gradients of a step travel at once"
    assert torch.distributed.get_world_size() == 1
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how |= {"training": Training(partial(torch.optim.SGD, lr=0.5))}
    whole = lambda output, target: nn.functional.mse_loss(output.float(), target)  # torch 2.11 cannot with both types
    with Pipeline([Block, Block], whole, **how | {"shard": "fsdp", "mp_policy": policy}) as pipe:
        half = pipe.step((x, x.flip(0)))
    assert 0 < abs(half - found["nothing"][0]) < 0.05, half
    try:
        Pipeline([Block, Block], nn.functional.mse_loss, **how | {"shard": silent})
    except ConfigError as error:
        assert "rows" in str(error)
    else:
        raise AssertionError("the gradients of the same rows were added up")
print(json.dumps(found))
"""


def test_rows_along_one_axis_and_parameters_along_the_other_train_as_one_process(tmp_path):
    """Parts that some members hold alike counted as often in the norm, and nothing summed their gradients over rows.

    All rows were on all members, whose gradients FSDP then summed, or it took means of parts of a batch; where a plane
    counted no parameter, it did not clip. Metrics of a script added up what each member has of the same rows.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    expected = json.loads(start(script).communicate(timeout=100)[0])
    found = job(tmp_path / "job", 4, script)
    assert len(set(found)) == 1
    for shard, numbers in json.loads(found[0]).items():
        assert numbers == pytest.approx(expected[shard], rel=1e-6), shard
