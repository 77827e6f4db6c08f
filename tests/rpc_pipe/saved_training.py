"""A small training that tests of checkpoints save and resume."""

from functools import partial

import torch
from torch import nn
from torch.optim import lr_scheduler
from training_options import pipeline_with

LAYERS = [
    partial(nn.Linear, 8, 16),
    nn.Tanh,
    partial(nn.Linear, 16, 16),
    nn.Dropout,
    partial(nn.BatchNorm1d, 16),
    partial(nn.Linear, 16, 4),
]
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(7)]
DONE = 3


def adamw(named):
    decay = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def warmed_up(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.MultiStepLR(optimizer, [1, 3])], milestones=[2])


def pipeline(num_workers, schedule="1f1b", layers=LAYERS, optimizer=adamw, **options):
    return pipeline_with(
        layers, nn.functional.mse_loss, optimizer=optimizer, num_workers=num_workers, schedule=schedule,
        num_microbatches=4, **{"lr_scheduler": warmed_up, "max_grad_norm": 0.5, **options},
    )  # fmt: skip


def bits(pipe):
    return {name: tensor.numpy().tobytes() for name, tensor in pipe.weights.state_dict().items()}
