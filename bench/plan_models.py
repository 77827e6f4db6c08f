"""Models for `bench.plan`, as a user would hand them to `rpc-pipe plan`: functions that return model, batch, loss_fn.

Those whose layers sleep emulate devices, which take as long as they are told whatever else runs; SLOW in the
environment lists how many times as long each worker takes.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import Model, bert, bytewise_gpt, resnet

_MICROBATCHES = 8


def _joined(model: Model) -> tuple[Any, Any, Any]:
    """Return a model of the benchmark with its microbatches as one batch."""
    parts = model.batch(0)
    batch = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    return [partial(model._build, i) for i in range(len(model.layers))], batch, model.loss


def make_bert() -> tuple[Any, Any, Any]:
    """BERT-like: 16 rows of 128 tokens."""
    return _joined(bert(_MICROBATCHES))


def make_resnet() -> tuple[Any, Any, Any]:
    """ResNet-50-like: 32 images."""
    return _joined(resnet(_MICROBATCHES))


def make_bytewise_gpt() -> tuple[Any, Any, Any]:
    """A small GPT over bytes: 32 rows of 128."""
    return _joined(bytewise_gpt(_MICROBATCHES))


class _Block(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)


class GPT(nn.Module):
    """A decoder whose vocabulary is most of it: the first and the last stage are heavy for different reasons."""

    def __init__(self, vocabulary: int = 16384, width: int = 192, depth: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT with a large vocabulary: 16 rows of 64 tokens."""
    torch.manual_seed(0)
    ids = torch.randint(16384, (16, 64))
    return GPT(), {"ids": ids, "labels": ids}


class T5(nn.Module):
    """An encoder, and a decoder each of whose blocks reads what the encoder has made."""

    def __init__(self, vocabulary: int = 4096, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(_Block(width) for _ in range(depth))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.tokens(ids), self.tokens(labels)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """T5-like: 16 rows of 96 tokens to 64."""
    torch.manual_seed(0)
    return T5(), {"ids": torch.randint(4096, (16, 96)), "labels": torch.randint(4096, (16, 64))}


# --- emulated devices


class _Path(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Device(nn.Module):
    """A layer whose forward, backward for inputs and backward for weights sleep as long."""

    def __init__(self, ms: float, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._seconds = ms / 1e3

    def forward(self, x: Tensor) -> Tensor:
        slow = os.environ.get("SLOW", "1").split(",")
        seconds = self._seconds * float(slow[int(os.environ.get("RANK", "0")) % len(slow)])
        out: Tensor = _Path.apply(x, seconds, seconds) + _Path.apply(self.weight, 0.0, seconds)  # type: ignore[no-untyped-call]
        return out


def _sleeping(seed: int, num_blocks: int, width: int = 64) -> tuple[Any, Any, Any]:
    draw = random.Random(seed)
    layers = [partial(Device, draw.choice((5.0, 8.0, 12.0, 20.0)), width) for _ in range(num_blocks)]
    return layers, (torch.randn(16, width), torch.randn(16, width)), nn.functional.mse_loss


make_even = partial(_sleeping, 0, 8)
make_uneven = partial(_sleeping, 5, 9)
make_many = partial(_sleeping, 4, 8)
make_seven = partial(_sleeping, 2, 7)
#: whose activations are what fills the memory
make_wide = partial(_sleeping, 3, 8, 65536)
