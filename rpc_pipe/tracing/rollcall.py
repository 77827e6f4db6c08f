"""Who does what on a stall: a line a worker, and the worker that the others wait for in the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from .board import Live, State

#: of a stack, so many of the newest are told
_FRAMES = 3


def roll_call(lives: Mapping[int, Live], last_host: int, now_ns: int) -> list[str]:
    """Return a line for each worker, and one with the chain of waits.

    Args:
        last_host: the worker that has the last stage, and so the result.
        now_ns: the workers' clock.
    """
    lines = [f"worker {worker} {live} for {duration(now_ns - live.since_ns)}" for worker, live in lives.items()]
    chain = blame(lives, last_host)
    names = " -> ".join(f"worker {worker}" for worker in chain)
    end = lives[chain[-1]]
    if (unseen := waits_for_unseen(lives, chain[-1])) is not None:
        lines.append(
            f"{names} -> worker {unseen}: everybody waits for worker {unseen}, of which nothing can be seen here: "
            "it has made no pipeline so far, or is on another host"
        )
    elif len(chain) > 1:
        if end.state is State.WAITING:
            # The checker has ruled out circles of a schedule's own.
            lines.append(f"{names}: each waits for the other, so a message has been lost")
        else:
            lines.append(f"{names}: everybody waits for worker {chain[-1]}, which is {end}")
    return lines


def told_stacks(worker: int | None, stacks: str) -> list[str]:
    """Return lines that tell the stacks of a worker, none if there are none."""
    lines = [f"  {line}" for line in stacks.splitlines()]
    return [f"stacks of worker {worker}, most recent call first:", *lines] if lines else []


def waits_for_unseen(lives: Mapping[int, Live], worker: int) -> int | None:
    """Return the worker that `worker` waits for, if that is none of those that can be seen."""
    live = lives[worker]
    return live.peer if live.state is State.WAITING and live.peer not in lives else None


def blame(lives: Mapping[int, Live], last_host: int) -> Sequence[int]:
    """Return a chain of workers, each waiting for the next, to the one that most waits end at."""
    chains = [_chain(lives, worker, last_host) for worker in lives]
    ends = Counter(chain[-1] for chain in chains)
    # Who has left may have waited in vain before.
    most = max(ends, key=lambda worker: (lives[worker].state is not State.LEFT, ends[worker], worker))
    return max((chain for chain in chains if chain[-1] == most), key=len)


def _chain(lives: Mapping[int, Live], worker: int, last_host: int) -> list[int]:
    chain = [worker]
    while lives[chain[-1]].state is State.WAITING:
        live = lives[chain[-1]]
        following = last_host if live.peer is None else live.peer
        if following == chain[-1] or following not in lives:
            break
        if following in chain:
            return [*chain, following]
        chain.append(following)
    return chain


def newest_frames(stacks: str, thread: int) -> str:
    """Say in a line where a thread is, from the stacks that faulthandler wrote."""
    current = next((block for block in stacks.split("\n\n") if f"{thread:#018x}" in block), "")
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', current)[:_FRAMES]
    return ", called from ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames)


def duration(ns: float) -> str:
    """Write a time as a reader wants it: 3 s, 2 min."""
    seconds = max(0.0, ns / 1e9)
    if seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
