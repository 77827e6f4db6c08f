"""The causes of failures in words: which process failed, died or hangs, and why. Loads without torch."""

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..boards.board import Live, State, named
from ..boards.stall_report import waits_for_unseen
from .job import FAILED


class Cause(NamedTuple):
    """The cause of a failure, with its exit code."""

    title: str
    text: str
    code: int = FAILED


def of_death(who: str, code: int, live: Live | None, lines: Sequence[str], early: bool = False) -> Cause:
    """Return the cause when a worker's process has ended with `code`, as in `Popen.returncode`.

    Args:
        who: the worker's name.
        live: its last state; None: unknown.
        lines: its last printed lines.
        early: whether an elastic job could not continue yet.
    """
    text = f"{who} ended with exit code {code}"
    if code < 0:
        name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
        text = f"{who} was killed by signal {-code}{name}"
    text += "" if live is None else f" while {live}"
    if code == 0:
        text += "; it may call os._exit or sys.exit"
    if code == -signal.SIGKILL:
        text += "; the system does so when it is out of memory"
    if early and code < 0:
        text += "\n--elastic goes on without a worker when all have made their pipeline; --max-restarts starts again"
    if lines and code:
        text += "\nit printed last:\n" + "\n".join(f"  {line}" for line in lines)
    return Cause(f"{who} died", text)


def of_stall(
    told: str, culprit: int | None, lives: Mapping[int, Live], details: Sequence[str], now_ns: int, members: int = 1
) -> Cause:
    """Return the cause when a worker has reported a wait that took too long.

    Args:
        culprit: the worker at the end of the chain of waits.
        details: the current action of each worker, and the stacks of the culprit, line by line.
    """
    live = lives.get(culprit) if culprit is not None else None
    if live is None:
        return Cause("a worker waits in vain", told)
    assert culprit is not None
    for_s, who = max(0.0, (now_ns - live.since_ns) / 1e9), named(culprit, members)
    if (unseen := waits_for_unseen(lives, culprit)) is not None:
        title = f"{named(unseen, members)} has not begun"
        text = f"{named(unseen, members)} has made no pipeline yet, and the others wait for it"
    elif live.state in (State.WAITING, State.LEFT):  # a worker that leaves now has waited as well
        title = "no worker goes on"
        text = "each waits for another: called differently, as above, or overloaded, for which a higher stall_s waits"
    elif live.state is State.STOPPED:
        title = f"{who} is stopped"
        text = f"{who} was stopped by a signal, as Ctrl-Z sends it, in step {live.step}"
    else:
        title, text = f"{who} hangs", f"{who} hangs: {live.told(members)} for {for_s:.0f} s"
    return Cause(title, "\n".join([text, told, "what the workers do:", *details]))
