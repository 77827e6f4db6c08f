"""The main job: train a byte-level GPT on real text through the pipeline. Runs in every worker."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..drawing.timeline import draw
from ..launching import launcher_link as link
from ..pipeline import Pipeline
from ..planning.simulator import simulate
from ..tracing.lost import attribute
from ..tracing.recorder import Recorder
from ..tracing.trace import Trace, planned_and_actual
from .corpus import Corpus
from .gpt import gpt_layers, next_byte_loss
from .settings import TrainOptions

_HELD_OUT_BATCHES = 16
#: steps recorded for the timeline and the measured bubble
_RECORDED_STEPS = 12


def train(options: TrainOptions) -> None:
    """Train, evaluate, and tell the launcher: progress lines, the timeline, the summary."""
    torch.set_num_threads(options.threads)
    corpus = Corpus(options.data, options.context)
    pipe = Pipeline(
        gpt_layers(options.gpt),
        next_byte_loss,
        optimizer=partial(AdamW, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.01),
        lr_scheduler=partial(_warmup_and_cosine, steps=options.steps),
        **options.for_pipeline(),
    )
    recorder = Recorder(pipe, _RECORDED_STEPS)
    if pipe.worker == 0:
        _tell_plan(options, corpus, pipe)
    losses, times = _loop(options, corpus, pipe)
    held_out = _held_out_loss(options, corpus, pipe)
    trace = recorder.collect()
    if options.save:
        Path(options.save).parent.mkdir(parents=True, exist_ok=True)
        pipe.save(options.save)
    if trace is not None:
        shards = [pipe.shards(worker) for worker in range(pipe.num_workers)]
        _tell_summary(options, corpus, trace, shards, losses, times, held_out)
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


def _loop(options: TrainOptions, corpus: Corpus, pipe: Pipeline) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    times: list[float] = []
    for step in range(options.steps):
        begin = time.perf_counter()
        losses.append(pipe.step(corpus.batch(options.batch, options.seed, step)))
        times.append(time.perf_counter() - begin)
        if pipe.worker == 0:
            link.tell(
                kind="progress",
                step=step + 1,
                steps=options.steps,
                loss=losses[-1],
                tokens_per_s=options.batch * options.context / times[-1],
                step_ms=1e3 * times[-1],
            )
        if pipe.stopped:
            break
    return losses, times


def _held_out_loss(options: TrainOptions, corpus: Corpus, pipe: Pipeline) -> float:
    weighted = [
        (pipe.evaluate(batch), len(batch[0])) for batch in corpus.held_out_batches(options.batch, _HELD_OUT_BATCHES)
    ]
    return sum(loss * rows for loss, rows in weighted) / sum(rows for _, rows in weighted)


def _tell_plan(options: TrainOptions, corpus: Corpus, pipe: Pipeline) -> None:
    cut = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in pipe.partition.ranges)
    link.tell(
        kind="text",
        text=f"byte-level GPT of {options.gpt.num_layers} layers, cut into layers {cut}; "
        f"{corpus.num_bytes / 1e6:.1f} MB of text, a tenth held out; "
        f"{options.schedule} on {pipe.num_workers} workers, {options.microbatches} microbatches a step",
    )


def _tell_summary(
    options: TrainOptions,
    corpus: Corpus,
    trace: Trace,
    shards: Sequence[Sequence[Sequence[int]]],
    losses: list[float],
    times: list[float],
    held_out: float,
) -> None:
    batches = corpus.held_out_batches(options.batch, _HELD_OUT_BATCHES)
    planned = simulate(trace.spec, trace.cost())
    middle = sorted(times)[len(times) // 2]
    one_machine = link.present()  # a launcher starts local workers
    cores = len(os.sched_getaffinity(0)) if one_machine and options.device == "cpu" else None
    lost = attribute(trace, shards, cores)
    if options.trace:
        Path(options.trace).parent.mkdir(parents=True, exist_ok=True)
        trace.write_chrome(options.trace, options.device)
    if options.html:
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        Path(options.html).write_text(planned_and_actual(planned, trace), encoding="utf-8")
    summary: dict[str, Any] = {
        **asdict(options),
        "loss": losses[-1],
        "steps": len(losses),
        "step_ms": 1e3 * middle,
        "tokens_per_s": options.batch * options.context / middle,
        "bubble_planned": planned.bubble,
        "bubble_actual": trace.bubble,
        "held_out_loss": held_out,
        "bigram_loss": corpus.bigram_loss(batches),
        "peak_activations": list(planned.peak_activations),
        "clock_error_ms": trace.clock_error_ms,
        "lost": lost.as_json(),
    }
    picture = draw(trace.last_steps(1), trace.spec.num_workers, width=100)
    exit_code = int(options.beat_bigram and held_out >= summary["bigram_loss"])
    link.tell(kind="summary", summary=summary, timeline=picture.markup, exit_code=exit_code)
