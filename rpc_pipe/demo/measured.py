"""The built-in GPT, measured on this machine."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import AdamW

from ..planning.measuring.block_timing import measure_layers
from ..planning.profile import LayerCost
from .gpt import VOCABULARY, gpt_layers, next_byte_loss
from .settings import TrainOptions


def measure_gpt(options: TrainOptions) -> list[LayerCost]:
    """Measure each layer on one microbatch of its batch and one thread."""
    torch.set_num_threads(1)
    rows = max(1, options.batch // options.microbatches)
    tokens = torch.randint(VOCABULARY, (rows, options.gpt.context))
    layers = [layer() for layer in gpt_layers(options.gpt)]
    return measure_layers(
        layers, tokens, target=tokens, loss_fn=next_byte_loss, optimizer=partial(AdamW, lr=options.lr)
    )
