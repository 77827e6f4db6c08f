"""Operations that are legal in one process and hard on a pipeline, of which `fuzz_models.py` makes layers."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from unkind_layers import Bounded, Depth, Hooks, Penalty, frozen

from trials import fuzz_idioms as idioms
from trials import fuzz_layers as layers
from trials.fuzz_layers import WIDTH, Calls, Shaped, linear

OPERATIONS: dict[str, Callable[[random.Random], nn.Module]] = {
    "linear": lambda draw: linear(),
    "bias-free": lambda draw: nn.Linear(WIDTH, WIDTH, bias=False),
    "tanh": lambda draw: draw.choice([nn.Tanh, nn.GELU, nn.SiLU, nn.Identity, nn.PReLU])(),
    "relu in place": lambda draw: draw.choice([nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Hardtanh])(inplace=True),
    "mul_": lambda draw: Calls(lambda x: x.mul_(0.5).add_(0.1)),
    "written": lambda draw: layers.Written(),
    "dropout": lambda draw: draw.choice([nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.3, inplace=True)]),
    "noise": lambda draw: layers.Noise(),
    # A checkpoint that runs it again ends, in one process too, where its noise is saved and not yet drawn.
    "rrelu": lambda draw: nn.Sequential(nn.RReLU(), nn.Tanh()),
    "layer norm": lambda draw: nn.LayerNorm(WIDTH, elementwise_affine=draw.random() < 0.7),
    "rms norm": lambda draw: nn.RMSNorm(WIDTH),
    "group norm": lambda draw: nn.GroupNorm(2, WIDTH),
    "batch norm": lambda draw: nn.BatchNorm1d(WIDTH, momentum=draw.choice([0.1, None]), affine=draw.random() < 0.7),
    "instance norm": lambda draw: Shaped(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, 4),
    "spectral norm": lambda draw: nn.utils.parametrizations.spectral_norm(linear()),
    "old spectral norm": lambda draw: nn.utils.spectral_norm(linear()),
    "weight norm": lambda draw: nn.utils.parametrizations.weight_norm(linear()),
    "old weight norm": lambda draw: nn.utils.weight_norm(linear()),
    "orthogonal": lambda draw: nn.utils.parametrizations.orthogonal(linear()),
    "parametrized": lambda draw: layers.parametrized(),
    "average": lambda draw: layers.Average(draw.random() < 0.5, draw.random() < 0.7),
    "quiet scale": lambda draw: layers.QuietScale(),
    "checkpoint": lambda draw: layers.Checkpointed(
        nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.4)), reentrant=draw.random() < 0.4
    ),
    "checkpointed batch norm": lambda draw: layers.Checkpointed(nn.Sequential(linear(), nn.LayerNorm(WIDTH)), False),
    "complex": lambda draw: layers.Complex(draw.random() < 0.5),
    "sparse bag": lambda draw: layers.Embedded(nn.EmbeddingBag(16, WIDTH, mode="sum", sparse=True)),
    "sparse": lambda draw: layers.Embedded(nn.Embedding(16, WIDTH, sparse=True)),
    "embedding": lambda draw: layers.Embedded(nn.Embedding(16, WIDTH, padding_idx=draw.choice([None, 3]))),
    "limited embedding": lambda draw: layers.Embedded(nn.Embedding(16, WIDTH, max_norm=1.0)),
    "hooks": lambda draw: Hooks(),
    "depth": lambda draw: Depth(),
    "bounded": lambda draw: Bounded(),
    "penalty": lambda draw: Penalty(),
    "twice": lambda draw: layers.Twice(),
    "sometimes": lambda draw: layers.Sometimes(),
    "rounded": lambda draw: layers.Rounded(),
    "double": lambda draw: layers.Cast(torch.float64, draw.random() < 0.5),
    "bfloat16": lambda draw: layers.Cast(torch.bfloat16, draw.random() < 0.5),
    "detached": lambda draw: Calls(lambda x: x.detach() * 0.5),
    "branch": lambda draw: layers.Handle(),
    "frozen": lambda draw: frozen(),
    "half frozen": lambda draw: layers.half_frozen(),
    "recurrent": lambda draw: Shaped(draw.choice([nn.GRU, nn.LSTM, nn.RNN])(4, 4, batch_first=True), 2, 4),
    "attention": lambda draw: Shaped(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True, norm_first=draw.random() < 0.5), 2, 4
    ),
    "convolution": lambda draw: Shaped(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), 1, WIDTH),
    "transposed": lambda draw: Calls(lambda x: x.T.contiguous().T),
    "view": lambda draw: Calls(lambda x: x.view(len(x), 2, 4).flatten(1)),
    "expanded": lambda draw: Calls(lambda x: x + x[:, :1].expand_as(x)),
    "data": lambda draw: Calls(lambda x: x + x.data.sort(1).values),
    "index": lambda draw: Calls(lambda x: x[:, [1, 0, 2, 3, 7, 6, 5, 4]]),
    "where": lambda draw: Calls(lambda x: torch.where(x > 0, x, x * 0.1)),
    "cumsum": lambda draw: Calls(lambda x: x.cumsum(1) / 4),
    "svd": lambda draw: Calls(lambda x: x + layers.largest(x) / 10),
    "func": lambda draw: Calls(lambda x: torch.func.vmap(lambda row: row.softmax(0) * row)(x)),
    "none": lambda draw: nn.Identity(),
    "lazy linear": lambda draw: nn.LazyLinear(WIDTH),
    "low rank": lambda draw: idioms.LowRank(),
    "experts": lambda draw: idioms.Experts(),
    "chooses": lambda draw: idioms.Chooses(),
    "teacher": lambda draw: idioms.Teacher(),
    "quantised": lambda draw: idioms.Quantised(draw.random() < 0.5),
    "queue": lambda draw: idioms.Queue(),
    "remembers": lambda draw: idioms.Remembers(),
    "generated": lambda draw: idioms.Generated(),
    "kept": lambda draw: idioms.Kept(),
    "contrast": lambda draw: Calls(lambda x: x + (x @ x.T).tanh().mean(1, keepdim=True)),
    "reversed grad": lambda draw: Calls(lambda x: x.detach() * 1.5 - x * 0.5),
}
