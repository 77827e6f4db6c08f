"""Unkind models train as in one process, bit for bit, whatever the schedule, wherever they are cut."""

import copy
import random
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from carriers import loopback_carriers
from refusals import failed, refused
from torch import nn
from torch.utils.checkpoint import checkpoint
from unkind import MODELS, batches_for, differences, mse, pipeline, repeated
from unkind_layers import EMA, WIDTH, Bounded, Hooks, JustMoved, Linear, OwnHooks, Product
from unkind_layers import Checkpointed as OfACheckpoint

from rpc_pipe import Training
from rpc_pipe import own_workers as module
from rpc_pipe.boards import run_folders
from rpc_pipe.dependency import ConfigError, Disagreement, WorkerFailure
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.modules.randomness import Randomness

SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]
#: each model with every ninth schedule, each schedule with every ninth model
PAIRS = [(name, schedule) for i, name in enumerate(MODELS) for schedule in SYNCHRONOUS[i % 9 :: 9]]


@pytest.mark.parametrize("name, schedule", PAIRS)
def test_identical_to_one_process(name, schedule):
    """Workers, microbatches and order are drawn by the names."""
    draw = random.Random(name + schedule)
    workers, microbatches, order = draw.choice([2, 2, 3, 4]), draw.choice([1, 3, 4]), draw.choice(["ready", "fixed"])
    if schedule == "dualpipe" and workers == 3:
        workers = 4  # it takes even numbers only
    torch.manual_seed(0)
    options = {"num_workers": workers, "num_microbatches": microbatches, "order": order, "seed": 1}
    pipe = pipeline(MODELS[name], schedule, **options)
    assert differences(pipe, MODELS[name], batches_for(name, microbatches), 1) == [], options


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODELS
        if name.startswith(("weights", "one", "complex", "sparse", "views", "strided", "grad", "named"))
    ],
)
def test_identical_when_stages_are_joined_by_messages(name, monkeypatch):
    """Over RPC and ZeroMQ an expanded tensor arrived as a contiguous copy: its sum, and all behind it, differed."""
    carriers = loopback_carriers(3)
    monkeypatch.setattr(module, "local_carriers", lambda _: carriers)
    monkeypatch.setenv(run_folders.FOLDER, run_folders.OFF)  # a board keeps its carrier as long as the process lives
    torch.manual_seed(0)
    pipe = pipeline(MODELS[name], "zb-v", num_workers=3, num_microbatches=3, seed=1)
    assert differences(pipe, MODELS[name], batches_for(name, 3), 1) == []
    for carrier in carriers:
        carrier.close()
    for carrier in carriers:
        carrier.post.link.end_threads()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "chimera", "gpipe-recompute", "pipedream"])
def test_weights_that_forwards_write_are_those_of_the_forward_in_backward(schedule):
    """Backward read what later microbatches' forwards had made of them, where autograd did not see it."""
    torch.manual_seed(0)
    bounded = repeated(Bounded)
    pipe = pipeline(bounded, schedule, num_workers=2, num_microbatches=4, seed=1)
    if schedule in ("gpipe-recompute", "pipedream"):
        with pytest.raises((ConfigError, WorkerFailure), match=r"writes .*parameter"):
            pipe.step((torch.ones(8, WIDTH), torch.ones(8, WIDTH)))
        return
    batches = [(torch.randn(9, WIDTH), torch.randn(9, WIDTH)) for _ in range(2)]
    if schedule == "chimera":  # its two replicas have been written by rows of their own, and stay apart
        with pytest.raises(Disagreement):
            differences(pipe, bounded, batches, 1)
        return
    assert differences(pipe, bounded, batches, 1) == []


class Noisy(Linear):
    """Adds noise to gradients, as a function that rounds at random in backward does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda grad: grad + torch.randn_like(grad))

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: grad + torch.randn_like(grad))
        return y


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += torch.randn_like(parameter) / 10


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_what_draws_in_backward_and_update_does_not_depend_on_timing(schedule):
    """Workers in threads drew from one generator in the order in which they happened to run."""
    noisy = repeated(Noisy, optimizer=partial(Langevin, lr=0.1))
    states = []
    for order in ("ready", "fixed", "ready"):
        torch.manual_seed(0)
        pipe = pipeline(noisy, schedule, num_workers=2, num_microbatches=3, order=order)
        for _ in range(2):
            pipe.step((torch.ones(6, WIDTH), torch.ones(6, WIDTH)))
        states.append(pipe.weights.state_dict())
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


class Hooked(OwnHooks):
    def __init__(self, norm) -> None:
        super().__init__()
        self.linear = norm(self.linear)
        self.scale.name_of_mine = "scale"
        self.scale.register_hook(self.halved)
        self.scale.register_post_accumulate_grad_hook(self.count)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_replicas_of_modules_have_all_that_these_have(norm):
    """Copies lost their parameters' hooks, silently; the old `weight_norm` could not be copied."""
    torch.manual_seed(0)
    modules = [Hooked(norm) for _ in range(2)]
    pipe = pipeline(replace(MODELS["hooks"], layers=modules), "chimera", num_workers=2, num_microbatches=4)
    pipe.step((torch.randn(8, WIDTH), torch.randn(8, WIDTH)))
    layers = {place: shard.slice.layers[0][1] for actor in pipe.actors for place, shard in actor.shards.items()}
    assert layers[0, 0] is modules[0] and layers[0, 1] is not modules[0]
    for stage in (0, 1):
        one, other = layers[stage, 0], layers[stage, 1]
        assert (one.counted, other.counted) == (2, 2) and other.scale.name_of_mine == "scale"
        assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_module_that_cannot_be_copied_is_named():
    class Locked(Linear):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with refused("model"):
        Pipeline([Locked(), Locked()], mse, schedule="chimera", num_workers=2, num_microbatches=2)


def test_a_callable_that_returns_what_is_there_gives_no_two_replicas_one_layer():
    layers = [Linear(), Linear()]
    pipe = Pipeline([lambda: layers[0], lambda: layers[1]], mse, schedule="chimera", num_workers=2, num_microbatches=2)
    shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
    assert len({shard.slice.layers[0][1] for shard in shards}) == 4


def test_a_pipeline_lets_go_of_layers_that_it_does_not_hold():
    """In a job a worker kept the layers of all stages alive, if they were given as modules."""
    partition = LayerPartition(nn.Sequential(Linear(), Linear()), 2)
    ((_, mine),) = partition.build(0, Randomness(0))
    other = weakref.ref(partition.build(1, Randomness(0))[0][1])
    partition.release()
    assert other() is None and mine is not None


class Full(Product):
    """Its backward is in single precision, unless autocast is on there."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad.float() @ weight.T).to(x.dtype), x.float().T @ grad.float()


class Recast(Linear):
    """A weight is used twice, inside of a checkpoint that computes without gradients first."""

    def forward(self, x):
        return checkpoint(lambda x: self.linear(self.linear(x).tanh()), x, use_reentrant=True) + x


class InFull(Linear):
    def forward(self, x):
        return Full.apply(self.linear(x), self.linear.weight).float()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("schedule, workers", [("1f1b", 1), ("1f1b", 3), ("gpipe", 2)])
def test_autocast_is_around_forwards_and_losses_alone(schedule, workers):
    """Casts are kept for all threads until one leaves autocast, so timing decided which sums were of cast gradients; a
    checkpoint's casts, and those of an evaluation, had no gradients, and so had their weights none."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Recast(), InFull(), Recast(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*copy.deepcopy(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(3)]
    pipe = Pipeline(
        layers, mse, training=Training(partial(torch.optim.SGD, lr=0.1)), schedule=schedule,
        num_workers=workers, num_microbatches=3,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        for _ in pipe.train(batches):
            pipe.evaluate(batches[0])
    for x, y in batches:
        for a, b in zip(x.split(2), y.split(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(model(a), b) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = pipe.weights.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


class OfGradients(Linear):
    """Uses gradients that `torch.func` makes, which bears no hooks of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        return x + torch.func.vmap(torch.func.grad(lambda row: self.linear(row).tanh().sum()))(x) * self.shift


class OfGradientsInPlace(OfGradients):
    """Has written its input, counted and drawn before it comes to them."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x.mul_(self.calls).add_(torch.randn_like(x)))


@pytest.mark.parametrize("layers", [[OfGradients], [OfGradientsInPlace], [OfGradients, JustMoved]])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe-recompute", "zb-h1"])
def test_a_forward_that_bears_no_hooks_trains_where_backward_is_whole(schedule, layers):
    """It was refused beside a buffer, where forwards are run again, and beside a layer that writes what backward
    reads."""
    torch.manual_seed(0)
    model = repeated(*layers)
    pipe = pipeline(model, schedule, num_workers=2, num_microbatches=3, seed=1)
    if schedule.startswith("zb"):
        with failed(RuntimeError):
            pipe.step(batches_for("hooks", 3)[0])
    else:
        assert differences(pipe, model, batches_for("hooks", 3), 1) == []


class Inside(Linear):
    """Draws from a generator of its own, and counts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.calls = torch.Generator().manual_seed(5), [0]

    def forward(self, x):
        if self.training:
            self.calls[0] += 1
            x = x + torch.randn(x.shape, generator=self.generator)
        return self.linear(x).tanh() * (1 + self.calls[0] % 3)


def test_what_attributes_hold_inside_is_computed_again_and_shown_as_it_was():
    """The second forward drew on; the body of a loop saw what forwards of the next step had left."""
    torch.manual_seed(0)
    inside = repeated(Inside)
    pipe = pipeline(inside, "gpipe-recompute", num_workers=2, num_microbatches=3, order="fixed", seed=1)
    assert differences(pipe, inside, [(torch.randn(7, WIDTH), torch.randn(7, WIDTH)) for _ in range(2)], 1) == []
    found = []
    for streams in (True, False):
        pipe = pipeline(inside, "1f1b", num_workers=2, num_microbatches=2, order="fixed", seed=1)
        batches = [(torch.ones(4, WIDTH), torch.ones(4, WIDTH))] * 3
        losses = pipe.train(batches) if streams else map(pipe.step, batches)
        found.append([(loss, pipe.evaluate(batches[0])) for loss in losses])
    assert found[0] == found[1]


class Moved(Linear):
    """Moves what it scales by, last of all: a checkpoint that runs it again ends before, and has read it."""

    def __init__(self, of_weight):
        super().__init__()
        book = torch.ones(WIDTH)
        if of_weight:
            self.book = nn.Parameter(book, requires_grad=False)
        else:
            self.register_buffer("book", book)

    def forward(self, x):
        y = self.linear(x) * self.book
        self.book.data.lerp_(x.detach().mean(0), 0.1)
        return y


class Within(Linear):
    """Moves an average, and scales by it in a checkpoint of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return checkpoint(lambda x: self.linear(x) * (1 + self.mean), x, use_reentrant=False)


class Normed(Linear):
    """Makes its weight anew when a checkpoint runs it again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.weight_norm(self.linear)

    def forward(self, x):
        return self.linear(x).tanh()


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("schedule", "layer"),
    [
        ("gpipe", partial(Checkpointed, partial(Moved, True))),
        ("zb-h1", partial(Checkpointed, partial(Moved, False))),
        ("gpipe", Within),
        ("1f1b", partial(Checkpointed, Normed)),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_checkpoint_computes_again_by_the_tensors_that_its_own_forward_has_left(schedule, layer, microbatches):
    """It computed by what later microbatches had left, in a codebook or an average."""
    counted = repeated(layer)
    torch.manual_seed(0)
    pipe = pipeline(counted, schedule, num_workers=2, num_microbatches=microbatches, seed=1)
    assert differences(pipe, counted, batches_for("moving average", microbatches), 1) == []


def test_what_hooks_of_gradients_count_beside_a_checkpoint_stays():
    """Where a stage is recomputed, they counted in a copy of its buffers that was dropped behind backward."""
    counting = repeated(Hooks, OfACheckpoint)
    torch.manual_seed(0)
    pipe = pipeline(counting, "gpipe-recompute", num_workers=2, num_microbatches=1, seed=1)
    assert differences(pipe, counting, batches_for("hooks", 1), 1) == []


class FromAQueue(Linear):
    """From its third forward on it takes numbers from a queue of the user's, as a cache that fills up does."""

    taken = [0.0] * 4

    def forward(self, x):
        self.taken.append(float(len(self.taken)))
        return self.linear(x) + max(self.taken[-1] - 8.0, 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_check_always_finds_what_begins_later_to_depend_on_something_else(schedule):
    batch = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    for layers, raises in (([partial(nn.Linear, WIDTH, WIDTH)], False), ([EMA], False), ([FromAQueue], True)):
        torch.manual_seed(0)
        model = repeated(*layers)
        pipe, other = (pipeline(model, schedule, num_workers=2, num_microbatches=3, seed=1, **how) for how in
                       ({"check": "always"}, {}))  # fmt: skip
        if raises:
            with refused("layer", WorkerFailure):
                for _ in range(4):
                    pipe.step(batch)
        else:
            assert [pipe.step(batch) for _ in range(3)] == [other.step(batch) for _ in range(3)]
