"""The models of `rpc-pipe verify gpt`, `conv` and `mlp`: small, with dropout and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..demo.gpt import gpt_layers, next_byte_loss
from ..demo.settings import GPTConfig
from .verify_options import CONTEXT

Layers = Sequence[Callable[[], nn.Module]]
Batch = tuple[Tensor, Tensor]


Loss = Callable[[Tensor, Tensor], Tensor]
#: makes a batch of a number of rows
Rows = Callable[[torch.Generator, int], Batch]


def built_in(name: str, dropout: float, num_stages: int) -> tuple[Layers, Loss, Rows]:
    """Return the layers of `gpt`, `conv` or `mlp`, enough for `num_stages`, the loss, and the maker of data."""
    if name == "gpt":
        config = GPTConfig(width=32, depth=max(4, num_stages - 2), heads=2, context=CONTEXT, dropout=dropout)
        return gpt_layers(config), next_byte_loss, _bytes
    if name == "conv":
        return _conv_layers(max(4, num_stages - 1), dropout), functional.cross_entropy, _images
    return _mlp_layers(max(4, num_stages), dropout), functional.mse_loss, _vectors


def _bytes(generator: torch.Generator, rows: int) -> Batch:
    samples = torch.randint(256, (rows, CONTEXT + 1), generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _images(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(10, (rows,), generator=generator)


def _vectors(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 16, generator=generator)


def _conv_layers(blocks: int, dropout: float) -> Layers:
    def block(channels_in: int, stride: int) -> nn.Module:
        conv = nn.Conv2d(channels_in, 8, 3, stride=stride, padding=1)
        return nn.Sequential(conv, nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(dropout))

    def head() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    return [partial(block, 3, 2), *(partial(block, 8, 1) for _ in range(blocks - 1)), head]


def _mlp_layers(count: int, dropout: float) -> Layers:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout))

    return [layer] * (count - 1) + [partial(nn.Linear, 16, 16)]
