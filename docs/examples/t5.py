"""An encoder and a decoder: T5, whose embedding is used by both and by the output, cut over four workers.

pip install '.[hf]'
rpc-pipe run t5.py --workers 4
"""

import argparse
from functools import partial

import torch
from transformers import T5Config, T5ForConditionalGeneration

from rpc_pipe import Pipeline, Training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = T5Config(
        num_layers=3, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=64, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    # A function that makes the model: each worker then computes the numbers of its own parameters alone.
    pipe = Pipeline(
        partial(T5ForConditionalGeneration, config), training=Training(partial(torch.optim.AdamW, lr=1e-2)),
        num_microbatches=4, num_workers=4,
    )  # fmt: skip
    words = torch.randint(3, 64, (16, 8))
    for step in range(1, steps + 1):
        loss = pipe.step({"input_ids": words, "labels": words.flip(1)})  # say it backwards
        if step % 5 == 0 or step == steps:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
