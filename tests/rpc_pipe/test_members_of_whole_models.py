"""Members that share the stages of a model that the script has made, several of which a worker may have."""

from test_members import job

SCRIPT = """
import os
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model(nn.Module):
    _tp_plan = {"blocks.*.up": "colwise_gather_output", "blocks.*.down": "rowwise_split_input"}

    def __init__(self):
        super().__init__()
        self.begin, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return x

x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
how = {"training": Training(partial(torch.optim.AdamW, lr=0.1)), "num_microbatches": 4}
cases = ("fsdp", "zb-v"), ("tp", "interleaved")
found = {}
for members in (2, 1):
    if members == 1:  # all in this process
        del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RPC_PIPE_INIT"]
    for shard, schedule in cases:
        torch.manual_seed(0)
        with Pipeline(Model(), nn.functional.mse_loss, members=members, shard=shard, schedule=schedule, **how) as pipe:
            losses = torch.tensor([pipe.step((x, x.flip(0))) for _ in range(3)])
        tolerance = 0 if shard != "tp" else 1e-6
        torch.testing.assert_close(losses, found.setdefault((shard, schedule), losses), rtol=tolerance, atol=0)
"""


def test_a_worker_with_several_stages_divides_each_of_them(tmp_path):
    """The first stage divided the script's blocks in their place, and the second one could not copy the model."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job(tmp_path / "job", 2, script)
