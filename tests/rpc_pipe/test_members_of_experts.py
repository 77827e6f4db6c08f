"""Members whose rows reach other layers of a block, and numbers that are read of divided tensors."""

from test_members import job

SCRIPT = """
import os
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import ConfigError, WorkerFailure

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))  # the last one gets no rows

    def forward(self, x):
        expert = self.experts[int(x[0, 0] > 0)]
        return x + torch.tanh(expert(x))

class Leaves(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x[0, 0] > 0 else 2 * x

class Viewed(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(len(x), 8)

class More(nn.Module):
    def forward(self, x):
        x += 1
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

class Trust(torch.optim.Optimizer):
    def __init__(self, pairs):
        super().__init__(pairs, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 * parameter.norm().item() / (parameter.grad.norm().item() + 1))

class Bounded(nn.Embedding):
    def __init__(self):
        super().__init__(4, 8, max_norm=0.1)

x = torch.ones(4, 8)
x[2:] = -1
decay = Training(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), accumulate=2)
averaged = Training(Trust, ema_decay=0.5)
cases = {
    "experts": ([Experts, Experts], decay, {}),
    "experts apart": ([Experts, Experts], decay, {"schedule": "zb-h1"}),
    "experts or none": ([partial(Leaves, 8, 8), partial(nn.Linear, 8, 8)], decay, {}),
    "experts or none, apart": ([partial(Leaves, 8, 8), partial(nn.Linear, 8, 8)], decay, {"schedule": "zb-h1"}),
    "experts written": ([partial(Viewed, 8, 8), More, partial(Viewed, 8, 8), More], decay, {}),
    "model": (Model, averaged, {}),
}
found = {}
for members in (2, 1):
    if members == 1:  # all in this process
        del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RPC_PIPE_INIT"]
    how = {"num_microbatches": 2, "members": members, "shard": "fsdp"}
    for name, (model, training, options) in cases.items():
        with Pipeline(model, nn.functional.mse_loss, training=training, example=(x, x), **options, **how) as pipe:
            numbers = [pipe.step((x, x.flip(0))) for _ in range(6)]
            if training is averaged:
                norms = lambda actor: sum(float(p.norm()) for s in actor.shards.values() for p in s.parameters())
                numbers += pipe.gather("norms", norms) or []
                with pipe.weights.averaged():
                    numbers.append(pipe.evaluate((x, x)))
        expected = found.setdefault(name, numbers)
        if "experts" in name:
            assert numbers == expected, name
        elif len(numbers) == len(expected):  # the first member alone gathers
            torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected))
    if members == 1:
        break
    with Pipeline([nn.Linear(8, 8)], nn.functional.mse_loss, training=decay, **how) as pipe:
        pipe.step((x, x))
        try:
            pipe.optimizers[0].param_groups[0]["params"][0].norm().item()
        except ConfigError as error:
            assert error.subject == "members"
        else:
            raise AssertionError("the norm of a part was read as that of the whole")
    try:
        with Pipeline([Bounded], nn.functional.mse_loss, training=decay, **how) as pipe:
            pipe.step((torch.arange(4), x))
    except WorkerFailure as error:
        assert error.__cause__.subject == "shard"
    else:
        raise AssertionError("what a forward has written was forgotten")
"""


def test_members_train_as_one_process_where_rows_or_divided_tensors_decide(tmp_path):
    """Where one member's rows took one expert and another's a second, gradients of one were added to the other. Where
    one member's rows left out the first layer, others waited for its gathers for ever; a view that the next layer
    wrote ended backward in an error of torch.

    A number read of a norm of a divided tensor was that of a part: of an optimizer's own, or in `pipe.gather`. What a
    forward wrote into a gathered weight was forgotten. Averages of divided weights beside whole ones failed.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job(tmp_path / "job", 2, script)
