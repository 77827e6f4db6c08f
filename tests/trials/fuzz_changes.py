"""What a script changes by hand between two steps: `fuzz.py` does it to a pipeline and to one process alike."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from torch import nn


def drawn(number: int, steps: int) -> list[str]:
    """Return for each step of a case what is changed behind it; most cases change nothing."""
    draw = random.Random(f"changes of {number}")
    changes = ["", "freeze", "thaw", "load", "rate", "mode"] if draw.random() < 0.3 else [""]
    return [draw.choice(changes) for _ in range(steps)]


class ByHand:
    """Changes some of the layers that it is given, by their numbers alone, or an optimizer's rates."""

    def __init__(self) -> None:
        self._frozen: list[nn.Parameter] = []

    def change(self, what: str, draw: str, layers: Iterable[tuple[int, nn.Module]], optimizer: Any) -> None:
        """Do `what` is drawn; `draw`: of which the choice of layers is a function."""
        for group in optimizer.param_groups if what == "rate" and optimizer is not None else ():
            group["lr"] *= 1.5
        for layer in [layer for index, layer in layers if random.Random(f"{draw} {index}").random() < 0.5]:
            if what == "freeze":
                self._frozen += [p for p in layer.parameters() if p.requires_grad]
            if what == "mode":
                layer.train(not layer.training)
            if what == "load":
                state = layer.state_dict()
                layer.load_state_dict({n: t / 2 if t.is_floating_point() else t.clone() for n, t in state.items()})
        for parameter in self._frozen:
            parameter.requires_grad_(what == "thaw")
        self._frozen = [] if what == "thaw" else self._frozen
