"""The cause of a failed attempt, in words. Loads without torch."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..tracing.board import Live, State
from ..tracing.stall_report import told_stacks, waits_for_unseen
from .job import FAILED

#: what a worker prints when TensorPipe has read garbage as a length
_GARBAGE = re.compile(r"std::bad_alloc|std::length_error|tensorpipe", re.IGNORECASE)
#: number of last lines shown of a worker that has died without a message
LAST_LINES = 5


class Cause(NamedTuple):
    """The cause of a failure, with its exit code."""

    title: str
    text: str
    code: int = FAILED


def of_death(
    worker: int, code: int, live: Live | None, lines: Sequence[str], *, rpc: bool, out_of_memory: bool
) -> Cause:
    """Return the cause when a worker's process has ended with `code`, as in `Popen.returncode`.

    Args:
        live: its last state; None: unknown.
        lines: its last printed lines.
        rpc: whether torch RPC carried its messages.
        out_of_memory: whether the system has killed processes for lack of memory since the run began.
    """
    doing = "; what it was doing is not known: it has no board" if live is None else f" while {live}"
    text = f"{killed(worker, code) if code < 0 else f'worker {worker} ended with exit code {code}'}{doing}"
    if code == 0:
        text += "; it may call os._exit or sys.exit"
    if code == -signal.SIGKILL and out_of_memory:
        text += "; the system has killed processes meanwhile, as it was out of memory"
    if code == -signal.SIGABRT and rpc and any(map(_GARBAGE.search, lines)):
        text += (
            "; TensorPipe aborts when what comes to a worker's port is not its protocol, such as an HTTP request: see "
            "SECURITY.md; --transport zmq refuses strangers"
        )
    if lines and code:
        text += "\nit printed last:\n" + "\n".join(f"  {line}" for line in lines)
    return Cause(f"worker {worker} died", text)


def killed(worker: int, code: int) -> str:
    """Return the signal that has killed a worker's process, as text; its `code` is below 0."""
    name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
    return f"worker {worker} was killed by signal {-code}{name}"


def of_stall(
    told: str, culprit: int | None, lives: Mapping[int, Live], roll_call: Sequence[str], stacks: str, now_ns: int
) -> Cause:
    """Return the cause when a worker has reported (`told`) that it waited for too long.

    Args:
        culprit: the worker at the end of the chain of waits.
        stacks: of the culprit's threads.
    """
    live = lives.get(culprit) if culprit is not None else None
    if live is None:
        return Cause("a worker waits in vain", told)
    for_s = max(0.0, (now_ns - live.since_ns) / 1e9)
    if culprit is not None and (unseen := waits_for_unseen(lives, culprit)) is not None:
        title = f"worker {unseen} has not begun"
        text = f"worker {unseen} has made no pipeline yet, and the others wait for it"
    elif live.state in (State.WAITING, State.LEFT):  # a worker that leaves now has waited as well
        title = "no worker goes on"
        text = (
            "each waits for another: they were called differently, as above, or the machine is overloaded, for which a "
            "higher stall_s waits"
        )
    elif live.state is State.STOPPED:
        title = f"worker {culprit} is stopped"
        text = f"worker {culprit} was stopped by a signal, as Ctrl-Z sends it, in step {live.step}"
    else:
        title, text = f"worker {culprit} hangs", f"worker {culprit} hangs: {live} for {for_s:.0f} s"
    lines = [text, told, "what the workers do:", *(f"  {line}" for line in roll_call), *told_stacks(culprit, stacks)]
    return Cause(title, "\n".join(lines))


def memory_kills() -> int:
    """Return the number of processes that the system has killed for lack of memory."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
