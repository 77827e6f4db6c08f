"""What generation in stages takes: emulated devices beside their limit, a GPT beside one process, each in one run.

python bench/generation.py devices    4 workers, 8 groups, 2 ms a token and stage: the share of the limit
python bench/generation.py gpt        2 workers, a GPT of the demo's size: tokens a second beside `model.generate`

One process has one thread, as a worker has. Rounds take turns, and the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from bench import devices
from rpc_pipe import Pipeline

_DEVICE_S, _GROUPS, _TOKENS, _ROUNDS = 0.002, 8, 60, 5


_begun = 0.0


class _Layer(nn.Module):
    """A decoder layer after which the stage's forward has taken as long as its device is told."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.number, self.weight = layer_idx, nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **rest: Any) -> Tensor:
        """Keep keys and values, and be busy."""
        if past_key_values is not None:
            kept = hidden_states[:, None, :, :1]
            past_key_values.update(kept, kept, self.number)
        devices.work(_DEVICE_S - (time.perf_counter() - _begun))
        return hidden_states * self.weight


class _Emulated(LlamaForCausalLM):
    """A model whose stages have one such layer each."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note when a stage begins."""
        global _begun
        _begun = time.perf_counter()
        return super().forward(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("devices", "gpt"))
    parser.add_argument("--rows", type=int, default=1024, help="of the GPT, in 4 groups")
    parsed = parser.parse_args()
    if "RANK" not in os.environ:
        workers = 4 if parsed.what == "devices" else 2
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", str(workers), "--transport", "zmq"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*command, "--", *sys.argv[1:]], env=env, check=False).returncode)
    torch.manual_seed(0)
    _devices() if parsed.what == "devices" else _gpt(parsed.rows)


def _timed(pipe: Pipeline, call: Any) -> tuple[float, float]:
    """Return the seconds of a call, and the processor's of the busiest worker, which other programs do not change."""
    pipe.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    call()
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    return took, max(pipe.gather("cpu", lambda worker: cpu) or [cpu])


def _devices() -> None:
    devices.assume(0.00006)
    vars(modeling_llama)["LlamaDecoderLayer"] = _Layer
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    model = _Emulated(LlamaConfig(**sizes, num_hidden_layers=4, eos_token_id=None)).train(False)
    prompts = torch.randint(64, (_GROUPS, 4))
    pipe = Pipeline(model, num_microbatches=_GROUPS)
    pipe.generate(prompts, 4, do_sample=False)
    taken = [_timed(pipe, lambda: pipe.generate(prompts, _TOKENS, do_sample=False)) for _ in range(_ROUNDS)]
    if pipe.worker == 0:
        limit = _TOKENS * _GROUPS * _DEVICE_S
        shares = sorted(limit / each for each, _ in taken)
        cpu = 1e3 * statistics.median(each for _, each in taken) / (_TOKENS * _GROUPS)
        said = f"({shares[0]:.2f} to {shares[-1]:.2f}), {cpu:.2f} ms of a processor for each 2 ms of a device"
        print(f"{statistics.median(shares):.2f} of the limit {said}", flush=True)


def _gpt(rows: int) -> None:
    config = GPT2Config(
        vocab_size=256, bos_token_id=None, n_embd=128, n_layer=4, n_head=4, n_positions=128, eos_token_id=None
    )
    model, plain = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    plain.load_state_dict(model.state_dict())
    prompts = torch.randint(256, (rows, 16))
    how: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    pipe = Pipeline(model, num_microbatches=4)

    def alone() -> None:
        if pipe.worker == 0:
            plain.generate(prompts, **how)

    pipe.generate(prompts, **how)
    alone()
    ratios, by_cpu = list[float](), list[float]()
    for _ in range(_ROUNDS):
        one, both = _timed(pipe, alone), _timed(pipe, lambda: pipe.generate(prompts, **how))
        ratios.append(one[0] / both[0])
        by_cpu.append(one[1] / both[1])
    if pipe.worker == 0:
        speed, ratios = rows * _TOKENS / both[0], sorted(ratios)
        among = f"({ratios[0]:.2f} to {ratios[-1]:.2f}), {statistics.median(by_cpu):.2f} x by time of processors"
        print(f"{speed:.0f} tokens/s, {statistics.median(ratios):.2f} x one process {among}", flush=True)


if __name__ == "__main__":
    main()
