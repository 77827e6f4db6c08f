"""Few bytes on a slow link: int8 activations, 32 numbers with one exponent (MXINT8, OCP 2023), and bfloat16 gradients.

Two layers around a cut. They are part of the model, so one process computes the same bits, and `rpc-pipe verify`
proves it. A codec inside a carrier would change bits of which no model knows. Forward 3.9 x fewer bytes travel than of
float32, backward 2 x.

python coded.py                                          plain and coded, two workers as threads
rpc-pipe run coded.py --workers 2
rpc-pipe verify coded.py:llama --workers 2 --split 2,2   a model of Hugging Face, with hooks where it is cut
"""

import argparse
from collections import Counter
from functools import partial

import torch
from torch import nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.workers.hooks import Listener

TILE = 32
NOT_FINITE = 127  # the exponent of a tile with nan or inf, all of which becomes nan


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        tiles = x.reshape(-1, TILE)
        largest = tiles.abs().amax(1, keepdim=True)
        exponent = torch.frexp(largest)[1].clamp(-120, 120).masked_fill(~largest.isfinite(), NOT_FINITE)
        numbers = torch.ldexp(tiles, 7 - exponent).round_().clamp_(-127, 127).to(torch.int8)
        ctx.mark_non_differentiable(numbers, exponent := exponent.to(torch.int8))
        # The handle has the shape and, in bfloat16, the gradient of x: one number that is expanded, which travels once.
        return numbers, exponent, x.new_zeros((), dtype=torch.bfloat16).expand(x.shape)

    @staticmethod
    def backward(ctx, numbers, exponent, grad):
        return grad.to(torch.float32)


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, exponent, handle):
        found = torch.ldexp(numbers.float(), exponent.int() - 7).masked_fill_(exponent == NOT_FINITE, torch.nan)
        return found.view(handle.shape)

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad.to(torch.bfloat16)


class Encode(nn.Module):
    """Takes float32 with a multiple of 32 numbers."""

    def forward(self, x):
        return _Encode.apply(x)


class Decode(nn.Module):
    def forward(self, coded):
        return _Decode.apply(*coded)


def between(first, second):
    """Code what a block hands to the next one: for whole models in which nothing touches it in between."""
    encode, decode = Encode(), Decode()
    first.register_forward_hook(lambda module, args, output: encode(output))
    second.register_forward_pre_hook(lambda module, args: (decode(args[0]), *args[1:]))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config), torch.randint(31, (8, 12))
    between(model.model.layers[1], model.model.layers[2])
    return model, {"input_ids": ids, "labels": ids}


class Bytes(Listener):
    """Counts bytes that a worker gets, by kind of action."""

    def __init__(self, counted):
        self.counted = counted

    def step_finished(self, record):
        for arrived in record.arrivals:
            self.counted[str(arrived.action.kind)] += arrived.num_bytes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 64, generator=generator), torch.randn(64, 8, generator=generator)
    for name, ends in (("plain", [nn.Identity] * 2), ("coded", [Encode, Decode])):
        counted = Counter()
        layers = [
            partial(nn.Linear, 64, 64),
            nn.Tanh,
            *ends,
            partial(nn.Linear, 64, 64),
            nn.Tanh,
            partial(nn.Linear, 64, 8),
        ]
        training = Training(partial(torch.optim.SGD, lr=0.1))
        how = {"split": [3, 4], "num_microbatches": 4, "num_workers": 2, "training": training}
        with Pipeline(layers, nn.functional.mse_loss, **how) as pipe:
            pipe.listen(lambda worker, counted=counted: Bytes(counted))
            for _ in range(steps):
                loss = pipe.step((x, y))
        print(f"{name}: loss {loss:.7f}, {counted['F']} bytes forward, {counted['B']} backward")


if __name__ == "__main__":
    main()
