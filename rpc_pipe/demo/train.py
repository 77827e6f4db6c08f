"""The script that `rpc-pipe run` runs without one: train a byte-level GPT on real text through the pipeline."""

import argparse
import math
import time
from dataclasses import fields
from functools import partial
from itertools import islice

from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..data.loader import Loader
from ..launching import launcher_link as link
from ..pipeline import Pipeline
from ..pipeline import Training as PipelineTraining
from ..step_report import StepReport
from .corpus import Corpus
from .gpt import gpt_layers, next_byte_loss
from .settings import DemoTraining, GPTConfig

_HELD_OUT_BATCHES = 16
#: seconds between progress lines
_TELL_EVERY_S = 5.0


def _warmup_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    warmup = max(1, min(50, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return LambdaLR(optimizer, factor)


def main() -> None:
    """Train, and compare the held-out loss with that of a bigram model."""
    parser = argparse.ArgumentParser()
    for field in (*fields(GPTConfig), *fields(DemoTraining)):
        parser.add_argument(f"--{field.name}", type=type(field.default or ""), default=field.default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beat-bigram", action="store_true")
    typed = vars(parser.parse_args())
    config = GPTConfig(**{field.name: typed[field.name] for field in fields(GPTConfig)})
    steps, rows = typed["steps"], typed["batch"]
    corpus = Corpus(typed["data"], config.context)
    optimizer = partial(AdamW, lr=typed["lr"], betas=(0.9, 0.99), weight_decay=0.01)
    training = PipelineTraining(optimizer, partial(_warmup_and_cosine, steps=steps))
    pipe = Pipeline(gpt_layers(config), next_byte_loss, training=training, num_microbatches=8, seed=typed["seed"])

    def tell(text: str, **more: int) -> None:
        if pipe.worker == 0:
            link.tell(kind="text", text=text, **more)

    told_at = 0.0

    def progress(report: StepReport) -> None:
        nonlocal told_at
        if report.step in (1, steps) or time.monotonic() > told_at + _TELL_EVERY_S:
            told_at = time.monotonic()
            speed = f"{report.tokens_per_s:,.0f} tokens/s  {report.step_ms:.0f} ms/step"
            tell(f"step {report.step}/{steps}  loss {report.loss:.4f}  {speed}")

    pipe.on_step(progress)
    cut = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in pipe.partition.ranges)
    text = f"{corpus.num_bytes / 1e6:.1f} MB of text, a tenth held out"
    tell(f"byte-level GPT of {config.depth + 2} layers, cut into layers {cut}; {text}")
    for _ in pipe.train(islice(Loader(corpus.samples(), rows=rows, seed=typed["seed"]), steps)):
        if pipe.stopped:
            return
    held_out = [(pipe.evaluate(batch), len(batch[0])) for batch in corpus.held_out_batches(rows, _HELD_OUT_BATCHES)]
    loss = sum(loss * rows for loss, rows in held_out) / sum(rows for _, rows in held_out)
    bigram = corpus.bigram_loss(corpus.held_out_batches(rows, _HELD_OUT_BATCHES))
    text = f"held-out loss {loss:.4f} nats a byte; a byte bigram model has {bigram:.4f} on the same bytes"
    tell(text, exit_code=int(typed["beat_bigram"] and loss >= bigram))


if __name__.endswith("__main__"):  # with the name of its package before it, so that it may import relatively
    main()
