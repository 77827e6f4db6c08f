"""Models that `rpc-pipe verify` takes; deterministic kernels are asked for, as docs/cluster.md says."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.use_deterministic_algorithms(True)
#: an error to plant, by which a rehearsal shows that it would be found
PLANTED = os.environ.get("GPU_PLANTED", "")


class Planted(nn.Module):
    """Adds other numbers in every process, where wrong bits are planted."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(time.perf_counter_ns() % 997) if PLANTED == "wrong" else x


def mlp() -> Any:
    """Return an MLP with dropout."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]
    data = torch.randn(33, 64), torch.randint(10, (33,))
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(64, 10), Planted())), data, F.cross_entropy


def conv() -> Any:
    """Return a convolutional net with batch norm."""

    def block(i: int, o: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    sizes = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), *[(64, 64, 1)] * 3]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10), Planted())
    data = torch.randn(33, 3, 32, 32), torch.randint(10, (33,))
    return nn.Sequential(*[block(*each) for each in sizes], head), data, F.cross_entropy


class _Linear(nn.Linear):
    """Draws a million numbers and repeats them: to draw all of a wide model takes longer than its steps."""

    def reset_parameters(self) -> None:
        bound, count = self.in_features**-0.5, self.weight.numel()
        drawn = torch.empty(min(count, 2**20 + 7)).uniform_(-bound, bound)
        with torch.no_grad():
            self.weight.view(-1).copy_(drawn.repeat(-(-count // len(drawn)))[:count])
            self.bias.zero_()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _Linear(width, 3 * width), _Linear(width, width)
        self.up, self.down = _Linear(width, 4 * width), _Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (z.view(b, t, -1, min(64, width)).transpose(1, 2) for z in self.qkv(self.n1(x)).split(width, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, width))
        found: Tensor = x + self.down(F.gelu(self.up(self.n2(x))))
        return found


class Embed(nn.Module):
    """Tokens and places of a GPT."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        return found


def gpt_layers(width: int, depth: int, length: int) -> list[Any]:
    """Return what makes the layers of a GPT over bytes, each with the same weights wherever it is made."""

    def head() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256), Planted())

    makers = [partial(Embed, width, length), *[partial(_Block, width)] * depth, head]
    return [partial(_seeded, number, maker) for number, maker in enumerate(makers)]


def _seeded(number: int, maker: Any) -> nn.Module:
    torch.manual_seed(number)
    made: nn.Module = maker()
    return made


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def gpt() -> Any:
    """Return a GPT."""
    rows = torch.randint(256, (17, 33))
    return nn.Sequential(*[make() for make in gpt_layers(64, 8, 32)]), (rows[:, :-1], rows[:, 1:]), token_loss


def _transformer(kind: str) -> Any:
    import transformers as t

    shape: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    t5: dict[str, Any] = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0}
    gpt2: dict[str, Any] = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    gpt2 |= {"attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    rows = torch.randint(256, (17, 32))
    makers: dict[str, Any] = {
        # A GPU's fused attention draws its dropout inside, which no whole sequence can follow slice by slice.
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
        # slices draw other numbers than whole sequences
        "gpt2_without_dropout": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, resid_pdrop=0.0, embd_pdrop=0.0)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape, num_key_value_heads=2)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**shape, num_key_value_heads=2, head_dim=16)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**shape)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
    }
    return makers[kind](), {"input_ids": rows, "labels": rows}


gpt2, gpt2_without_dropout, llama, qwen3, mixtral, bert, t5 = (
    partial(_transformer, kind) for kind in ("gpt2", "gpt2_without_dropout", "llama", "qwen3", "mixtral", "bert", "t5")
)
