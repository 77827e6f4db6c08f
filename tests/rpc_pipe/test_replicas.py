"""Training with replicas of the pipeline: the bits of one process, checkpoints for other numbers, and what is typed."""

import copy
import json
from collections import Counter
from functools import partial
from threading import Lock

import pytest
import torch
from processes import rpc_pipe
from refusals import refused
from replayed import Late
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_options import pipeline_with

from rpc_pipe.commands.main import main
from rpc_pipe.commands.script import TypedOptions
from rpc_pipe.dependency import Action, B, ConfigError, G, P, S, WorkerFailure
from rpc_pipe.launching import attaching
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.workers.hooks import Listener
from rpc_pipe.workers.mailbox import Mailbox

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
    [
        *[("1f1b", 4, 2), ("zb-h1", 6, 3), ("zb-v", 4, 2), ("chimera", 4, 2), ("gpipe", 4, 4)],
        *[("pipedream-2bw", 6, 3), ("pipedream", 6, 3), ("avgpipe", 4, 2)],
    ],
)
def test_replicas_train_the_bits_of_one_process(model, schedule, workers, replicas, capsys):
    typed = ["--schedule", schedule, "--workers", workers, "--replicas", replicas, "--microbatches", 7, "--steps", 3]
    zero = ["--zero", 1, "--bucket", "0.0002", "--max-grad-norm", 0.1]
    if schedule in ("pipedream", "avgpipe"):  # an owner could not clip by the norm of a stage
        zero = ["--bucket", "0.0002", "--max-grad-norm", 0.1]
    spread = ["--spread", "stages"] if schedule in ("1f1b", "zb-v", "gpipe", "avgpipe") else []
    for more in ([], [*zero, *spread]):
        assert main(["verify", model, *map(str, typed + more), "--transport", "local", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["identical"]


@pytest.mark.parametrize("schedule", ["pipedream", "avgpipe"])
def test_replicas_of_a_stream_train_as_one_pipeline_on_larger_microbatches(schedule, tmp_path):
    """They were refused; an update takes one microbatch of each replica, or all of a pipeline's replicas."""

    def trained(replicas, folder, at=0, **more):
        torch.manual_seed(0)
        layers = [layer.double() for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))]
        numbers = {"num_workers": 2 * replicas, "replicas": replicas, "num_microbatches": 3 * replicas}
        training = Training(partial(torch.optim.AdamW, lr=1e-2), **more.pop("training", {}))
        batches = [(x, x) for x in torch.randn(4, 12, 4, dtype=torch.float64)]
        with Pipeline(
            layers[::2] if folder is None else layers, nn.functional.mse_loss,
            schedule=schedule, training=training, **numbers, **more,
        ) as pipe:  # fmt: skip
            if at:
                pipe.checkpoints.load(folder / f"step-{at:08}")
            elif folder is not None:
                pipe.checkpoints.every(2, folder)
            return list(pipe.train(batches[at:])), pipe.evaluate(batches[0]), pipe.weights.state_dict()

    for training in ({}, {"max_grad_norm": 0.05}):
        for found, expected in zip(*(trained(n, None, training=training)[:2] for n in (2, 1)), strict=True):
            torch.testing.assert_close(found, expected)
    losses, evaluated, weights = trained(2, tmp_path)
    again = trained(2, tmp_path, at=2)
    assert again[:2] == (losses[2:], evaluated)
    assert all(torch.equal(tensor, again[2][name]) for name, tensor in weights.items())
    for refused_options in ({"training": {"max_grad_norm": 0.05}}, *([{}] if schedule == "avgpipe" else [])):
        with refused("zero"):
            trained(2, None, zero=1, **refused_options)


@pytest.mark.parametrize("schedule", ["zb-h1", "chimera"])
def test_deferred_batch_norm_has_the_statistics_of_all_replicas(tmp_path, schedule, capsys):
    """Each replica took those of its own microbatches, so that they evaluated by different ones."""
    text = MODEL.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")
    (tmp_path / "normed.py").write_text(text)
    typed = f"--schedule {schedule} --workers 4 --replicas 2 --microbatches 7 --deferred-batch-norm --steps 3".split()
    for more in ([], ["--zero", "1", "--bucket", "0.0002"]):
        asked = ["verify", f"{tmp_path / 'normed.py'}:make", *typed, *more, "--transport", "local", "--json"]
        assert main(asked) == 0
        assert json.loads(capsys.readouterr().out)["identical"]


@pytest.mark.parametrize("then", [2, 1])
def test_sums_that_wait_for_an_update_go_on_from_a_checkpoint(tmp_path, then):
    """All replicas went on from the first's. Three steps in, half of what is summed up waits for the next update."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    batches = torch.randn(4, 14, 4)
    options = {"deferred_batch_norm": True, "accumulate": 2, "optimizer": partial(torch.optim.SGD, lr=0.0)}

    def ends(steps, folder, replicas=2):
        numbers = {"num_workers": 2 * replicas, "replicas": replicas, "num_microbatches": 6}
        made = copy.deepcopy(layers)
        with Pipeline(made, nn.functional.mse_loss, training=Training(**options), **numbers) as pipe:
            if folder.exists():
                pipe.checkpoints.load(folder)
            for x in batches[pipe.steps_done :][:steps]:
                pipe.step((x, x))
            pipe.checkpoints.save(folder)
            return {name: t for name, t in pipe.weights.state_dict().items() if "running" in name}

    whole = ends(4, tmp_path / "whole")
    ends(3, tmp_path / "parts")
    again = ends(1, tmp_path / "parts", then)
    tolerance = {} if then == 1 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(again, whole, **tolerance)


@pytest.mark.parametrize(("transport", "zero"), [("rpc", "0"), ("zmq", "1 --spread stages")])
def test_processes_too(model, transport, zero):
    typed = (
        f"--schedule zb-h1 --workers 4 --replicas 2 --zero {zero} --microbatches 7 --json --steps 3 --transport".split()
    )
    ran = rpc_pipe("verify", model, *typed, transport)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["identical"]


def a_batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(14, 4, generator=generator), torch.randn(14, 4, generator=generator)


def trained(folder, steps, layers=LAYERS, **options):
    """Train, and return the weights, one loss and the clipped norm."""
    options = {"schedule": "1f1b", "num_workers": 4, "num_microbatches": 7, "seed": 3, **options}
    batch, adam = a_batch(), partial(torch.optim.AdamW, lr=1e-2)
    with Pipeline(layers, nn.functional.mse_loss, training=Training(adam, max_grad_norm=0.1), **options) as pipe:
        if folder.exists():
            pipe.checkpoints.load(folder)
        loss = [pipe.step(batch) for _ in range(steps)][-1]
        pipe.checkpoints.save(folder)
        return pipe.weights.state_dict(), loss, pipe.grad_norm


def test_callables_that_share_inner_modules_train_as_modules_do(tmp_path):
    """Each call made a new `Sequential` around the user's own module, which all replicas in a process had as one."""
    inner = [nn.Linear(4, 4) for _ in range(4)]
    given = [nn.Sequential(copy.deepcopy(linear), nn.Tanh()) for linear in inner]
    made = [partial(nn.Sequential, linear, nn.Tanh()) for linear in inner]
    (expected, loss, _), (state, of_made, _) = (
        trained(tmp_path / str(number), 2, layers, replicas=2) for number, layers in enumerate((given, made))
    )
    assert loss == of_made
    assert all(torch.equal(expected[name], state[name]) for name in expected)


@pytest.mark.parametrize(("first", "then"), [("", ""), ("zero", "zero"), ("", "zero"), ("zero", "")])
def test_a_checkpoint_of_replicas_goes_on_with_the_same_bits(tmp_path, first, then):
    shape = {"num_workers": 6, "replicas": 3}
    whole, loss, norm = trained(tmp_path / "whole", 4, **shape)
    trained(tmp_path / "parts", 2, **shape, **dict.fromkeys(first.split(), 1))
    again, loss_again, norm_again = trained(tmp_path / "parts", 2, **shape, **dict.fromkeys(then.split(), 1))
    assert (loss, norm) == (loss_again, norm_again)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("other", [{"num_workers": 2}, {"replicas": 4}, {"replicas": 4, "zero": 1}])
def test_a_checkpoint_of_replicas_goes_on_with_other_stages_and_replicas(tmp_path, other, zero):
    trained(tmp_path / "first", 2, replicas=2, zero=zero)
    _, loss, _ = trained(tmp_path / "first", 2, **other)
    _, expected, _ = trained(tmp_path / "other", 4, num_workers=1)
    assert loss == pytest.approx(expected, rel=1e-5)


# --- what is exchanged


class Sent(Listener):
    """Counts the bytes of gradients and parameters that each worker sends in a step."""

    def __init__(self):
        self.bytes, self.lock = Counter(), Lock()

    def step_finished(self, record):
        for arrived in record.arrivals:
            if arrived.action.kind in (G, S, P):
                with self.lock:
                    self.bytes[arrived.peer] += arrived.num_bytes


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("workers", "replicas"), [(4, 2), (6, 3), (8, 4)])
def test_a_worker_sends_no_more_than_in_a_ring(workers, replicas, zero):
    """And with ZeRO it keeps its share of the optimizer states; parameters are owned whole."""
    layers = [lambda: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(12)])] * 2
    sent, options = Sent(), {"num_workers": workers, "num_microbatches": 7, "replicas": replicas, "zero": zero}
    with Pipeline(
        layers, nn.functional.mse_loss, training=Training(torch.optim.Adam), bucket=100 / 2**20, **options
    ) as pipe:
        for actor in pipe.actors:
            actor.listeners.add(sent)
        pipe.step(a_batch())
        gradients = 12 * 4 * 4 * 4
        assert sent.bytes == dict.fromkeys(range(workers), 2 * (replicas - 1) * gradients / replicas)
        for actor in pipe.actors:
            ((_, shard),) = actor.shards.items()
            kept = sum(state["exp_avg"].nbytes for state in shard.optimizer.state.values())
            assert kept == gradients / (replicas if zero else 1)


@pytest.mark.parametrize(
    "more",
    [
        {"ema_decay": 0.9},
        {"accumulate": 2, "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
        {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=1e38)},  # overflows at first
        {"optimizer": partial(torch.optim.Adafactor, lr=1e-2), "max_grad_norm": None},
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    ],
)
def test_owners_update_as_everybody_does(more):
    def ends(zero):
        found = Training(**{"optimizer": partial(torch.optim.AdamW, lr=1e-2), "max_grad_norm": 0.1, **more})
        options = {"num_workers": 6, "num_microbatches": 7, "replicas": 3, "zero": zero}
        with Pipeline(LAYERS, nn.functional.mse_loss, training=found, **options) as pipe:
            losses = [pipe.step(a_batch()) for _ in range(4)]
            state = pipe.weights.state_dict()
            if found.ema_decay:
                with pipe.weights.averaged():
                    state |= {f"average of {name}": tensor for name, tensor in pipe.weights.state_dict().items()}
            return losses, pipe.grad_norm, {name: tensor.clone() for name, tensor in state.items()}

    (losses, norm, state), (of_owners, norm_of_owners, state_of_owners) = ends(0), ends(1)
    assert (losses, norm) == (of_owners, norm_of_owners)
    assert all(torch.equal(state[name], state_of_owners[name]) for name in state)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_replica_may_have_no_microbatch_in_a_step(zero):
    """It took gradients for given that it had given in the step before, and the others waited for them."""
    x, y = a_batch()
    parts = [(x[:7], y[:7]), (x[7:], y[7:])]

    def trained_by(**options):
        training = Training(partial(torch.optim.Adam, lr=0.1))
        with Pipeline(LAYERS, nn.functional.mse_loss, training=training, num_microbatches=2, **options) as pipe:
            losses = [pipe.step(microbatches=parts[:count]) for count in (2, 2, 2, 1, 2)]
            return losses, [weight.tolist() for weight in pipe.weights.state_dict().values()]

    replicas = {"num_workers": 4, "replicas": 2, "zero": zero, "bucket": 5e-5, "stall_s": 20}
    assert trained_by(**replicas) == trained_by(num_workers=2)


@pytest.mark.parametrize("zero", [0, 1])
def test_nor_in_a_stream_whose_steps_overlap(zero):
    """Batches of one row are a stream of their own, of which the second replica has nothing but the sums."""
    x, y = a_batch()

    def trained_by(**options):
        training = Training(partial(torch.optim.Adam, lr=0.1))
        options |= {"schedule": "pipedream-2bw", "num_microbatches": 2}
        with Pipeline(LAYERS, nn.functional.mse_loss, training=training, **options) as pipe:
            losses = list(pipe.train((x[:n].clone(), y[:n].clone()) for n in (2, 2, 2, 1, 1, 1, 2, 2)))
            return losses, [weight.tolist() for weight in pipe.weights.state_dict().values()]

    replicas = {"num_workers": 4, "replicas": 2, "zero": zero, "bucket": 5e-5, "stall_s": 20}
    assert trained_by(**replicas) == trained_by(num_workers=2)


def test_owners_give_no_frozen_parameters():
    """Each was written by its own numbers, while microbatches of the next step still had to go back through it."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    for layer in layers:
        layer[0].requires_grad_(False)
    weights = []
    for options in ({"num_workers": 2}, {"num_workers": 4, "replicas": 2, "zero": 1}):
        training = Training(partial(torch.optim.Adam, lr=0.1))
        options |= {"schedule": "pipedream-2bw", "num_microbatches": 2, "training": training}
        with pipeline_with(copy.deepcopy(layers), nn.functional.mse_loss, **options) as pipe:
            assert len(list(pipe.train([a_batch()] * 4))) == 4
            weights.append([weight.tolist() for weight in pipe.weights.state_dict().values()])
    assert weights[0] == weights[1]


def pieces_given(monkeypatch, layers, kind=G, **options):
    """Train three steps; return, by step, what the worker computed while gradients of its stage, or sums, left."""
    given = []
    publish = Mailbox.publish

    def noted(mailbox, run, what, payload, others, **how):
        actor = next(actor for actor in pipe.actors if actor.mailbox is mailbox)
        if Action.parse(str(what)).kind is kind:
            state = actor._streams[-1]._steps[run].state
            computes = state.running.get("compute")
            given.append(kind if computes is None else state.part.entries[computes].action.kind)
        publish(mailbox, run, what, payload, others, **how)

    monkeypatch.setattr(Mailbox, "publish", noted)
    with pipeline_with(
        layers, nn.functional.mse_loss, num_microbatches=4, num_workers=2, replicas=2, bucket=5e-5, **options
    ) as pipe:  # fmt: skip
        steps = []
        for _ in range(3):
            given.clear()
            pipe.step(a_batch())
            steps.append(Counter(given))
        return steps


def test_gradients_leave_while_the_last_backward_still_runs(monkeypatch):
    """Two layers of weight and bias: each replica gives half of them."""
    training = Training(partial(torch.optim.SGD, lr=0.1))
    assert pieces_given(monkeypatch, LAYERS, training=training) == [{B: 4}] * 3


def test_sums_leave_while_the_last_backward_still_runs(monkeypatch):
    """They waited for its end, so that what came back to the first stage was never hidden.

    Threads take turns: when the second replica has its last backward, the gradients of the first have come.
    """
    training = Training(partial(torch.optim.SGD, lr=0.1))
    assert pieces_given(monkeypatch, LAYERS, S, training=training) == [{B: 2, S: 2}] * 3


def test_gradients_that_are_added_several_times_are_refused(monkeypatch):
    """A reentrant checkpoint adds the gradient of a weight once for each time that it computes it again."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x

    training = Training(partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(WorkerFailure, match=r"inner.*: its gradient is added several times in a backward"):
        pieces_given(monkeypatch, [nn.Linear(4, 4), Twice()], training=training)


class Routed(nn.Module):
    """Counts which experts are taken, and leans towards those that are taken less, by a bias without a gradient."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("taken", torch.zeros(4, dtype=torch.long), persistent=False)

    def forward(self, x):
        scores = self.router(x).tanh()
        best = (scores + self.bias).argmax(-1)
        if self.training:
            self.taken += best.bincount(minlength=4)
        return x * scores.gather(-1, best[:, None])


def balance(modules):
    for module in modules:
        if isinstance(module, Routed):
            module.bias += 0.3 * (module.taken.float().mean() - module.taken).sign()
            module.taken.zero_()


class RoutedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("options", [{"replicas": 2}, {"schedule": "chimera"}, {}])
@pytest.mark.parametrize("whole", [False, True])
def test_a_buffer_is_summed_over_the_replicas(options, whole):
    """Each replica counted its own rows, so that the biases of their routers went apart."""
    torch.manual_seed(0)
    model = RoutedBlocks() if whole else nn.Sequential(*(Routed() for _ in range(4)))
    plain, sgd = copy.deepcopy(model), partial(torch.optim.SGD, lr=0.1)
    optimizer, options = sgd(plain.parameters()), {"num_workers": 4, "num_microbatches": 4, **options}
    with Pipeline(model, nn.functional.mse_loss, training=Training(sgd), **options) as pipe:
        for x in torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(1)):
            pipe.step((x, x))
            pipe.modify(lambda stage, modules: balance(modules), summed="taken")
            for part in x.split(4):
                (nn.functional.mse_loss(plain(part), part) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            balance(plain.modules())
        for actor in pipe.actors:
            for shard in actor.shards.values():
                for name, tensor in shard.state_dict().items():
                    if name.endswith("bias") and "router" not in name:
                        assert torch.equal(tensor, plain.state_dict()[name]) and tensor.any(), name
        with pytest.raises(ConfigError):
            pipe.modify(lambda stage, modules: None, summed=["taken", "counts"])


def ends_late(seed, **options):
    """Train a stream in which every action begins late, by chance; return losses and weights."""
    batches = [(x, x) for x in torch.randn(4, 7, 4, generator=torch.Generator().manual_seed(1))]
    found = Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=0.5, ema_decay=0.9)
    options = {"num_workers": 4, "num_microbatches": 7, "replicas": 2, "bucket": 50 / 2**20, **options}
    with Pipeline(LAYERS, nn.functional.mse_loss, training=found, **options) as pipe:
        if seed:
            pipe.listen(lambda worker: Late(seed, worker, 0.002))
        losses = list(pipe.train(batches))
        weights = pipe.weights.state_dict()
        with pipe.weights.averaged():
            return [*losses, *(t.tolist() for t in (*weights.values(), *pipe.weights.state_dict().values()))]


@pytest.mark.parametrize(
    ("schedule", "order"), [("1f1b", "ready"), ("zb-v", "fixed"), ("chimera", "ready"), ("pipedream-2bw", "fixed")]
)
def test_random_delays_change_nothing(schedule, order):
    expected = ends_late(0, schedule=schedule)
    for seed in (1, 2):
        assert ends_late(seed, schedule=schedule, order=order, zero=seed % 2) == expected


def test_what_is_typed_wins_and_replicas_stay_when_the_schedule_is_another():
    told = []
    attaching.current = TypedOptions({"schedule": "zb-h1"}, {"replicas": "4"}, told.append, None)
    try:
        options = {"num_workers": 4, "num_microbatches": 8, "replicas": 2}
        with pipeline_with(LAYERS, nn.functional.mse_loss, schedule="gpipe", **options) as pipe:
            assert (pipe.spec.parallelism.replicas, pipe.spec.num_stages) == (4, 1)
    finally:
        attaching.current = attaching.Overrides()
    assert any("replicas=4 replaces the script's replicas=2" in line for line in told)
    assert not any("leaves out" in line for line in told)


def test_workers_that_cannot_be_divided_are_refused_before_anything_starts(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('started')")
    assert main(["run", str(script), "--workers", "5", "--replicas", "2"]) == 2
    assert "--replicas 2: must divide 5 workers" in capsys.readouterr().err
    with refused("replicas"):
        Pipeline(LAYERS, nn.functional.mse_loss, num_workers=3, num_microbatches=4, replicas=2)
