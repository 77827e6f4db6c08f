"""What is refused, or made right, when the actions of a part are bound to shards."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda
from refusals import refused
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import mse_loss
from training_options import pipeline_with

from rpc_pipe import Pipeline, Training, own_workers
from rpc_pipe.arguments import compile_options
from rpc_pipe.dependency import ModelError, PipeError
from rpc_pipe.dependency.action import C, D
from rpc_pipe.dependency.errors import WorkerFailure
from rpc_pipe.model.sharding import Sharing
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.compute.devices.accelerator import AcceleratorBackend
from rpc_pipe.workers.compute.result import Result
from rpc_pipe.workers.handlers import handler_of
from rpc_pipe.workers.step import ActionContext, Tally
from rpc_pipe.workers.transport.payload import pack

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
SGD = partial(torch.optim.SGD, lr=0.1)


def losses(layers, schedule, loss_fn=mse_loss, steps=3, **options):
    torch.manual_seed(0)
    with pipeline_with(
        layers, loss_fn, optimizer=SGD, schedule=schedule, num_workers=2, num_microbatches=4, **options
    ) as pipe:
        return [pipe.step((X, X)) for _ in range(steps)]


def compiled():
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))  # noqa: E731
    return [torch.compile(make(), backend="aot_eager") for _ in range(3)] + [nn.Linear(6, 6)]


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_run_where_backward_is_split():
    """It ended in torch's own error about donated buffers."""
    assert losses(compiled(), "zb-h1") == losses(compiled(), "1f1b")


@pytest.mark.filterwarnings("ignore")
def test_a_split_backward_keeps_what_compiled_blocks_save():
    """The compiler took the versions of saved tensors for constants: one "was changed in place"."""

    def in_place():
        torch.manual_seed(0)
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))  # noqa: E731
        return [torch.compile(make(), backend="aot_eager"), nn.Softplus(), *[make() for _ in range(2)]]

    assert losses(in_place(), "zb-h1") == losses(in_place(), "1f1b")


class Around(nn.Module):
    """Calls a compiled part, or function, around its blocks."""

    def __init__(self, part):
        super().__init__()
        self.blocks, self.compiled = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(4)),
            torch.compile(part, backend="eager"),
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.compiled(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [nn.Linear(6, 6), torch.tanh])
def test_compiled_code_around_blocks_is_refused(part):
    """The refusal was that a forward goes another way each time."""
    with refused("model", PipeError) as raised:
        losses(Around(part), "1f1b")
    assert "compile" in str(raised.value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x):
        return x + nn.functional.dropout(self.outer(nn.functional.gelu(self.norm(self.inner(x)))), 0.1, self.training)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        *[("zb-v", Whole), ("gpipe-recompute", Whole)],
        *[("interleaved", lambda: list(Whole().blocks)), ("chimera", lambda: list(Whole().blocks))],
    ],
)
def test_compiled_stages_have_the_bits_of_one_worker(make, schedule):
    """The graphs are of torch's own operators, so even their bits are those that are not compiled."""
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_module_simplified(graph, inputs, lambda made, _: lambda *given: runs.append(1) or made(*given))

    def trained(compile, workers=2):
        torch.manual_seed(0)
        model = make()
        optimizer = partial(torch.optim.AdamW, lr=0.1)
        with Pipeline(
            model, mse_loss, training=Training(optimizer=optimizer), schedule=schedule, num_workers=workers,
            num_microbatches=4, compile=compile,
        ) as pipe:  # fmt: skip
            return [pipe.step((X, X)) for _ in range(2)], pipe.weights.state_dict()

    torch.compiler.reset()
    losses, weights = trained({"backend": backend})
    assert graphs and len(runs) >= 2 * 4 * 4, "each block of each microbatch ran as compiled"
    plain_losses, plain_weights = trained(False)
    assert losses == plain_losses and weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)


@pytest.mark.filterwarnings("ignore")
def test_another_pipeline_of_a_model_decides_anew_whether_its_blocks_are_compiled():
    """It was refused: "blocks.0 was compiled with .compile()", by the pipeline of the evening before."""
    model, graphs = Whole(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for compile in ({"backend": backend}, False, {"backend": backend}):
        torch.compiler.reset()
        graphs.clear()
        with Pipeline(model, mse_loss, training=Training(), num_workers=2, num_microbatches=2, compile=compile) as pipe:
            pipe.step((X, X))
        assert bool(graphs) == bool(compile)
    users = Whole()
    users.blocks[0].compile(backend=backend)
    with pytest.raises(ModelError):
        Pipeline(users, mse_loss, training=Training(), num_workers=2, num_microbatches=2).step((X, X))


def test_compile_takes_options_by_name():
    with refused("compile"):
        losses([nn.Linear(6, 6)] * 2, "1f1b", compile="inductor")


@pytest.mark.parametrize(
    "options, graphs",
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"backend": "cudagraphs"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"options": {"triton.cudagraphs": False}, "dynamic": False}, False),
        (True, False),
    ],
)
def test_graphs_of_a_device_are_refused_with_the_options_that_run(options, graphs):
    """torch gives the memory of a graph up at the first forward behind any backward: that of 1F1B's next microbatch."""
    assert compile_options(options, Sharing(), on_host=True) == ({} if options is True else options)
    if graphs:
        with refused("compile"):
            compile_options(options, Sharing(), on_host=False)
    else:
        assert compile_options(options, Sharing(), on_host=False) == ({} if options is True else options)


def test_a_pipeline_on_a_device_refuses_graphs(monkeypatch):
    monkeypatch.setattr(own_workers, "backend_for", lambda name, place=0: AcceleratorBackend(FakeCuda()))
    with refused("compile"):
        losses([nn.Linear(6, 6)] * 2, "1f1b", compile={"mode": "reduce-overhead"})


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_parameters_are_refused_where_backward_is_split(mesh):
    """Their gradients are reduced behind a whole backward: updates were wrong by a sixth."""

    def sharded():
        layer = nn.Linear(6, 6, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
        return layer

    with refused("stage", WorkerFailure):
        losses([sharded, partial(nn.Linear, 6, 6)], "zb-h1")


def test_layers_that_make_collectives_need_a_fixed_order(mesh):
    layers = [nn.Linear(6, 6), nn.SyncBatchNorm(6), nn.Linear(6, 6)]
    with refused("stage", WorkerFailure):
        losses(layers, "1f1b", order="ready")


class Warming:
    """Weighs a term more and more, as the divergence of a VAE is."""

    weight = 0.0

    def loss(self, output, target):
        self.weight += 0.1
        return mse_loss(output, target) * self.weight


def test_a_loss_that_counts_is_refused_where_several_workers_compute_it():
    """It gave five results in five runs."""
    layers = [partial(nn.Linear, 6, 6) for _ in range(4)]
    with refused("loss_fn", WorkerFailure):
        losses(layers, "chimera", Warming().loss)
    assert losses(layers, "1f1b", Warming().loss) == losses(layers, "1f1b", Warming().loss)


def test_a_loss_that_logs_is_not_refused():
    log = []

    def logged(output, target):
        log.append(0.0)
        return mse_loss(output, target)

    assert losses([partial(nn.Linear, 6, 6) for _ in range(4)], "chimera", logged)


def test_a_row_of_a_large_weight_changed_by_hand_reaches_all_replicas():
    """256 numbers of each weight were compared, so the replicas stayed apart for good."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 6)]
    whole = nn.Sequential(*layers)
    with Pipeline(
        whole, mse_loss, training=Training(SGD), schedule="chimera", num_workers=2, num_microbatches=4
    ) as pipe:
        pipe.step((X, X))
        with torch.no_grad():
            whole[1].weight[3] *= 2
        pipe.step((X, X))
        shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
        by_name = {}
        for name, weight in (pair for shard in shards for pair in shard.named_parameters()):
            by_name.setdefault(name, []).append(weight)
        apart = {n: (first - o).abs().max().item() for n, (first, *others) in by_name.items() for o in others}
        assert not any(apart.values()), apart


def test_a_second_node_of_a_worker_passes_the_result_on():
    """A worker of zb-v has a node at each end of the tree. The second made the result anew from the same payload.

    Members had joined their losses meanwhile: on some workers a step had half its loss, and a stop was lost. A worker
    with two nodes below one of another worker's had raised KeyError.
    """
    spec = make_spec("zb-v", 2, 4)
    step = SimpleNamespace(tally=Tally(), batch=SimpleNamespace(train=False, data=SimpleNamespace(rows=0), spec=spec))
    step.payloads = {each: pack([{"stop": False}]) for each in (C(3, 0), D(1, 0))}
    joined, worker = Result([{"stop": True}], {}), SimpleNamespace(worker=0, stop_requested=False)
    for action, source in ((D(3, 0), C(3, 0)), (D(0, 0), D(1, 0))):
        task = SimpleNamespace(entry=SimpleNamespace(action=action, sources=(source,)))
        told = handler_of(D)(ActionContext(worker, step, task))
        assert told is step.payloads[source]
        if action == D(3, 0):
            assert not step.tally.result.stop
            step.tally.result = joined
    assert step.tally.result is joined
