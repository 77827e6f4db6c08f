"""Lists and dicts that a model and its blocks hold, into which blocks put losses of their own, as experts' balance."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from in_turn import floats
from refusals import refused
from test_whole import SGD, made, plain
from torch import Tensor, nn

from rpc_pipe.dependency.errors import WorkerFailure
from rpc_pipe.pipeline import Pipeline, Training


class Expert(nn.Linear):
    """Appends a loss of its own to a list that all have."""

    def __init__(self, held: Any) -> None:
        super().__init__(8, 8)
        self.held = held

    def own_loss(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1).mean(0).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(self.own_loss(x))
        return x + super().forward(x).tanh()


class Experts(nn.Module):
    kind: type[Expert] = Expert

    def __init__(self) -> None:
        super().__init__()
        self.losses: Any = self.empty()
        self.blocks = nn.ModuleList([self.kind(self.losses) for _ in range(4)])

    def empty(self) -> Any:
        return []

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.losses.clear()
        return self.through(x), sum(self.losses)


class EmptiedBehind(Experts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.through(x), torch.stack(self.losses).mean()
        self.losses.clear()
        return x, losses


class NewEachTime(Experts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.losses = []
        for block in self.blocks:
            block.held = self.losses
        return self.through(x), sum(self.losses)


class ByName(Expert):
    def forward(self, x: Tensor) -> Tensor:
        self.held[len(self.held)] = self.own_loss(x)
        return x + self.held[0] * nn.Linear.forward(self, x).tanh()


class Named(Experts):
    kind = ByName

    def empty(self) -> Any:
        return {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.losses.clear()
        return self.through(x), sum(self.losses.values())


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target) + 0.1 * output[1]


@pytest.mark.parametrize(
    ("kind", "schedule", "num_workers"),
    [
        *[(Experts, "1f1b", 2), (Experts, "varuna", 3), (Experts, "zb-h1", 4)],
        *[(EmptiedBehind, "zb-h1", 4), (NewEachTime, "varuna", 3), (Named, "1f1b", 2)],
    ],
)
def test_losses_in_a_list_of_the_model_and_its_blocks_train_as_in_one_process(kind, schedule, num_workers):
    """The list of the blocks that did not run was another one, and the forward seemed to go another way each time."""
    model = made(kind)
    alone, x = copy.deepcopy(model), floats(8, 8)
    pipe = Pipeline(
        model, loss_fn, training=Training(SGD), schedule=schedule, num_workers=num_workers, num_microbatches=4
    )
    pieces = [((piece, piece), {}) for piece in x.chunk(4)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 2, lambda loss: loss, list(alone.parameters()))
    assert [pipe.step((x, x)) for _ in range(2)] == expected
    assert pipe.evaluate((x, x)) < expected[-1]


class Counting(Expert):
    def forward(self, x: Tensor) -> Tensor:
        self.held.append((self.own_loss(x), float(x.detach().sum())))
        return x + super(Expert, self).forward(x).tanh()


class Weighed(Experts):
    """A number beside each tensor, which does not travel."""

    kind = Counting

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.losses.clear()
        return self.through(x), sum(loss * number for loss, number in self.losses)


class Growing(Experts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.through(x), sum(self.losses[-4:])


@pytest.mark.parametrize("kind", [Weighed, Growing])
def test_what_is_beside_the_tensors_in_a_list_must_be_as_it_was_observed(kind):
    """Other stages went by the numbers that were observed, silently."""
    pipe = Pipeline(made(kind), loss_fn, training=Training(SGD), num_workers=2, num_microbatches=4)
    with refused("model", WorkerFailure):
        pipe.step((floats(8, 8), floats(8, 8)))


class Noisy(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super(Expert, self).forward(x) * torch.rand(x.shape, generator=self.held)


class AllNoisy(Experts):
    kind = Noisy

    def empty(self) -> Any:
        return torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)


@pytest.mark.parametrize("whole", [True, False])
def test_a_generator_of_layers_of_several_stages_is_refused(whole):
    """Each process draws from a copy, and threads draw in the order of their timing: losses differed in each run."""
    model = AllNoisy()
    for num_workers in (1, 2):
        pipe = Pipeline(
            model if whole else list(model.blocks), nn.functional.mse_loss, training=Training(SGD),
            num_workers=num_workers, num_microbatches=2,
        )  # fmt: skip
        if num_workers == 1:
            assert pipe.step((floats(4, 8), floats(4, 8))) > 0
            continue
        with refused("model", WorkerFailure):
            pipe.step((floats(4, 8), floats(4, 8)))
