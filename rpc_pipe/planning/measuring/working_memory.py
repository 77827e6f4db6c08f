"""The memory that blocks allocate while they run, temporary buffers of kernels included, as the device counts it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...workers.compute.split_backward import Saved, backward_inputs
from ...workers.transport.payload import Tree

#: runs a forward; returns the leaves whose gradients backward computes, the next block's input, backward's roots
Forward = Callable[[], tuple[list[Tensor], Tree, list[Tensor]]]
#: name of the profiler event around each action
_EVENT = "rpc_pipe.planning.peak_working_bytes"


def peak_working_bytes(runs: Sequence[tuple[Forward, Sequence[nn.Parameter]]]) -> list[list[float]]:
    """Return, by block, the peak bytes of F, B, F, I and W above those at the start of each.

    Gradients of weights exist already and are added to, as for all microbatches but the first.
    """
    if any(p.device.type == "cuda" for _, parameters in runs for p in parameters):
        return [list(_on_cuda(forward, parameters)) for forward, parameters in runs]
    peaks = _on_cpu(runs)
    return [peaks[at : at + 5] for at in range(0, len(peaks), 5)]


def begin_gradients(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Give the trained parameters gradients of 0, whose memory pages have been touched; return these parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 0.0)
    return trained


def _actions(forward: Forward, parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yield F, B, F, I and W of a block, to be called in turn."""
    trained = begin_gradients(parameters)
    made: list[tuple[list[Tensor], Tree, list[Tensor]]] = []
    yield lambda: made.append(forward())
    _, _, roots = made.pop()
    starts = [torch.ones_like(root) for root in roots]
    yield lambda: torch.autograd.backward(roots, starts) if roots else None
    saved = Saved()
    del roots
    with saved.hooks():
        yield lambda: made.append(forward())
    leaves, _, roots = made.pop()
    split = []
    yield lambda: split.append(backward_inputs(roots, list(starts), leaves, saved))
    yield lambda: split[0][1].run()
    for parameter in trained:
        parameter.grad = None


def _on_cuda(forward: Forward, parameters: Sequence[nn.Parameter]) -> Iterator[float]:
    for action in _actions(forward, parameters):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        yield float(torch.cuda.max_memory_allocated() - before)


def _on_cpu(runs: Sequence[tuple[Forward, Sequence[nn.Parameter]]]) -> list[float]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr that it begins and ends
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        for forward, parameters in runs:
            for action in _actions(forward, parameters):
                with torch.profiler.record_function(_EVENT):
                    action()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    windows = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _EVENT)
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda c: c[0])
    peaks, at = [], 0
    for begin, end in windows:
        while at < len(changes) and changes[at][0] < begin:
            at += 1
        first = at
        while at < len(changes) and changes[at][0] <= end:
            at += 1
        peaks.append(float(max(accumulate((amount for _, amount in changes[first:at]), initial=0))))
    return peaks
