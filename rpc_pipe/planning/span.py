"""One action of one worker in time: what is simulated, traced and drawn."""

from __future__ import annotations

from typing import NamedTuple

from ..dependency import Action


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float
