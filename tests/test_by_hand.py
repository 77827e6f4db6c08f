"""What a user changes by hand between two steps counts from there on, as in one process, or is refused."""

import copy
import zlib
from functools import partial

import pytest
import torch
from refusals import refused
from replayed import X, pipeline
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from rpc_pipe.dependency import F, WorkerFailure
from rpc_pipe.dependency.pipeline_options import Options
from rpc_pipe.model.shard_maker import ShardMaker, make_partition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.workers.compute.updating import Training


def test_a_weight_that_no_optimizer_has_is_not_thawed_silently():
    """It was given gradients, and stayed as it was. One that is frozen later is another matter."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    layers[0].weight.requires_grad_(False)
    alone = nn.Sequential(*copy.deepcopy(layers))
    pipe = pipeline("1f1b", layers)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step, x in enumerate(X[:3]):
        for some in (layers, alone):
            some[1].weight.requires_grad_(step % 2 == 0)
        loss = nn.functional.mse_loss(alone(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step((x, x)) == pytest.approx(loss.item())
    layers[0].weight.requires_grad_(True)
    with refused("parameter", WorkerFailure):
        pipe.step((X[0], X[0]))
    pipe.actors[0].shards[0, 0].optimizer.add_param_group({"params": [layers[0].weight]})
    pipe.step((X[0], X[0]))


class Scaled(nn.Module):
    """Computes by a factor, a tensor and a function that users set."""

    def __init__(self):
        super().__init__()
        self.linear, self.factor, self.warmth, self.bent = nn.Linear(8, 8), 1.0, torch.ones(()), torch.tanh

    def forward(self, x):
        return self.bent(self.linear(x) / self.warmth) * self.factor


class Whole(nn.Module):
    """Has a forward of its own, with a buffer, a mode and a factor outside of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.register_buffer("shift", torch.zeros(8))
        self.factor, self.warmth, self.bent = 1.0, torch.ones(()), torch.tanh

    def forward(self, x):
        for block in self.blocks:
            x = x + self.bent(block(x) / self.warmth) * self.factor + (self.shift if self.training else 0)
        return x


def _by_hand(step, model):
    """Change one thing after the other."""
    layers = list(model.modules())
    scaled = [layer for layer in layers if isinstance(layer, Scaled)]
    if step == 1:
        for layer in (model, *scaled[1:3]):
            layer.factor, layer.warmth, layer.bent = 0.5, torch.tensor(2.0), torch.sin
    elif step == 2:
        scaled[0].linear.weight.requires_grad_(False)
        scaled[2].linear.load_state_dict({"weight": torch.eye(8), "bias": torch.ones(8)})
        scaled[1].warmth.fill_(0.5)
        if isinstance(model, Whole):
            model.shift.fill_(0.25)
            model.warmth.fill_(0.5)
    elif step == 3:
        model.eval()
    elif step == 4:
        model.train()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_copies_follow_the_users_modules(schedule, whole):
    """Stages of whole models, and replicas, went on with the modes, attributes, weights and buffers of before."""
    torch.manual_seed(0)
    model = Whole() if whole else nn.Sequential(*(Scaled() for _ in range(4)))
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    pipe = Pipeline(
        model if whole else list(model), nn.functional.mse_loss, training=Training(partial(torch.optim.SGD, lr=0.1)),
        schedule=schedule, num_workers=2, num_microbatches=2, example=(X[0], X[0]) if whole else None,
    )  # fmt: skip
    for step, x in enumerate(X[:6]):
        for some in (model, alone):
            _by_hand(step, some)
        loss = nn.functional.mse_loss(alone(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step((x, x)) == pytest.approx(loss.item()), step


def test_hooks_of_copies_are_refused():
    layers = [nn.Linear(8, 8) for _ in range(4)]
    pipe = pipeline("chimera", layers)
    pipe.step((X[0], X[0]))
    layers[0].weight.register_hook(print)
    with refused("model"):
        pipe.step((X[0], X[0]))


def _prune(model):
    prune.l1_unstructured(model.blocks[1].linear, "weight", 0.5)


def _load_anew(model):
    model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()}, assign=True)


def _exchange(model):
    model.blocks[2] = Scaled()


def _hook(model):
    model.blocks[0].register_forward_hook(lambda module, given, made: made * 2)


def _patch(model):
    model.blocks[3].forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_prune, "a parameter or module of a Linear was exchanged"),
        (_load_anew, "a parameter or module of a Linear was exchanged"),
        (_exchange, "a parameter or module of a ModuleList was exchanged"),
        (lambda model: model.register_forward_hook(print), "a hook of a Whole was registered"),
        (lambda model: model.register_buffer("more", torch.zeros(1)), "a buffer of a Whole was registered"),
        (lambda model: weight_norm(model.blocks[0].linear), "a parameter or module of a ParametrizedLinear"),
    ],
)
def test_what_copies_cannot_follow_is_refused(change, says):
    """Stages of a whole model went on with the modules, hooks and parameters that it had, silently."""
    torch.manual_seed(0)
    model = Whole()
    pipe = Pipeline(
        model,
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.SGD, lr=0.1)),
        num_workers=2,
        num_microbatches=2,
    )
    pipe.step((X[0], X[0]))
    change(model)
    with refused("model") as error:
        pipe.step((X[0], X[0]))
    assert "\n" not in str(error.value)


def _averages(model):
    model.shift[:2] = torch.tensor([0.5, 0.25])
    model.blocks[1].linear.weight.data[3] *= 2


@pytest.mark.parametrize("change", [_hook, _patch, _averages])
def test_blocks_are_the_users_own_so_that_all_that_is_done_to_them_holds(change):
    """Stages ran copies of the blocks: hooks were refused, and what `.data` wrote was lost silently."""
    torch.manual_seed(0)
    model = Whole()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    pipe = Pipeline(
        model,
        nn.functional.mse_loss,
        training=Training(partial(torch.optim.SGD, lr=0.1)),
        num_workers=2,
        num_microbatches=1,
    )
    for step, x in enumerate(X[:4]):
        for some in (model, alone) if step == 2 else ():
            change(some)
        loss = nn.functional.mse_loss(alone(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step((x, x)) == loss.item(), step
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))
    assert pipe.evaluate((X[0], X[0])) == nn.functional.mse_loss(alone.eval()(X[0]), X[0]).item()


def test_another_module_in_the_users_list_is_refused():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pipe = pipeline("1f1b", model)
    pipe.step((X[0], X[0]))
    model[2] = nn.Linear(8, 8)
    with refused("model"):
        pipe.step((X[0], X[0]))


class Tied(nn.Module):
    """Ends with the weight that it begins with, of which the last stage has a copy."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(2048, 8), nn.Linear(8, 2048, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("whole", [True, False])
def test_a_tied_weight_is_frozen_and_thawed_on_all_stages(whole):
    """In a list of layers the last stage went on training its copy of a weight that the script had frozen."""
    torch.manual_seed(0)
    model = Tied()
    if not whole:
        model = nn.Sequential(model.embedding, *model.blocks, model.head)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    ids = torch.arange(16).reshape(4, 4)

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    with Pipeline(
        model, loss_fn, training=Training(partial(torch.optim.SGD, lr=0.1)), num_workers=2, num_microbatches=2
    ) as pipe:
        for step in range(4):
            for some in (model, alone):
                next(some.children()).requires_grad_(step not in (1, 2))
            loss = loss_fn(alone(ids), ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert pipe.step((ids, ids)) == pytest.approx(loss.item()), step


def test_no_step_reads_all_numbers_of_a_weight(monkeypatch):
    """A checksum of every copied weight was taken before and after each step: 0.1 s a step for a head of 51 MB."""
    read = []

    def crc32(data, *before):
        read.append(len(memoryview(data).cast("B")))
        return original(data, *before)

    original = zlib.crc32
    ids = torch.arange(16).reshape(4, 4)
    model = Tied()
    with Pipeline(
        model, lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        training=Training(partial(torch.optim.SGD, lr=0.1)), num_workers=2, num_microbatches=2,
    ) as pipe:  # fmt: skip
        pipe.step((ids, ids))
        monkeypatch.setattr(zlib, "crc32", crc32)
        pipe.step((ids, ids))
        assert sum(read) < model.head.weight.nbytes // 4
        with torch.no_grad():
            model.embedding.weight.zero_()  # counted by its version, and followed by the copy
        assert not torch.count_nonzero(pipe.predict(ids))


@pytest.mark.parametrize("whole", [True, False])
def test_the_users_modules_compute_in_a_process_that_has_one_replica(whole):
    """A process that holds a second replica alone held a copy: what its user changed had never been trained."""
    model = Whole() if whole else nn.Sequential(*(Scaled() for _ in range(4)))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    spec = make_spec("chimera", 2, 2, {})
    cut = make_partition(model, nn.functional.mse_loss, 2, Training(), Options())
    cut.observe(((X[0],), {}), trained=True)
    shards = ShardMaker(cut, 0, Training()).hosted(spec, 1, torch.device("cpu"), [1])
    assert sorted(shards) == [(0, 1), (1, 0)]
    assert all(p.data_ptr() in own for shard in shards.values() for p in shard.parameters())


@pytest.mark.parametrize("deferred", [False, True])
def test_running_means_of_the_users_model_are_those_of_its_weights(deferred):
    """A whole model had trained weights and the running means of its beginning: read, saved or trained further."""
    torch.manual_seed(0)
    model = Whole()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
    x = X[3]
    given = copy.deepcopy(model) if deferred else model
    other = Pipeline(given, nn.functional.mse_loss, num_microbatches=2, example=(x, x))
    for schedule in ("1f1b", "gpipe"):
        with Pipeline(
            model,
            nn.functional.mse_loss,
            training=Training(partial(torch.optim.SGD, lr=0.1), deferred_batch_norm=deferred),
            schedule=schedule,
            num_workers=2,
            num_microbatches=2,
        ) as pipe:
            for _ in pipe.train([(x, x) for x in X[:3]]):
                state = pipe.weights.state_dict()
                assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
            model.blocks[0][1].running_mean.mul_(0.5)
            held = model.blocks[0][1].running_mean.clone()
            pipe.evaluate((x, x))
            assert torch.equal(pipe.weights.state_dict()["blocks.0.1.running_mean"], held)
            model.eval()
            found = model(x)
            for some in (pipe,) if deferred else (pipe, other):
                assert some.predict(x) == pytest.approx(found.detach(), abs=1e-6)
            model.train()
    assert int(model.blocks[3][1].num_batches_tracked) == 2 * 3 * (1 if deferred else 2)


def test_hooks_of_the_list_of_layers_run():
    """They did not: the list itself was never called."""
    models = [nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.register_forward_hook(lambda module, args, output: output * 3)
    pipe = pipeline("1f1b", models[0])
    assert pipe.step((X[0], X[0])) == pytest.approx(nn.functional.mse_loss(models[1](X[0]), X[0]).item())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_weight_that_is_tied_behind_the_pipeline_is_refused(schedule):
    """Threads added to its gradient at any time; in jobs the second stage computed by weights that nobody trained."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    pipe = pipeline(schedule, layers)
    pipe.step((X[0], X[0]))
    prune.identity(layers[1], "weight")  # the same parameter by another name
    pipe.step((X[0], X[0]))
    layers[3].weight = layers[0].weight
    with refused("model"):
        pipe.step((X[0], X[0]))


def test_a_weight_that_is_thawed_is_averaged():
    """Its optimizer was given it, and the moving average was not: `averaged` had the weights themselves."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    layers[0].weight.requires_grad_(False)
    pipe = pipeline("1f1b", layers, ema_decay=0.5)
    pipe.step((X[0], X[0]))
    before = layers[0].weight.detach().clone()
    layers[0].weight.requires_grad_(True)
    pipe.actors[0].shards[0, 0].optimizer.add_param_group({"params": [layers[0].weight]})
    pipe.step((X[1], X[1]))
    after = layers[0].weight.detach().clone()
    with pipe.weights.averaged():
        assert torch.equal(layers[0].weight, before.lerp(after, 0.5)) and not torch.equal(before, after)


def test_what_a_script_changes_by_hand_counts_once_where_it_is_resumed(tmp_path):
    """A learning rate that the script had divided was divided again, by the calls that are skipped."""

    def script(stop, resume):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        told = []
        with pipeline("1f1b", layers) as pipe:
            pipe.checkpoints.every(4, tmp_path)
            if resume:
                assert pipe.checkpoints.resume(tmp_path).step == 4
            for step, x in enumerate(X[:stop]):
                told.append(pipe.step((x, x)))
                for shard in (shard for actor in pipe.actors for shard in actor.shards.values()):
                    for group in shard.optimizer.param_groups if step in (1, 3) else ():
                        group["lr"] /= 10
                    for parameter in shard.parameters() if step == 2 else ():
                        parameter.data.mul_(0.5)
        return told

    undisturbed = script(7, False)
    assert script(7, True)[3:] == undisturbed[3:]


@pytest.mark.parametrize("call", ["step", "train"])
def test_what_is_changed_before_a_script_saves_counts_once_where_it_is_resumed(tmp_path, call):
    """It was in the checkpoint, and counted again: behind the last step that was skipped nobody looked.

    Earlier calls wrote what had been changed twice beside the checkpoint.
    """

    def script(stop, resume, save=3):
        torch.manual_seed(0)
        told = []
        with pipeline("1f1b", [nn.Linear(8, 8) for _ in range(4)]) as pipe:
            if resume:
                assert pipe.checkpoints.resume(tmp_path).step == save + 1
            batches = [(x, x) for x in X[:stop]]
            for step, loss in enumerate(pipe.train(batches) if call == "train" else map(pipe.step, batches)):
                told.append(loss)
                for shard in (shard for actor in pipe.actors for shard in actor.shards.values()):
                    shard.optimizer.param_groups[0]["lr"] *= 0.7
                if step in (1, save):
                    assert pipe.checkpoints.save(tmp_path).name == f"step-{step + 1:08}"
        return told

    undisturbed = script(7, False)
    assert script(7, True)[3:] == undisturbed[3:]
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_forwards_keep_their_order_when_a_norm_is_put_into_training_mode_later():
    """What waits for what is compiled once, when this norm was frozen: later it averaged in the order of arrival."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 8), nn.Linear(8, 8)]
    pipe = pipeline("1f1b", layers)
    for x in X[:2]:
        pipe.step((x, x))
    layers[1].train()
    pipe.step((X[2], X[2]))
    second = next(entry for entry in pipe.program(0, 4) if entry.action == F(0, 1))
    assert F(0, 0) in second.own
