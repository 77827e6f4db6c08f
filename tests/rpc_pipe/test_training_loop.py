"""What real training loops do, compared with the same loop in one process of plain PyTorch."""

import copy
import random
from functools import partial

import numpy
import pytest
import torch
from refusals import failed, refused
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_options import pipeline_with

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import BatchError, ConfigError, NotFinite, WorkerFailure

MICROBATCHES = 4
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(7)]


class Overflowing(nn.Module):
    """Its backward overflows in some calls of it, as float16 does with too large a scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            self.calls += 1
            if self.calls in (6, 7, 22):
                y.register_hook(lambda grad: grad * float("inf"))
        return y.tanh()


def layers(overflowing=False):
    torch.manual_seed(1)
    middle = Overflowing() if overflowing else nn.Linear(16, 16)
    return [nn.Linear(8, 16), nn.Tanh(), middle, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]


def mse_sum(output, target):
    """A sum and a weight that differ between microbatches, as those of padded tokens do."""
    rows = target[:, 0] > -0.5
    return nn.functional.mse_loss(output[rows], target[rows], reduction="sum"), rows.sum()


ADAM = partial(torch.optim.AdamW, lr=1e-2)
SCHEDULES = pytest.mark.parametrize("schedule, num_workers", [("1f1b", 3), ("zb-h1", 2), ("interleaved", 3)])


def pipeline(schedule, num_workers, *, loss_fn=nn.functional.mse_loss, **options):
    options = {"optimizer": ADAM, "lr_scheduler": partial(StepLR, step_size=2, gamma=0.5)} | options
    return pipeline_with(
        layers("grad_scaler" in options),
        loss_fn,
        num_workers=num_workers,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        **options,
    )


def plainly(*, accumulate=1, loss_fn=nn.functional.mse_loss, scaler=None, max_grad_norm=None, decay=None, dtype=None):
    """Train in one process as the documentation of torch does; return losses, model, average and the scales."""
    model = nn.Sequential(*layers(scaler is not None))
    optimizer = ADAM(model.parameters())
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    losses, scales, weight = [], [], 0
    for step, (x, target) in enumerate(BATCHES):
        total, of_step = 0.0, 0
        for a, b in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_fn(model(a), b)
            summed = isinstance(loss, tuple)
            loss, count = loss if summed else (loss * (len(a) / len(x)), 0)
            total += loss.item()
            of_step += count
            scaler.scale(loss / accumulate if accumulate > 1 and not summed else loss).backward()
        weight += of_step
        losses.append(total / float(of_step) if of_step else total)
        if (step + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            if weight:
                for parameter in model.parameters():
                    parameter.grad.div_(float(weight))
            if max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
                if average is not None:
                    average.update_parameters(model)
            optimizer.zero_grad()
            weight = 0
        scales.append(scaler.get_scale())
    return losses, model, average, scales


def equal(found, model):
    return all(found[name].equal(tensor) for name, tensor in model.state_dict().items())


@SCHEDULES
@pytest.mark.parametrize(("loss_fn", "max_grad_norm"), [(nn.functional.mse_loss, 0.05), (mse_sum, None)])
def test_several_steps_make_one_update(schedule, num_workers, loss_fn, max_grad_norm):
    expected, model, _, _ = plainly(accumulate=2, loss_fn=loss_fn, max_grad_norm=max_grad_norm)
    options = {"accumulate": 2, "loss_fn": loss_fn, "max_grad_norm": max_grad_norm}
    pipe = pipeline(schedule, num_workers, **options)
    assert [pipe.step(batch) for batch in BATCHES] == expected
    assert equal(pipe.weights.state_dict(), model)
    pipe = pipeline(schedule, num_workers, **options)
    assert list(pipe.train(BATCHES)) == expected
    assert equal(pipe.weights.state_dict(), model)


def test_what_a_failed_or_abandoned_step_has_added_is_taken_back():
    expected, model, _, _ = plainly(accumulate=3)
    pipe = pipeline("1f1b", 3, accumulate=3)
    found = [pipe.step(BATCHES[0])]
    with failed(RuntimeError):
        pipe.step((torch.randn(8, 5), BATCHES[0][1]))
    for loss in pipe.train(BATCHES[1:]):  # left when the next step has begun
        found.append(loss)
        if len(found) == 4:
            break
    found += [pipe.step(batch) for batch in BATCHES[4:]]
    assert found == expected
    assert equal(pipe.weights.state_dict(), model)


@SCHEDULES
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_one_decision_of_all_stages_scales_the_loss(schedule, num_workers, max_grad_norm):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    expected, model, _, scales = plainly(scaler=scaler(), max_grad_norm=max_grad_norm)
    assert min(scales) < max(scales)
    pipe = pipeline(schedule, num_workers, grad_scaler=scaler(), max_grad_norm=max_grad_norm)
    found = [(pipe.step(batch), pipe.loss_scale) for batch in BATCHES]
    assert found == list(zip(expected, scales, strict=True))
    assert equal(pipe.weights.state_dict(), model)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaler_goes_on_behind_a_forward_that_overflows(monkeypatch, accumulate, streamed):
    """The loss was not finite, and the run ended "with weights that are spoilt by it": the scaler had left the update
    out, as it is there for."""
    batches = [(x * (float("inf") if step == 2 else 1), target) for step, (x, target) in enumerate(BATCHES)]
    monkeypatch.setattr(f"{__name__}.BATCHES", batches)
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**12)
    expected, model, _, scales = plainly(scaler=scaler(), accumulate=accumulate)
    pipe = pipeline("1f1b", 3, grad_scaler=scaler(), accumulate=accumulate)
    found = list(pipe.train(BATCHES) if streamed else map(pipe.step, BATCHES))
    assert repr(found) == repr(expected) and "nan" in repr(found)
    assert equal(pipe.weights.state_dict(), model) and pipe.loss_scale == scales[-1] < 2.0**12


def test_a_scaler_that_leaves_out_every_update_ends_the_run():
    """It went on for ever, with a scale of 0."""
    pipe = pipeline("1f1b", 2, grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**-148))
    batch = BATCHES[0][0] * float("nan"), BATCHES[0][1]
    pipe.step(batch)
    with pytest.raises(NotFinite):
        pipe.step(batch)


def test_the_scale_of_a_loss_behind_frozen_layers(tmp_path):
    """Their stages have no optimizer, and the last of them computes the loss, also of a run that goes on."""

    def pipe(num_workers, layers):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return Pipeline(
            layers, nn.functional.mse_loss, training=Training(ADAM, grad_scaler=scaler), num_workers=num_workers,
            num_microbatches=MICROBATCHES,
        )  # fmt: skip

    def frozen():
        return [layer.requires_grad_(place == 2) for place, layer in enumerate(layers())]

    alone = pipe(1, frozen())
    expected = [(alone.step(batch), alone.loss_scale) for batch in BATCHES]
    first = pipe(3, frozen())
    found = [(first.step(batch), first.loss_scale) for batch in BATCHES[:5]]
    first.checkpoints.save(tmp_path)
    second = pipe(2, frozen())
    second.checkpoints.load(tmp_path)
    assert found + [(second.step(batch), second.loss_scale) for batch in BATCHES[5:]] == expected
    last = alone.weights.state_dict()
    assert all(tensor.equal(last[name]) for name, tensor in second.weights.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_in_one_process(dtype):
    """Autocast keeps its casts of weights for as long as the context is open: as here, for each microbatch."""
    expected, model, _, _ = plainly(dtype=dtype)
    pipe = pipeline("1f1b", 3)
    found = []
    for batch in BATCHES:
        with torch.autocast("cpu", dtype):
            found.append(pipe.step(batch))
    assert found == pytest.approx(expected, rel=1e-2)
    assert all(
        torch.allclose(pipe.weights.state_dict()[name], tensor, atol=2e-2)
        for name, tensor in model.state_dict().items()
    )


@SCHEDULES
def test_an_average_of_the_weights_evaluates_and_is_saved(schedule, num_workers):
    _, model, average, _ = plainly(decay=0.7)
    pipe = pipeline(schedule, num_workers, ema_decay=0.7)
    for _ in pipe.train(BATCHES):
        pass
    with pipe.weights.averaged():
        assert equal(pipe.weights.state_dict(), average.module)
        averaged = pipe.evaluate(BATCHES[0])
    assert equal(pipe.weights.state_dict(), model)
    assert pipe.evaluate(BATCHES[0]) != averaged
    with refused("averaged"), pipeline("1f1b", 1).weights.averaged():
        pass


@pytest.mark.parametrize("whole", [False, True])
def test_running_statistics_of_whole_batches(whole):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    reference = Model()
    model = Model() if whole else [part for block in Model().blocks for part in block]
    pipe = Pipeline(
        model, lambda output, batch: output.square().mean(), num_workers=3, num_microbatches=4,
        training=Training(deferred_batch_norm=True), schedule="1f1b",
    )  # fmt: skip
    for x, _ in BATCHES[:3]:
        pipe.step((x, x))
        with torch.no_grad():
            first = reference.blocks[0](x)
    found = [name for name in pipe.weights.state_dict() if name.endswith("running_mean")]
    assert len(found) == 3 and not [name for name in pipe.weights.state_dict() if "sums" in name or "count" in name]
    state = pipe.weights.state_dict()
    norm = reference.blocks[0][1]
    torch.testing.assert_close(state[found[0]], norm.running_mean)
    torch.testing.assert_close(state[found[0].replace("mean", "var")], norm.running_var)
    assert int(state[found[0].replace("running_mean", "num_batches_tracked")]) == 3
    assert first is not None


class NormedAndActivated(nn.BatchNorm1d):
    """Has its own forward, as those of timm have."""

    def forward(self, input):
        return super().forward(input=input).relu()


@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_norm_with_a_forward_of_its_own_keeps_it_when_deferred(whole):
    """The forward was replaced by that of a plain batch normalisation: no ReLU, and another loss."""
    torch.manual_seed(2)
    reference = nn.Sequential(nn.Linear(8, 8), NormedAndActivated(8), nn.Linear(8, 8))
    model = Chain(copy.deepcopy(reference)) if whole else [*copy.deepcopy(reference)]
    x = BATCHES[0][0]
    with Pipeline(
        model, nn.functional.mse_loss, num_workers=2, num_microbatches=1, example=(x, x),
        training=Training(deferred_batch_norm=True),
    ) as pipe:  # fmt: skip
        assert pipe.step((x, x)) == nn.functional.mse_loss(reference(x), x).item()
        means = [tensor for name, tensor in pipe.weights.state_dict().items() if "running_mean" in name]
    torch.testing.assert_close(means, [reference[1].running_mean])


class WritesItself(nn.BatchNorm1d):
    def forward(self, input):
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, training=self.training)


def test_a_batch_norm_that_writes_its_statistics_itself_is_not_deferred():
    options = {"num_workers": 1, "num_microbatches": 2, "training": Training(deferred_batch_norm=True)}
    with refused("deferred_batch_norm"), Pipeline([WritesItself(8)], nn.functional.mse_loss, **options) as pipe:
        pipe.step(BATCHES[0])


class Chain(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("accumulate", [1, 2])
def test_running_statistics_where_a_stream_is_seen_left_and_taken_up(tmp_path, accumulate):
    """The next step's forwards have begun then; updates have written the statistics in between."""

    def pipe(num_workers):
        torch.manual_seed(2)
        blocks = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
        return Pipeline(
            [*blocks, nn.Linear(8, 4)],
            nn.functional.mse_loss,
            training=Training(ADAM, deferred_batch_norm=True, accumulate=accumulate),
            num_workers=num_workers,
            num_microbatches=4,
        )

    def seen(pipe):
        return pipe.evaluate(BATCHES[0]), {name: tensor.tolist() for name, tensor in pipe.weights.state_dict().items()}

    one = pipe(2)
    expected = [(one.step(batch), seen(one)) for batch in BATCHES]
    two, found = pipe(2), []
    for loss in two.train(BATCHES):
        found.append((loss, seen(two)))
        if len(found) == 3:
            break
    with failed(RuntimeError):
        two.step((torch.randn(8, 5), BATCHES[0][1]))
    found += [(two.step(batch), seen(two)) for batch in BATCHES[3:5]]
    two.checkpoints.save(tmp_path)
    three = pipe(3)
    three.checkpoints.load(tmp_path)
    assert found + [(three.step(batch), seen(three)) for batch in BATCHES[5:]] == expected


def test_everything_of_a_loop_is_in_its_checkpoint(tmp_path):
    options = {
        "accumulate": 2, "ema_decay": 0.7, "max_grad_norm": 0.05, "loss_fn": mse_sum,
        "grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2),
    }  # fmt: skip
    pipe = pipeline("1f1b", 3, **options)
    for batch in BATCHES[:3]:  # one step after an update
        pipe.step(batch)
    pipe.checkpoints.save(tmp_path)
    other = pipeline("zb-h1", 2, **options)
    other.checkpoints.load(tmp_path)
    for shard in (shard for actor in other.actors for shard in actor.shards.values()):
        for module in shard.slice.own:
            if isinstance(module, Overflowing):  # an attribute, which no checkpoint has
                module.calls = 3 * MICROBATCHES
    assert other.loss_scale == pipe.loss_scale
    assert [other.step(batch) for batch in BATCHES[3:]] == [pipe.step(batch) for batch in BATCHES[3:]]
    for found, expected in zip(other.weights.state_dict().values(), pipe.weights.state_dict().values(), strict=True):
        assert found.equal(expected)
    with other.weights.averaged(), pipe.weights.averaged():
        averages = other.weights.state_dict(), pipe.weights.state_dict()
        assert all(found.equal(expected) for found, expected in zip(*(each.values() for each in averages), strict=True))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"accumulate": 0}, "accumulate"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"grad_scaler": 1024}, "grad_scaler"),
        ({"accumulate": 2, "schedule": "pipedream"}, "accumulate"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with refused(says):
        pipeline(**{"schedule": "1f1b", "num_workers": 2, **options})


def test_stages_do_not_share_a_rate_that_schedulers_write():
    """A rate that is a tensor was one for all stages of a process, and decayed once for each of them."""
    optimizer = partial(torch.optim.SGD, lr=torch.tensor(0.1))
    pipe = pipeline("1f1b", 3, optimizer=optimizer, lr_scheduler=partial(StepLR, step_size=1, gamma=0.5))
    for batch in BATCHES[:2]:
        pipe.step(batch)
    rates = [shard.optimizer.param_groups[0]["lr"] for actor in pipe.actors for shard in actor.shards.values()]
    assert rates == [pytest.approx(0.025)] * 3


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_loss_that_draws_in_python_draws_the_same_anywhere_and_anew_in_each_step(draw):
    """It drew the same numbers in every step, as a call leaves the generators as they were, and replicas drew alike."""

    def noisy(output, target):
        return nn.functional.mse_loss(output, target) * 0 + output.sum() * 0 + draw()

    def losses(schedule, num_workers):
        pipe = pipeline(schedule, num_workers, loss_fn=noisy)
        return [pipe.step(BATCHES[0]) for _ in range(3)] + [pipe.evaluate(BATCHES[0])]

    alone = losses("1f1b", 1)
    assert len(set(alone)) == 4
    assert losses("gpipe-recompute", 2) == losses("chimera", 2) == alone


@pytest.mark.parametrize("schedule, tied", [("chimera", False), ("1f1b", True)])
def test_a_checkpoint_between_two_updates_has_every_part_of_a_gradient(tmp_path, schedule, tied):
    """It had that of the first replica, or of the first stage with a tied weight, and all went on from it."""

    def made():
        made = layers()
        if tied:
            made[3].weight = made[2].weight
        return Pipeline(
            made,
            nn.functional.mse_loss,
            training=Training(ADAM, accumulate=3),
            schedule=schedule,
            num_workers=2,
            num_microbatches=4,
        )

    pipe, again = made(), made()
    for batch in BATCHES[:2]:
        pipe.step(batch)
    again.checkpoints.load(pipe.checkpoints.save(tmp_path))
    for batch in BATCHES[2:5]:
        assert again.step(batch) == pytest.approx(pipe.step(batch), rel=1e-6)


def test_training_and_checkpoints_are_refused_where_weights_are_averages(tmp_path):
    """A checkpoint had the average for the weights and the weights for their average."""
    pipe = pipeline("1f1b", 2, ema_decay=0.5)
    pipe.step(BATCHES[0])
    calls = {
        "step": lambda: pipe.step(BATCHES[0]),
        "checkpoints.save": lambda: pipe.checkpoints.save(tmp_path),
        "averaged": pipe.weights.averaged().__enter__,
    }
    with pipe.weights.averaged():
        for name, call in calls.items():
            with refused(name):
                call()
    calls["checkpoints.save"]()


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_gradients_that_no_optimizer_takes_add_up_as_in_one_process(schedule):
    """Each replica added to the sum of all: the norm of what is not trained doubled in every step."""

    def weights_alone(named):
        return torch.optim.SGD([parameter for name, parameter in named if "weight" in name], lr=0.1)

    model = nn.Sequential(*layers())
    optimizer = weights_alone(model.named_parameters())
    options = {"optimizer": weights_alone, "lr_scheduler": None, "max_grad_norm": 0.5, "untrained": ["*.bias"]}
    pipe = pipeline(schedule, 2, **options)
    for inputs, targets in BATCHES[:4]:
        nn.functional.mse_loss(model(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        pipe.step((inputs, targets))
        assert pipe.grad_norm == pytest.approx(norm, rel=1e-5)


def test_an_optimizer_is_not_given_what_is_to_stay_untrained():
    """`untrained=` only told the check: an optimizer of all that it is given trained them nevertheless."""
    with pipeline("1f1b", 2, untrained=["0.*", "2.*", "*.bias"]) as pipe:  # nothing is left to the first stage
        before = {name: tensor.clone() for name, tensor in pipe.weights.state_dict().items()}
        pipe.step(BATCHES[0])
        trained = {name for name, tensor in pipe.weights.state_dict().items() if not torch.equal(tensor, before[name])}
    assert trained == {"3.weight", "5.weight"}


def test_parameters_that_no_optimizer_has_are_refused_by_name_in_the_first_step():
    """Forgotten biases stayed as they were, silently, though guarantees.md said that they are refused."""

    def weights_alone(named):
        return torch.optim.SGD([p for name, p in named if name.endswith("weight")], lr=0.1)

    for zero, replicas in (0, 1), (1, 2):
        with refused("parameter", WorkerFailure) as raised:
            pipeline("1f1b", 2 * replicas, optimizer=weights_alone, zero=zero, replicas=replicas).step(BATCHES[0])
        assert isinstance(raised.value.__cause__, ConfigError)
    model = nn.Sequential(*layers())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    training = Training(optimizer=weights_alone)
    with Pipeline(model, nn.functional.mse_loss, training=training, num_workers=2, num_microbatches=4) as pipe:
        pipe.step(BATCHES[0])
        trained = {p for optimizer in pipe.optimizers for group in optimizer.param_groups for p in group["params"]}
        assert len(pipe.optimizers) == 2 and trained == {p for p in model.parameters() if p.requires_grad}
        falls = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) for optimizer in pipe.optimizers]
        for rate in (0.1, 0.01):
            for fall in falls:  # as was documented, where `pipe.optimizers` was a dict of lists
                fall.step(1.0)
            assert pipe.learning_rate == pytest.approx(rate)
        assert [each for (each,) in pipe.optimizers.values()] == pipe.optimizers, "as scripts of version 0.1 walk them"


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, mse_sum])
def test_the_loss_of_a_loader_is_that_of_all_its_rows(loss_fn):
    """A loader was refused as a batch, and a mean of means is wrong where the last batch is smaller."""
    inputs, targets = map(torch.cat, zip(*BATCHES[:3], strict=True))
    data = torch.utils.data.TensorDataset(inputs[:21], targets[:21])
    pipe = pipeline("1f1b", 2, loss_fn=loss_fn)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    assert pipe.evaluate(loader) == pytest.approx(pipe.evaluate((inputs[:21], targets[:21])), rel=1e-5)
    with pytest.raises(BatchError):
        pipe.evaluate(iter(()))
