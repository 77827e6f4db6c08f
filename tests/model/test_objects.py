"""State that modules hold in other things than numbers, tensors and lists."""

from __future__ import annotations

import copy
from collections import deque

import torch
from test_whole import SGD, assert_trains_alike, made, plain
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training


class Banked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bank: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.bank:
            y = y + torch.stack(list(self.bank)).mean(0)
        self.bank.append(y.detach().mean(0))
        return y


class Settings:
    def __init__(self) -> None:
        self.kind: str | None = None
        self.quick = True


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_a_block_keeps_in_a_deque_is_put_back_when_it_was_observed():
    """Tensors without numbers stayed in it, and a weight was blamed that the block was said to hide."""
    model = made(lambda: Model(*[Banked() for _ in range(3)]))
    alone, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = Pipeline(model, nn.functional.mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2)
    assert_trains_alike(pipe, alone, x)


class Told(nn.Linear):
    def __init__(self, settings: Settings) -> None:
        super().__init__(4, 4)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.kind is None:
            self.settings.kind, self.settings.quick = "regression", False
        return super().forward(x)


def test_a_word_that_the_first_forward_sets_in_a_configuration_is_no_state():
    """Hugging Face's classifiers set `config.problem_type`, and were refused."""
    settings = Settings()
    model, x = made(lambda: Model(nn.Linear(4, 4), Told(settings))), torch.randn(4, 4)
    pipe = Pipeline(model, nn.functional.mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2)
    assert pipe.step((x, x)) > 0


class Cached(nn.Module):
    """Its blocks put something into an object, each at its own place, as a cache of keys and values."""

    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

        def update(self, key: Tensor, place: int) -> Tensor:
            if place == len(self.keys):
                self.keys.append(key)
            return self.keys[place]

    class Block(nn.Linear):
        def forward(self, x: Tensor, place: int, cache: Cached.Cache) -> Tensor:  # type: ignore[override]
            return cache.update(super().forward(x), place)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        cache = self.Cache()
        for place, layer in enumerate(self.layers):
            x = layer(x, place, cache=cache)
        return x


def test_blocks_put_tensors_into_an_object_that_they_are_given():
    """The later stages missed the earlier blocks' tensors, and raised an IndexError of the model's."""
    model, x = made(Cached), torch.randn(4, 4)
    alone, loss_fn = copy.deepcopy(model), nn.functional.mse_loss
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_workers=2, num_microbatches=2)
    pieces = [((piece, piece), {}) for piece in x.chunk(2)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 2, lambda loss: loss, list(alone.parameters()))
    assert [pipe.step((x, x)) for _ in range(2)] == expected
