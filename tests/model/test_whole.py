"""Models as they are through the face: every number is that of plain training in one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import unsplit_models as models
from alone import SGD, assert_same_state, lm_batch, made, plain, whole_loss
from in_turn import CASES, floats
from refusals import refused
from torch import Tensor, nn

from rpc_pipe.pipeline import Pipeline, Training

#: their gradients are summed in another order: by stage first
SUMMED_BY_STAGE = {
    "tied",
    "mask of ones",
    "no mask",
    "encoder and decoder",
    "shared bias",
    "repeated block",
    "nested lists",
}


def as_pipeline_takes_it(args: Any, kwargs: Any, model: nn.Module) -> Any:
    return tuple(args) if not kwargs else dict(zip(list(vars_of(model)), args, strict=False)) | kwargs


def vars_of(model: nn.Module) -> tuple[str, ...]:
    code = model.forward.__func__.__code__  # type: ignore[union-attr]
    return code.co_varnames[1 : code.co_argcount]


def assert_trains_alike(pipe: Pipeline, alone: nn.Module, x: torch.Tensor) -> None:
    """Train two steps of two microbatches towards `x` itself, by both; losses and state are equal."""
    pieces = [(pair, {}) for pair in zip(x.chunk(2), x.chunk(2), strict=True)]

    def loss(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(alone(inputs), target)

    found = [pipe.step((x, x)) for _ in range(2)]
    assert found == plain(loss, [pieces] * 2, lambda loss: loss, list(alone.parameters()))  # type: ignore[arg-type]
    assert_same_state(pipe, alone)


OTHERS = [("zb-h1", "tied"), ("chimera", "tied"), ("zb-h1", "skips"), ("zb-h1", "experts, by a hook")]
OTHERS += [("gpipe-recompute", "images"), ("gpipe-recompute", "repeated block")]


@pytest.mark.parametrize(("schedule", "case"), [*(("1f1b", case) for case in CASES if case != "sequence"), *OTHERS])
def test_any_model_trains_as_in_one_process(schedule, case):
    make, args, kwargs = CASES[case]
    model = made(make)
    expected = copy.deepcopy(model)
    workers = 2 if schedule == "chimera" else 3
    pipe = Pipeline(
        model, whole_loss, training=Training(SGD), schedule=schedule, num_workers=workers, num_microbatches=2
    )
    pieces = [(tuple(args), kwargs)] * 2
    losses = [pipe.step(microbatches=[as_pipeline_takes_it(args, kwargs, model)] * 2) for _ in range(2)]
    expected_losses = plain(expected, [pieces] * 2)
    exactly = case not in SUMMED_BY_STAGE
    assert losses == expected_losses if exactly else losses == pytest.approx(expected_losses, rel=1e-6)
    assert_same_state(pipe, expected, exactly=exactly)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_shared_parameters_are_counted_once_in_the_norm(num_workers):
    model = made(models.Tied)
    expected, batch = copy.deepcopy(model), lm_batch()
    pipe = Pipeline(model, training=Training(SGD, max_grad_norm=0.01), num_workers=num_workers, num_microbatches=1)
    expected(**batch)["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01).item()
    SGD(expected.parameters()).step()
    pipe.step(batch)
    assert pipe.grad_norm == norm
    assert_same_state(pipe, expected)


def test_a_function_that_makes_the_model_gives_the_same_weights_in_any_cut():
    states = []
    for num_workers in (1, 3):
        pipe = Pipeline(models.Tied, training=Training(SGD), num_workers=num_workers, num_microbatches=1, seed=3)
        pipe.step(lm_batch())
        states.append(pipe.weights.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_dropout_does_not_depend_on_the_cut():
    losses = []
    for num_workers in (1, 3):
        pipe = Pipeline(
            partial(models.Tied, dropout=0.3),
            training=Training(SGD),
            num_workers=num_workers,
            num_microbatches=2,
            seed=3,
        )
        losses.append([pipe.step(lm_batch()) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] == losses[1][0]


class Counting(nn.Module):
    """Blocks that count their calls in attributes, and remember an output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) * (1 + self.calls % 3) - getattr(self, "last", 0)
            self.calls, self.last = self.calls + 1, y.detach()[0] / 2
            return y

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "varuna", "zb-h1"])
def test_what_blocks_count_is_counted_once(schedule):
    """Forwards on shapes, by which the model is cut, were counted too: other numbers from the first step on."""
    model = made(Counting)
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 4, 3, 4)
    pipe = Pipeline(
        model, nn.functional.mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2, schedule=schedule
    )
    losses = [pipe.step((x, y)) for _ in range(3)]
    pieces = [((inputs, target), {}) for inputs, target in zip(x.chunk(2), y.chunk(2), strict=True)]

    def loss(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), target)

    assert losses == plain(lambda *args: loss(alone, *args), [pieces] * 3, lambda loss: loss, list(alone.parameters()))
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in pipe.weights.state_dict().items())


class Asking(nn.Module):
    """Blocks that ask for a gradient in their forward."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.requires_grad_()
            y = super().forward(x).tanh()
            return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class AskingTorchFunc(Asking):
    """The same by `torch.func`, which bears no hooks of what is saved; and looks at data beside the blocks."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.grad(lambda row: super(type(self), self).forward(row).tanh().sum()))(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + x.data.sort(1).values
        return x


@pytest.mark.parametrize("make", [Asking, AskingTorchFunc])
def test_what_asks_for_gradients_is_recomputed_too(make):
    """What it saved on shapes was dropped, as if it were to be computed again: a _NeededError of ours."""
    x, y = torch.randn(2, 4, 3, 4)
    losses = []
    for schedule in ("1f1b", "varuna"):
        pipe = Pipeline(
            made(make),
            nn.functional.mse_loss,
            training=Training(SGD),
            num_microbatches=2,
            num_workers=2,
            schedule=schedule,
        )
        losses.append([pipe.step((x, y)) for _ in range(2)])
    assert losses[0] == losses[1]


class Hooked(models.Nested):
    """What hangs on parameters: a hook of a gradient, one of its sum, and an attribute by which groups are made."""

    def __init__(self, of_sum: bool) -> None:
        super().__init__()
        self.stem.weight.no_decay = True
        self.stages[0][0].up.weight.register_hook(lambda grad: grad / 2)
        if of_sum:  # of two replicas, each has a sum of its own
            self.stages[2][1].up.bias.register_post_accumulate_grad_hook(self._halve)

    def _halve(self, parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_what_hangs_on_parameters_hangs_on_copies_too(schedule):
    """Hooks and attributes of parameters that a function made, or a second replica copied, were lost in silence."""
    x, marked, make = floats(4, 6), [], partial(Hooked, schedule == "1f1b")

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        marked.extend(name for name, parameter in named if getattr(parameter, "no_decay", False))
        return SGD(named)

    pipe = Pipeline(
        make,
        whole_loss,
        training=Training(optimizer),
        schedule=schedule,
        num_workers=2,
        num_microbatches=2,
        example=(x,),
    )
    assert set(marked) == {"stem.weight"}
    expected = make()
    expected.load_state_dict(pipe.weights.state_dict())
    losses = [pipe.step((x,)) for _ in range(2)]
    assert losses == pytest.approx(plain(expected, [[((half,), {}) for half in x.tensor_split(2)]] * 2), rel=1e-6)
    assert_same_state(pipe, expected, exactly=False)


def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused():
    model = models.Tied()
    model.embed.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    with refused("model"):
        Pipeline(model, training=Training(SGD), num_workers=3, num_microbatches=2, example=lm_batch())
    Pipeline(model, training=Training(SGD), num_workers=1, num_microbatches=2, example=lm_batch())


@pytest.mark.parametrize("case", ["no mask", "images"])
def test_a_model_may_be_cut_by_an_evaluation_in_inference_mode(case):
    """Copies of tied parameters and buffers were made in that mode too, and could not be trained afterwards."""
    make, args, kwargs = CASES[case]
    model = made(make)
    expected = copy.deepcopy(model)
    pipe = Pipeline(model, whole_loss, training=Training(SGD), num_workers=3, num_microbatches=2)
    batches = [as_pipeline_takes_it(args, kwargs, model)] * 2
    with torch.inference_mode():
        pipe.evaluate(microbatches=batches, metric=lambda output, batch: 0.0)
    losses = [pipe.step(microbatches=batches) for _ in range(2)]
    assert losses == pytest.approx(plain(expected, [[(tuple(args), kwargs)] * 2] * 2), rel=1e-6)
    assert_same_state(pipe, expected, exactly=case not in SUMMED_BY_STAGE)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("schedule", ["pipedream", "avgpipe"])
def test_several_versions_of_the_weights_are_those_of_a_list_of_layers(schedule: str) -> None:
    """The first forward is observed while modules hold a version, and put the newest weights in its place."""
    model = made(Chain)
    batches = [(floats(6, 4), floats(6, 4)) for _ in range(6)]
    losses = []
    for cut in (copy.deepcopy(model), nn.Sequential(*copy.deepcopy(model).blocks)):
        options: dict[str, Any] = dict(training=Training(SGD), schedule=schedule, num_microbatches=3, num_workers=3)
        with Pipeline(cut, nn.functional.mse_loss, **options) as pipe:
            losses.append(list(pipe.train(iter(batches))))
    assert losses[0] == losses[1]
