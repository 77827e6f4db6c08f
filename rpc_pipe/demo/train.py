"""The main job: train a byte-level GPT on real text through the pipeline. Runs in every worker."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import partial
from itertools import islice

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..checkpoints.options import follow
from ..data.loader import Loader
from ..dependency import ConfigError
from ..drawing.timeline import draw
from ..launching import launcher_link as link
from ..pipeline import Pipeline, Training
from ..planning.compare import describe_staleness
from ..tracing.own_boards import collect, record
from ..tracing.run_summary import FILES, figures, last_steps, write_timelines
from .corpus import Corpus
from .gpt import gpt_layers, next_byte_loss
from .settings import TrainOptions

_HELD_OUT_BATCHES = 16


def train(options: TrainOptions) -> None:
    """Train, evaluate, and tell the launcher: progress lines, the timeline, the summary."""
    torch.set_num_threads(options.threads)
    corpus = Corpus(options.data, options.context)
    pipe = Pipeline(
        gpt_layers(options.gpt),
        next_byte_loss,
        training=Training(
            partial(AdamW, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.01),
            partial(_warmup_and_cosine, steps=options.steps),
        ),
        **options.for_pipeline(),
    )
    record(pipe)
    kept = options.checkpoint_every, options.checkpoint_folder, options.checkpoint_keep, options.resume
    resumed = follow(pipe, *kept, anew=False)
    if pipe.steps_done >= options.steps:
        raise ConfigError(f"--steps {options.steps}: the checkpoint has {pipe.steps_done} behind it; ask for more")
    if pipe.worker == 0:
        _tell_plan(options, corpus, pipe, resumed)
    times = _loop(options, corpus, pipe)
    held_out = _held_out_loss(options, corpus, pipe)
    if options.save:
        pipe.weights.save(options.save)
    if pipe.worker == 0:
        _tell_summary(options, corpus, pipe, times, held_out)
    pipe.barrier()
    if pipe.stopped:
        raise SystemExit(130)


def _warmup_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    warmup = max(1, min(50, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return LambdaLR(optimizer, factor)


def _loop(options: TrainOptions, corpus: Corpus, pipe: Pipeline) -> list[float]:
    """Train; return what each step took, in seconds."""
    times: list[float] = []
    loader = Loader(corpus.samples(), rows=options.batch, seed=options.seed)
    if pipe.last_batch and not pipe.last_batch.endswith(loader.identity):
        raise ConfigError(
            f"--resume: the last step before the checkpoint was of {pipe.last_batch}, and --data has "
            f"{loader.identity}: continue with the same text and seed, or start again without --resume"
        )
    loader.seek(pipe.steps_done * options.batch)
    steps = range(pipe.steps_done, options.steps)
    batches = islice(loader, len(steps))
    losses = map(pipe.step, batches) if pipe.spec.synchronous else pipe.train(batches)
    begin = time.perf_counter()
    for step, loss in zip(steps, losses, strict=False):
        times.append(time.perf_counter() - begin)
        if pipe.worker == 0:
            link.tell(
                kind="progress",
                step=step + 1,
                steps=options.steps,
                loss=loss,
                tokens_per_s=options.batch * options.context / times[-1],
                step_ms=1e3 * times[-1],
            )
        if pipe.stopped:
            break
        begin = time.perf_counter()
    return times


def _held_out_loss(options: TrainOptions, corpus: Corpus, pipe: Pipeline) -> float:
    weighted = [
        (pipe.evaluate(batch), len(batch[0])) for batch in corpus.held_out_batches(options.batch, _HELD_OUT_BATCHES)
    ]
    return sum(loss * rows for loss, rows in weighted) / sum(rows for _, rows in weighted)


def _tell_plan(options: TrainOptions, corpus: Corpus, pipe: Pipeline, resumed: str) -> None:
    cut = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in pipe.partition.ranges)
    link.tell(
        kind="text",
        text=f"byte-level GPT of {options.gpt.num_layers} layers, cut into layers {cut}; "
        f"{corpus.num_bytes / 1e6:.1f} MB of text, a tenth held out; "
        f"{options.schedule} on {pipe.num_workers} workers, {options.microbatches} microbatches a step"
        + (f"; {resumed}" if resumed else ""),
    )


def _tell_summary(options: TrainOptions, corpus: Corpus, pipe: Pipeline, times: list[float], held_out: float) -> None:
    history = collect()
    trace, found = last_steps(history), figures(history)
    assert trace is not None and found is not None
    middle = sorted(times)[len(times) // 2]
    write_timelines(trace, options.device, found["lost"]["line"], chrome=options.trace, html=options.html)
    bigram = corpus.bigram_loss(corpus.held_out_batches(options.batch, _HELD_OUT_BATCHES))
    found |= {"step_ms": 1e3 * middle, "tokens_per_s": options.batch * options.context / middle}
    link.tell(
        kind="summary",
        title=f"\nlast step as it ran on {history.num_workers} workers:",
        timeline=draw(trace.last_steps(1), trace.spec.num_workers, width=100).markup,
        lines=[
            f"idle {100 * found['bubble_actual']:.1f} %; {100 * found['bubble_planned']:.1f} % when simulated with the "
            f"measured times and free transfers; step {found['step_ms']:.0f} ms, {found['tokens_per_s']:,.0f} tokens/s",
            *describe_staleness(pipe.spec),
            f"held-out loss {held_out:.4f} nats a byte; a byte bigram model has {bigram:.4f} on the same bytes",
            *(f"{what} written to {path}" for name, what in FILES.items() if (path := getattr(options, name))),
        ],
        json={**asdict(options), **found, "held_out_loss": held_out, "bigram_loss": bigram},
        exit_code=int(options.beat_bigram and held_out >= bigram),
    )
