"""An action in time: the common form of simulations, traces and drawings."""

from __future__ import annotations

from typing import NamedTuple

from ..dependency import Action


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float
