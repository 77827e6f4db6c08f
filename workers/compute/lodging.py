"""Weights of a stage on a worker that has several of its replicas: one replica updates them, the rest are its guests.

Each replica has gradients of its own. Those of one are in place at a time, and those of the others are kept apart, so
a guest costs the memory of its gradients and no second copy of weights or optimizer state.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from .gradients import GradientSets


class Lodger(Protocol):
    """A replica that shares weights."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights."""


class Lodging:
    """The replicas of a stage that share weights.

    Args:
        host: the replica that has the optimizer.
    """

    def __init__(self, host: Lodger) -> None:
        self.host = host
        self._gradients = GradientSets(host)

    def turn(self, shard: Lodger) -> Lodger:
        """Let the weights have the gradients of a replica; return the replica whose gradients they had."""
        return self._gradients.turn(shard, shard.parameters())
