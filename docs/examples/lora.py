"""Fine-tune a causal language model of Hugging Face with LoRA, as peft makes it: neither knows of the pipeline.

pip install '.[hf]'
python lora.py                                all workers are threads of this process
rpc-pipe run lora.py --workers 4
"""

import argparse
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from rpc_pipe import Pipeline, Training

TEXT = "A schedule is data about order; a worker obeys it; the network carries it. " * 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    # Random weights of a small model, so that this runs anywhere; GPT2LMHeadModel.from_pretrained("gpt2") goes as well.
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    training = Training(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    pipe = Pipeline(model, training=training, num_microbatches=4, num_workers=2)
    ids = torch.tensor(list(TEXT.encode()))
    rows = ids[: len(ids) // 32 * 32].view(-1, 32)
    first = pipe.evaluate({"input_ids": rows, "labels": rows})
    for _ in range(steps):
        loss = pipe.step({"input_ids": rows, "labels": rows})
    print(f"loss {first:.3f}, then {loss:.3f}")
    pipe.weights.save_pretrained("adapter")  # PeftModel.from_pretrained takes it back
    print(f"adapter: {sum(p.numel() for p in model.parameters() if p.requires_grad):,} numbers")


if __name__ == "__main__":
    main()
