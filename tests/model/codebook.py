"""A model with a codebook that counts, between two lists of blocks."""

from __future__ import annotations

import torch
from torch import nn


class Book(nn.Module):
    """Rounds to the nearest of its vectors, and counts in a buffer how often each was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(5, 4)
        self.register_buffer("taken", torch.zeros(5))

    def forward(self, x):
        nearest = (x[:, None] - self.vectors.weight).square().sum(-1).argmin(1)
        self.taken.mul_(0.9).index_add_(0, nearest, torch.ones(len(nearest)))
        rounded = self.vectors(nearest)
        return x + (rounded - x).detach(), (rounded - x.detach()).square().mean()


class Codebook(nn.Module):
    """An autoencoder with a codebook between its lists of blocks; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.book = Book()
        self.dec = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        wanted = x
        for layer in self.enc:
            x = layer(x).tanh()
        x, loss = self.book(x)
        for layer in self.dec:
            x = layer(x).tanh()
        return (x - wanted).square().mean() + loss
