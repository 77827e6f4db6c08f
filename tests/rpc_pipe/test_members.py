"""A worker may be several processes: its members share the stages by FSDP2, and a step is that of one process."""

import json
import runpy
import weakref
from functools import partial

import pytest
import torch
from processes import start
from refusals import refused
from torch import nn

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, ConfigError, F, I, ModelError, R, U, W
from rpc_pipe.dependency.pipeline_options import Options
from rpc_pipe.model.batches.own_rows import OwnRows
from rpc_pipe.model.observed_partition import ObservedPartition
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.model.sharding import settle_sharing
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.compute.modules.randomness import Randomness
from rpc_pipe.workers.joint import held_layers


def job(folder, count, *arguments, **more):
    """Run `python *arguments` as each of the processes of a job; return what each has printed."""
    folder.mkdir()
    there = {"WORLD_SIZE": str(count), "RPC_PIPE_INIT": f"file://{folder}/rendezvous", "RPC_PIPE_LOGS": "off"}
    processes = [start(*arguments, RANK=str(rank), **there, **more) for rank in range(count)]
    try:
        found = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, found
    return [out for out, _ in found]


def verdict(folder, count, *options):
    """Return the report of `rpc-pipe verify` with two members a worker."""
    arguments = "-m", "rpc_pipe", "verify", "mlp", "--workers", count, "--steps", 2, "--json", *options
    return json.loads(job(folder, count, *arguments)[0])


SCRIPT = """
import torch
from functools import partial
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
from rpc_pipe.dependency import BatchError, ConfigError
from rpc_pipe.model.batches.microbatches import LazyBatch
from rpc_pipe.pipeline import Pipeline, Training

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.Sequential(nn.LayerNorm(8)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def shard(module, mesh):
    assert mesh.mesh_dim_names == ("member",) and torch.distributed.get_world_size() == mesh.size() == 2
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

def along(module, mesh):
    taken = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
    parallelize_module(module.norm, mesh, taken)
    up, norm = ColwiseParallel(input_layouts=Shard(0)), SequenceParallel(sequence_dim=0)
    parallelize_module(module, mesh, {"norm.0": norm, "up": up, "down": RowwiseParallel()})

x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
how = {"training": Training(partial(torch.optim.SGD, lr=0.1), max_grad_norm=0.05), "num_microbatches": 3}
def refused(error, model, rows=x, **options):
    try:
        with Pipeline(model, nn.functional.mse_loss, members=2, num_microbatches=2, **options) as pipe:
            pipe.step((rows, rows))
    except error:
        return
    raise AssertionError(options)

def tied():
    first, second, third = Block(), Block(), Block()
    third.up.weight = first.up.weight
    return [first, second, third]

class Planned(nn.Module):
    _tp_plan = {"blocks.*.nowhere": "colwise"}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))

class Rows(LazyBatch):
    rows, label, numbers = 6, "rows", None

    def read(self, inputs, targets, own=None):
        Rows.numbers = list(range(6)) if own is None else own.of(6)
        return x[self.numbers] if inputs else None, x.flip(0)[self.numbers] if targets else None

refused(ConfigError, tied(), shard="fsdp")
refused(ConfigError, [Block], shard="tp")
refused(ConfigError, Planned, shard="tp")
refused(ConfigError, [Block], shard="fsdp", transport="local")
refused(ConfigError, [Block], shard="fsdp", order="ready")
refused(BatchError, [Block], rows=x[:1], shard="fsdp")
losses = {}
for members in (2, 1):
    if members == 1:  # all in this process
        import os
        del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RPC_PIPE_INIT"]
    pipe = Pipeline([Block, Block], nn.functional.mse_loss, members=members, shard=shard, **how)
    losses[members] = [pipe.step((x, x.flip(0))) for _ in range(3)], pipe.grad_norm, pipe.evaluate((x, x))
    with Pipeline([Block, Block], nn.functional.mse_loss, members=members, shard=along, **how) as one:
        losses[members][0].extend(value for _ in range(3) for value in (one.step((x, x.flip(0))), one.grad_norm))
    held = {"training": Training(partial(torch.optim.AdamW, lr=0.1), accumulate=2), "num_microbatches": 6}
    held |= {"members": members, "shard": "fsdp", "reduce": "microbatch"}
    with Pipeline([Block, Block], nn.functional.mse_loss, **held) as one:
        losses[members][0].extend(one.step(batch) for batch in ((x, x.flip(0)), (x, x.flip(0)), Rows()))
        assert Rows.numbers == list(range(6))[one.worker % members :: members]
        losses[members][0].append(one.evaluate(Rows()))
        assert Rows.numbers == list(range(6))
    if members == 2:
        state = pipe.weights.state_dict()
        assert (state is None) == (pipe.worker > 0) and (state is None or state["0.up.weight"].shape == (16, 8))
        pipe.barrier()
flat = [[*steps, norm, evaluated] for steps, norm, evaluated in losses.values()]
torch.testing.assert_close(*map(torch.tensor, flat), rtol=1e-5, atol=1e-6)
print(flat[0])
"""


def test_a_function_divides_layers_and_all_members_end_alike(tmp_path):
    """A clipped norm counted what all members hold whole as often as there are members.

    Layers that share a parameter were divided apart, and trained as two; a plan that names no layer divided none.
    A norm between parts of a sequence has a summand of its gradient on each member, and the first one's counted.
    Each member read all rows of a loader.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    first, second = job(tmp_path / "job", 2, tmp_path / "train.py")
    assert first == second


SAVED = """
import json, sys
from functools import partial
from pathlib import Path
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

def block():
    return nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Dropout(0.1), nn.Linear(13, 8), nn.BatchNorm1d(8))

def made(**how):
    training = Training(partial(torch.optim.AdamW, lr=1e-2), ema_decay=0.9, accumulate=2)
    return Pipeline([block] * 2, nn.functional.mse_loss, num_microbatches=8, shard="fsdp", training=training, **how)

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
batch = x, x.flip(0)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pipe = made(replicas=2, members=2)
    pipe.checkpoints.load(folder / "one")
    losses = [pipe.step(batch) for _ in range(2)]
    with pipe.weights.averaged():
        averaged = pipe.weights.state_dict()
        pipe.weights.save_pretrained(folder / "weights")
    saved = pipe.checkpoints.save(folder / "members")
    assert (saved is None) == (pipe.worker > 0)
    before = pipe.evaluate(batch)
    losses.append(pipe.step(batch))
    pipe.checkpoints.load(folder / "members")
    assert pipe.evaluate(batch) == before and pipe.step(batch) == losses[-1]
    assert pipe.weights.load_pretrained(folder / "weights") == ([], [])
    loaded = pipe.weights.state_dict()
    if pipe.worker == 0:
        assert all(torch.equal(loaded[name], tensor) for name, tensor in averaged.items())
        print(json.dumps(losses))
    pipe.barrier()
"""


def test_a_checkpoint_goes_on_over_members_and_back(tmp_path):
    """One process of two stages, then two replicas of two members, then two stages: each goes on with the next loss.

    Gradients kept for later, averages, optimizers and running statistics of each are in it. Members gathered state
    in the order of a set, which is another one in each process, and the second one wrote its statistics for the first.
    """
    (tmp_path / "train.py").write_text(SAVED)
    there = runpy.run_path(tmp_path / "train.py")
    with there["made"](num_workers=2) as pipe:
        first = pipe.step(there["batch"]), pipe.checkpoints.save(tmp_path / "one")
        alone = [pipe.step(there["batch"]) for _ in range(3)]
        losses = json.loads(job(tmp_path / "job", 4, tmp_path / "train.py", tmp_path)[0])
        assert losses[0] == alone[0] and losses == pytest.approx(alone, rel=1e-6), first
        pipe.checkpoints.load(tmp_path / "members")
        assert pipe.step(there["batch"]) == losses[2]
        pipe.weights.load_pretrained(tmp_path / "weights")
        pipe.evaluate(there["batch"])


LOST = """
import os
import torch
from torch import nn
from rpc_pipe.dependency import PeerLost
from rpc_pipe.pipeline import Pipeline

class Layer(nn.Linear):
    def forward(self, x):
        if os.environ["RANK"] == "1":
            os._exit(0)
        return super().forward(x)

x = torch.randn(4, 8)
pipe = Pipeline([lambda: Layer(8, 8)] * 2, nn.functional.mse_loss, members=2, shard="fsdp", num_microbatches=2)
try:
    pipe.step((x, x))
except PeerLost:
    print("lost")
    os._exit(0)
"""


def test_a_member_whose_peer_dies_reports_a_consequence(tmp_path):
    """The survivor's collective failed first, and the launcher named the survivor instead of the process that died."""
    (tmp_path / "train.py").write_text(LOST)
    assert job(tmp_path / "job", 2, tmp_path / "train.py")[0] == "lost\n"


FSDP = "--members", 2, "--shard", "fsdp", "--microbatches", 4


@pytest.mark.parametrize(
    "options",
    [
        ("--schedule", "1f1b", "--transport", "zmq"),
        ("--schedule", "zb-h1", "--reduce", "microbatch", "--shard", "fsdp-kept"),
    ],
)
def test_stages_shared_by_fsdp_train_bit_for_bit_as_one_process(tmp_path, options):
    """W of a split backward calls none of FSDP2's hooks: gradients of earlier microbatches were summed in another
    order."""
    assert verdict(tmp_path / "job", 4, *FSDP, *options)["verdict"] == "identical"


@pytest.mark.parametrize(
    "kind, following, held",
    [(F, B, "b"), (B, F, "a"), (F, F, ""), (B, B, ""), (F, R, ""), (R, B, "b"), (I, W, ""), (F, U, ""), (B, None, "")],
)
def test_a_layer_with_which_the_next_action_begins_is_not_gathered_again(kind, following, held):
    """Two layers a stage were gathered 16 times in 4 microbatches, where torch's pipelining gathers 10 times."""
    assert "".join(held_layers(["a", "b"], False, kind, following)) == held
    assert "".join(held_layers(["a", "b"], True, kind, following)) == ("" if following is None else "ab")


STATISTICS = """
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))] * 2
x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, members=2, shard="fsdp",
                training=Training(torch.optim.SGD))
pipe.step((x, x))
loss, output = pipe.evaluate((x, x)), pipe.predict(x)
print(loss, float(nn.functional.mse_loss(output, x)), output.double().sum().item(), flush=True)
pipe.step((x, x))
print(pipe.evaluate((x, x)))
"""


def test_members_evaluate_by_the_running_statistics_that_are_saved(tmp_path):
    """Each member evaluated by the statistics of its rows: a script that stops early by a loss stopped on one alone."""
    script = tmp_path / "train.py"
    script.write_text(STATISTICS)
    first, second = job(tmp_path / "job", 2, str(script))
    assert first == second and len(first.split()) == 4
    evaluated, predicted = first.split()[:2]
    assert float(evaluated) == pytest.approx(float(predicted), rel=1e-6)


def test_a_norm_that_members_add_up_is_allowed_its_roundings_alone(tmp_path):
    """AdamW made differences of 5e-8 in the norm larger than any bound; 256 roundings were allowed whatever ran."""
    found = verdict(tmp_path / "job", 2, *FSDP, "--max-grad-norm", 0.05)
    assert found["verdict"] in ("identical", "rounding") and found["members_alike"]
    assert found["bound"] == 12 * torch.finfo(torch.float32).eps, "2 members, 2 steps, 3 roundings of a norm"


@pytest.mark.parametrize(
    "options",
    [
        dict(members=0), dict(members=True), dict(members=2), dict(members=2, shard="ddp"),
        dict(members=2, shard="fsdp", reduce="never"),
    ],
)  # fmt: skip
def test_impossible_members_are_refused(options):
    with pytest.raises(ConfigError):
        settle_sharing(Options(**options).checked())


def test_members_are_processes_that_take_actions_in_one_order():
    sharing = settle_sharing(Options(members=2, shard="fsdp"))
    assert sharing.order(None, "ready") == "fixed"
    with refused("num_microbatches"):
        sharing.microbatches(5)
    with refused("members"):
        Pipeline([nn.Linear(2, 2)], nn.functional.mse_loss, num_microbatches=2, members=2, shard="fsdp")


def test_ranks_are_in_the_words_of_other_frameworks(capsys):
    """A rank is (worker * replicas + replica) * members + member, and a worker of two chunks has two stages."""
    typed = "ranks --workers 16 --schedule interleaved --replicas 2 --members 2 --json".split()
    assert main(typed) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dimensions"] == ["pp", "dp_replicate", "dp_shard"]
    assert found["processes"][7] == {"rank": 7, "mesh": [1, 1, 1], "stages": [1, 5]}
    assert found["groups"]["pipeline"][1] == [1, 5, 9, 13]
    assert found["groups"]["data"][0] == [0, 2] and found["groups"]["sharded data"][0] == [0, 1]
    assert main(["ranks", "--workers", "7", "--members", "2"]) == 2


def test_members_and_replicas_read_each_row_once():
    """Of two replicas of two members each read the rows of a job without members: some computed with no data."""
    spec = make_spec("1f1b", 4, 8, {"replicas": 2})
    first = [spec.place(0, route) for route in range(2)]
    read = [OwnRows(spec, worker, member, 2).of(8) for worker in first for member in range(2)]
    assert sorted(row for rows in read for row in rows) == list(range(8))
    assert all(rows[0] % 2 == rows[1] % 2 for rows in read), "every second microbatch is of one member"


def test_a_script_with_a_shard_runs_on_one_process_a_worker():
    layers, training = [nn.Linear(2, 2)], Training()
    Pipeline(layers, nn.functional.mse_loss, num_microbatches=2, shard="fsdp", training=training).close()


def test_one_layer_is_whole_at_a_time():
    """All layers of a stage were made whole before the first was divided: each member held the stage whole."""
    whole = []

    def divide(module, name, model):
        assert not any(parameter() is not None for parameter in whole)
        whole.append(weakref.ref(module.weight))
        module.weight = nn.Parameter(module.weight.detach()[:2].clone())

    layers = [partial(nn.Linear, 4, 4)] * 3
    made = LayerPartition(layers, 1).slice(0, Randomness(0), divide=divide)
    assert len(whole) == 3 and [p.shape[0] for _, p in made.named_parameters()] == [2, 4] * 3


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_one_block_of_a_model_that_a_function_makes_is_whole_at_a_time():
    """The weights of all blocks of a stage were computed before the first block was divided."""
    whole = []

    def divide(module, name, model):
        assert not any(parameter() is not None for parameter in whole)
        whole.append(weakref.ref(module.weight))
        module.weight = nn.Parameter(module.weight.detach()[:2].clone())

    partition = ObservedPartition(Whole, 1, loss_fn=nn.functional.mse_loss)
    partition.observe(((torch.randn(2, 256),), {}), trained=True)
    made = partition.slice(0, Randomness(0), divide=divide)
    assert [p.shape[0] for _, p in made.named_parameters()] == [2, 256] * 3
    assert dict(made.named_parameters()) == dict(made.module.named_parameters())


def test_layers_of_callables_that_share_a_parameter_are_refused():
    shared = nn.Parameter(torch.ones(4, 4))

    def layer():
        made = nn.Linear(4, 4)
        made.weight = shared
        return made

    def divide(module, name, model):
        module.weight = nn.Parameter(module.weight.detach()[:2].clone())

    with pytest.raises(ModelError):
        LayerPartition([layer, layer], 1).slice(0, Randomness(0), divide=divide)
