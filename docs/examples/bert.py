"""Classify with a BERT of Hugging Face: a metric, and no weight decay for biases and norms, chosen by name.

pip install '.[hf]'
rpc-pipe run bert.py --workers 2
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

from rpc_pipe import Pipeline, Training


def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Called on every stage with its parameters, by the names that they have in the whole model."""
    plain = [(name, p) for name, p in named if name.endswith("bias") or "LayerNorm" in name]
    decayed = [(name, p) for name, p in named if not (name.endswith("bias") or "LayerNorm" in name)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3)


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Texts of words, some shorter than others; the class is which of two words stands in it."""
    words = torch.randint(10, 60, (rows, 12))
    labels = torch.randint(2, (rows,))
    words[:, 3] = 5 + labels
    mask = (torch.arange(12) < torch.randint(6, 13, (rows, 1))).long()
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def accuracy(output, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum over a microbatch, and how many there are."""
    return (output.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    pipe = Pipeline(model, training=Training(optimizer, max_grad_norm=1.0), num_microbatches=4, num_workers=2)
    held_out = batch(64)
    for step in range(1, steps + 1):
        loss = pipe.step(batch(32))
        if step % 10 == 0 or step == steps:
            print(f"step {step}: loss {loss:.3f}, accuracy {pipe.evaluate(held_out, metric=accuracy):.2f}")


if __name__ == "__main__":
    main()
