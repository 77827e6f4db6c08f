"""A vision transformer of Hugging Face, with the loss outside of it: loss_fn(output, batch).

pip install '.[hf]'
rpc-pipe run vit.py --workers 2 --schedule zb-h1
"""

import argparse
from functools import partial

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from rpc_pipe import Pipeline, Training


def loss_fn(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits, batch["classes"], label_smoothing=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    training = Training(optimizer=partial(torch.optim.AdamW, lr=3e-3))
    pipe = Pipeline(model, loss_fn, training=training, num_microbatches=4, num_workers=2)
    classes = torch.arange(32) % 4
    images = torch.randn(32, 3, 32, 32) + classes[:, None, None, None]
    for step in range(1, steps + 1):
        loss = pipe.step({"pixel_values": images, "classes": classes})
        if step % 10 == 0 or step == steps:
            print(f"step {step}: loss {loss:.3f}")
    logits = pipe.predict({"pixel_values": images}).logits
    print(f"right: {(logits.argmax(-1) == classes).float().mean():.0%}")


if __name__ == "__main__":
    main()
