"""What the workers of this host do when one has waited for too long, where no launcher tells. Loads without torch."""

from __future__ import annotations

from pathlib import Path

from .boards import Boards
from .rollcall import blame, roll_call, told_stacks, waits_for_unseen


def describe_stall(folder: Path) -> str:
    """Return the roll-call of the workers whose boards are in `folder`, and the stacks of the one that hangs."""
    boards = Boards(folder)
    news = boards.look()
    if not news.lives:
        return ""
    last = max(news.headers, key=lambda w: max((stage for stage, *_ in news.headers[w]["shards"]), default=0))
    lines = ["what the workers of this host do:", *(f"  {line}" for line in roll_call(news.lives, last, news.now_ns))]
    culprit = blame(news.lives, last)[-1]
    if waits_for_unseen(news.lives, culprit) is None:
        lines += told_stacks(culprit, boards.stacks(culprit))
    return "\n".join(lines)
