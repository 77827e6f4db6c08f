"""Train a causal language model of Hugging Face on a file of tokens that need not fit into memory.

pip install '.[hf]'
python tokens.py                              all workers are threads of this process
rpc-pipe run tokens.py --workers 2 --checkpoint-every 2 --resume auto
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, tokens

TEXT = "A schedule is data about order; a worker obeys it; the network carries it. " * 40


def next_tokens(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The loss: `tokens` gives the targets shifted by one already, so the model is not asked to do that again."""
    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    pipe = Pipeline(
        GPT2LMHeadModel(config),
        next_tokens,
        training=Training(optimizer=partial(torch.optim.AdamW, lr=1e-2)),
        num_microbatches=4,
        num_workers=2,
    )
    file = Path("tokens.u8")
    if pipe.worker == 0 and not file.exists():  # for your own text see docs/data.md
        file.write_bytes(TEXT.encode())
    pipe.barrier()
    loader = Loader(tokens(file, context=32), rows=16, memory="100MB")
    for step, loss in enumerate(pipe.train(loader), 1):
        print(f"step {step}: loss {loss:.3f}, {loader.position} samples")
        if step == steps or pipe.stopped:
            break


if __name__ == "__main__":
    main()
