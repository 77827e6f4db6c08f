"""What all workers know after a run: the loss or the outputs, put together from the last stage's hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..transport.payload import Payload, Tree, pack, unpack


@dataclass
class Losses:
    """Losses by microbatch as sums and weights: ragged microbatches and padding count right."""

    #: microbatch -> (sum of the loss as a scalar tensor, weight as a number or scalar tensor)
    parts: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    #: True if the loss function gave sums: gradients are then divided by the step's weight at the update
    summed: bool = False

    def pack(self, stop: bool) -> Payload:
        """Make the part that this worker tells all others. Stays on the device: no synchronisation."""
        sums = torch.stack([total.double() for total, _ in self.parts.values()])
        weights = [weight for _, weight in self.parts.values()]
        return pack({
            "microbatches": list(self.parts), "sums": sums, "weights": weights,
            "summed": self.summed, "stop": stop,
        })  # fmt: skip


class Result:
    """Collects the parts of all hosts of the last stage.

    Args:
        hosts: the workers that tell a part.
    """

    def __init__(self, hosts: Iterable[int]) -> None:
        self.missing = set(hosts)
        #: True if a host was asked to stop: all workers read the same parts, so all stop after the same step
        self.stop = False
        self.outputs: dict[int, Tree] = {}
        self._summed = False
        self._parts: dict[int, tuple[float, float]] = {}

    def add(self, host: int, payload: Payload) -> None:
        """Take in the part of `host`."""
        part = unpack(payload)
        self.missing.remove(host)
        self.stop |= part["stop"]
        self.outputs |= part.get("outputs", {})
        if "sums" in part:
            self._summed = part["summed"]
            numbers = zip(part["sums"].tolist(), map(float, part["weights"]), strict=True)
            self._parts |= dict(zip(part["microbatches"], numbers, strict=True))

    @property
    def divisor(self) -> float:
        """What summed gradients are divided by: the weight of the whole batch, or 1 if shares did it."""
        return self._weight() if self._summed else 1.0

    @property
    def loss(self) -> float | None:
        """Loss of the whole batch: sum over microbatches in their order, by weight; None without targets."""
        if not self._parts:
            return None
        total = sum(self._parts[m][0] for m in sorted(self._parts))
        if not self._summed:
            return total  # means come weighted by shares of 1, which as floats need not add up to 1
        return total / self._weight() if self._weight() else float("nan")

    def _weight(self) -> float:
        return sum(self._parts[m][1] for m in sorted(self._parts))


def pack_outputs(outputs: dict[int, Tree], stop: bool) -> Payload:
    """Make the part of a host that was asked for outputs."""
    return pack({"outputs": outputs, "stop": stop})
