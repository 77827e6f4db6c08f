"""Models of eight layers, so that they can be cut in many ways."""

from functools import partial

from torch import nn

LAYERS = [
    partial(nn.Linear, 8, 8),
    nn.Tanh,
    partial(nn.Linear, 8, 8),
    partial(nn.Dropout, 0.2),
    partial(nn.Linear, 8, 8),
    nn.Tanh,
    partial(nn.Linear, 8, 8),
    partial(nn.Linear, 8, 8),
]
NORMED = [*LAYERS[:2], partial(nn.BatchNorm1d, 8), *LAYERS[3:5], partial(nn.BatchNorm1d, 8), *LAYERS[6:]]
