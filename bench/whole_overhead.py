"""What it costs to run a model's own forward with stubs, against the same model as a list of layers: GPT-2, in turns.

    python -m bench.whole_overhead [--workers 2] [--steps 12] [--layers 6] [--width 256]

CPU time of all workers, which are threads of this process: neither waiting nor other programs count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training


class Embed(nn.Module):
    """Words and positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        return made


class Block(nn.Module):
    """A block of transformers' GPT-2; without a mask its attention is causal."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x)
        found: Tensor = output[0] if isinstance(output, tuple) else output
        return found


class Head(nn.Module):
    """Norm and logits, with a weight of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
    """The same as the model's own."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def main() -> None:
    """Train both in turns; print the ratio of the median CPU times of a step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("workers", 2), ("steps", 12), ("layers", 6), ("width", 256), ("length", 128), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=4, vocab_size=4096, n_positions=options.length,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    common: dict[str, Any] = {
        "training": Training(partial(torch.optim.SGD, lr=1e-3)), "num_workers": options.workers, "num_microbatches": 4
    }  # fmt: skip
    torch.manual_seed(0)
    make: Any = GPT2LMHeadModel
    whole, model = make(config), make(config)
    blocks = [Block(block) for block in model.transformer.h]
    even = [len(range(i, len(blocks), options.workers)) for i in range(options.workers)]
    layers = Pipeline(
        [Embed(model), *blocks, Head(model)], loss_fn, split=[even[0] + 1, *even[1:-1], even[-1] + 1], **common
    )
    observed = Pipeline(whole, **common)
    ids = torch.randint(4096, (options.rows, options.length))
    steps: dict[str, Callable[[], float]] = {
        "layers": lambda: layers.step((ids, ids)),
        "whole": lambda: observed.step({"input_ids": ids, "labels": ids}),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.steps + 2):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - begin))
    medians = {name: statistics.median(each[2:]) for name, each in times.items()}
    least = {name: min(each[2:]) for name, each in times.items()}
    print(f"CPU time of a step, median: layers {medians['layers']:.1f} ms, whole {medians['whole']:.1f} ms")
    print(f"overhead {100 * (medians['whole'] / medians['layers'] - 1):.1f} % of the median, ", end="")
    print(f"{100 * (least['whole'] / least['layers'] - 1):.1f} % of the least")


if __name__ == "__main__":
    main()
