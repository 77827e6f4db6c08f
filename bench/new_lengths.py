"""Rows of many lengths as they are, beside the same rows padded to the longest: GPT-2 alone and with LoRA, 2 processes.

python bench/new_lengths.py            30 steps of 16 rows with 20 to 130 tokens, 4 rows a microbatch
python bench/new_lengths.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a worker process finds this package where the command was given
    sys.path.insert(0, os.getcwd())

import torch

from rpc_pipe.pipeline import Pipeline, SplitBatch, Training

_STEPS, _ROWS, _ROWS_A_MICROBATCH, _SHORTEST, _LONGEST = 30, 16, 4, 20, 130
#: steps after which a new length should cost nothing
_LEARNT = 3
_OUT = "NEW_LENGTHS_OUT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=("gpt2", "lora"))
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    if parsed.model:
        _one(parsed.model, parsed.padded)
        return
    for model in ("gpt2", "lora"):
        runs = [(_run(model, False), _run(model, True)) for _ in range(parsed.rounds)]
        totals = [(sum(own["s"][:_STEPS]), sum(padded["s"][:_STEPS])) for own, padded in runs]
        ratio = statistics.median(own / padded for own, padded in totals)
        slower = statistics.median(_slower(own) for own, _ in runs)
        seconds = [statistics.median(side) for side in zip(*totals, strict=True)]
        print(f"{model}: {seconds[0]:.2f} s, padded {seconds[1]:.2f} s: {ratio:.2f} of it;", end=" ")
        print(f"a step with new lengths after step {_LEARNT}: {slower:.2f} x its share of tokens", flush=True)


def _slower(found: dict[str, Any]) -> float:
    """Return the time for a token in steps with new lengths, relative to the others, behind the first steps."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for s, tokens, new in list(zip(found["s"], found["tokens"], found["new"], strict=True))[_LEARNT:]:
        rates[new > 0].append(s / tokens)
    return statistics.median(rates[True]) / statistics.median(rates[False])


def _run(model: str, padded: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [sys.executable, "-m", "rpc_pipe", "run", __file__, "--workers", "2", "--", model]
        env = {**os.environ, _OUT: str(out), "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*command, *["--padded"] * padded], check=True, env=env, **quiet)  # type: ignore[call-overload]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def _one(name: str, padded: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    count = _ROWS // _ROWS_A_MICROBATCH
    training = Training(partial(torch.optim.AdamW, lr=1e-3))
    pipe = Pipeline(model, training=training, num_microbatches=count)
    found: dict[str, list[float]] = {"s": [], "tokens": [], "new": []}
    numbers, met = random.Random(0), set[int]()
    for step in range(_STEPS + _STEPS // 3):
        # The lengths of the last third have come before.
        if step == _STEPS:
            numbers = random.Random(0)
        lengths = sorted(numbers.randint(_SHORTEST, _LONGEST) for _ in range(_ROWS))
        groups = [lengths[begin : begin + _ROWS_A_MICROBATCH] for begin in range(0, _ROWS, _ROWS_A_MICROBATCH)]
        to = [_LONGEST if padded else group[-1] for group in groups]
        batch = SplitBatch(map(_microbatch, groups, to))
        begin_s = time.perf_counter()
        pipe.step(batch)
        found["s"].append(time.perf_counter() - begin_s)
        found["tokens"].append(_ROWS_A_MICROBATCH * sum(to))
        found["new"].append(len(set(to) - met))
        met.update(to)
    if pipe.worker == 0:
        Path(os.environ[_OUT]).write_text(json.dumps(found))


def _microbatch(lengths: list[int], to: int) -> dict[str, torch.Tensor]:
    ids, labels = torch.zeros(len(lengths), to, dtype=torch.int64), torch.full((len(lengths), to), -100)
    for row, length in enumerate(lengths):
        ids[row, :length] = labels[row, :length] = torch.arange(length) % 251 + 1
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


if __name__ == "__main__":
    main()
