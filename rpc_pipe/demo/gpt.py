"""A small pre-norm GPT over bytes (Radford et al. 2019; Xiong et al. 2020, arXiv:2002.04745), as layers to cut.

Shapes: token ids `[batch, sequence]` in, logits `[batch, sequence, 256]` out.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .settings import GPTConfig

VOCABULARY = 256


class Positions(nn.Module):
    """Numbers the tokens of a sequence; its state is the number of tokens so far."""

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        count = torch.zeros((), dtype=torch.long, device=tokens.device) if state is None else state
        return count + torch.arange(tokens.shape[1], device=tokens.device), count + tokens.shape[1]


class Embedding(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.positions = Positions()
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions, _ = self.positions(tokens)
        out: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return out


class Attention(nn.Module):
    """Causal attention of heads; its state is the keys and values of the slices before."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.p = dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mask = None
        if state is not None:
            k, v = torch.cat([state[0], k], -2), torch.cat([state[1], v], -2)
            new, all_ = q.shape[-2], k.shape[-2]
            mask = torch.ones(new, all_, dtype=torch.bool, device=q.device).tril(all_ - new)
        p = self.p if self.training else 0.0
        attend = functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None), (k, v)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention = Attention(config.dropout)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        for layer in (self.merge, self.down):  # GPT-2's scaling of the terms added to the residual stream
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.merge(self._attend(self.norm1(x))))
        out: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, width / heads]
        mixed: Tensor = self.attention(q, k, v)[0]
        return mixed.transpose(1, 2).reshape(batch, sequence, width)


class Head(nn.Module):
    """Vectors to logits over the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


def gpt_layers(config: GPTConfig) -> list[Callable[[], nn.Module]]:
    """Return a builder for each layer; `nn.Sequential` of all of them is the unsplit model."""
    blocks = [partial(Block, config) for _ in range(config.depth)]
    return [partial(Embedding, config), *blocks, partial(Head, config)]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a byte; targets `[batch, sequence]`."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
